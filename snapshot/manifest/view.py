"""What one rank sees of a manifest: its own entries and those that are shared, under logical paths without a rank."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.manifest.entries import Container, DictEntry, OrderedDictEntry
from snapshot.manifest.paths import decode_key, tagged_keys, uncomponent


def rank_view(manifest: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """The entries that concern a rank: its own, and the replicated and sharded ones of all."""
    prefix = f"{rank}/"
    cut = len(prefix)
    if world_size == 1 and rank == 0:
        view = {path[cut:]: entry for path, entry in manifest.items() if path.startswith(prefix)}
        if len(view) != len(manifest):
            raise CorruptSnapshotError("the manifest of one rank holds entries of others")
        return view
    own = prefix if rank < world_size else "0/"
    view = {}
    for path, entry in manifest.items():
        shared = getattr(entry, "replicated", False) or hasattr(entry, "shards")
        if path.startswith(own):
            if rank < world_size or shared or isinstance(entry, Container):
                view[path[len(own) :]] = entry
        elif shared and path.startswith("0/"):
            view.setdefault(path[2:], entry)
    return view


def by_key(view: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A view's entries, by the app state's key (encoded) that they belong to."""
    grouped: dict[str, dict[str, Any]] = {}
    prefix, group = "\0", {}
    for path, entry in view.items():
        if not path.startswith(prefix):
            key = path.partition("/")[0]
            prefix = key + "/"
            group = grouped.setdefault(key, {})
        group[path] = entry
    return grouped


Rename = Mapping[str, str] | Callable[[str], str]


_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")


def renamed(view: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """A view whose leaves and containers stand under other names; the containers' keys follow.

    A mapping renames exact paths, and whole containers with all that is beneath them.
    """
    change = rename if callable(rename) else _by_mapping(rename, view)
    made: dict[str, Any] = {}
    ints = {
        f"{path}/{name}"
        for path, entry in view.items()
        if isinstance(entry, DictEntry)
        for name, key in zip(entry.components(), entry.keys, strict=True)
        if type(key) is int
    }
    kinds: dict[str, Callable[[str], Any]] = {}
    for path, entry in view.items():
        name = change(path)
        if path in ints and _INT.fullmatch(name.rpartition("/")[2]):
            kinds[name] = int
        if name in made:
            raise RestoreError(f"rename gives two entries the name {name!r}", [f"{path}: renamed to {name!r} as well"])
        made[name] = entry
    for path in list(made):  # parents that a new name supposes
        parent = path.rpartition("/")[0]
        while parent and parent not in made:
            made[parent] = DictEntry([])
            parent = parent.rpartition("/")[0]
    children: dict[str, list[str]] = {}
    for path in made:
        parent, _, name = path.rpartition("/")
        if parent:
            children.setdefault(parent, []).append(name)
    for path, entry in made.items():
        if isinstance(entry, DictEntry):
            old = dict(zip(entry.components(), entry.keys, strict=True))
            names = children.get(path, [])
            if list(old) != names:
                keys = [old.get(name, kinds.get(f"{path}/{name}", uncomponent)(name)) for name in names]
                tagged = tagged_keys(map(decode_key, keys)) or None
                changes: dict[str, Any] = {"keys": keys, "tagged": tagged}
                if isinstance(entry, OrderedDictEntry):
                    changes["module_versions"] = None  # they stand under the old names
                made[path] = msgspec.structs.replace(entry, **changes)
    return made


def _by_mapping(rename: Mapping[str, str], view: Mapping[str, Any]) -> Callable[[str], str]:
    unknown = [name for name in rename if name not in view]
    if unknown:
        hints = [f"{name}: {nearest(name, view)}" for name in unknown]
        raise RestoreError(f"rename names what the snapshot does not hold: {'; '.join(hints)}", hints)

    def change(path: str) -> str:
        prefix = path
        while prefix:
            if prefix in rename:
                return rename[prefix] + path[len(prefix) :]
            prefix = prefix.rpartition("/")[0]
        return path

    return change


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a name that is not there: the names that look most like it."""
    names = list(names)
    if len(names) > 2000:
        start = name.rpartition("/")[0]
        names = [each for each in names if each.startswith(start)][:2000] or names[:2000]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(sorted(names)[:5])} ..."
