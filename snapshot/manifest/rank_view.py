"""One rank's view of a manifest: its own and the shared entries, under logical paths without a rank."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.paths import decode_component, encode_key
from snapshot.manifest.values import Entry


@dataclass(slots=True)
class RankView:
    """One rank's view: entries under logical paths, without a rank."""

    entries: dict[str, Any]
    """The rank's own entries, and those shared by all ranks."""
    elsewhere: dict[str, Any] = field(default_factory=dict)
    """Sharded and replicated entries that only other ranks had, but that can be requested by name."""
    withheld: dict[str, str] = field(default_factory=dict)
    """Leaves that are not available to this rank -> reason."""
    gone: list[str] = field(default_factory=list)
    """Leaves of ranks that no longer exist, under the manifest's paths."""
    unknown: list[str] = field(default_factory=list)
    """Names to rename that this rank does not have."""


def make_rank_view(
    manifest: Mapping[str, Any], rank: int, saved: int, now: int, are_equal: Callable[[str], bool] | None = None
) -> RankView:
    """Return the view of rank `rank` of `now` on a snapshot of `saved` ranks.

    The view has the rank's own entries, and the replicated and sharded ones of all. A rank that did not exist gets rank
    0's containers with only the shared entries. The state of a single-rank snapshot is visible to all ranks.

    `are_equal`: returns True if all ranks stored the same value at a path, which then counts as shared.
    """
    if saved == 1:
        entries = {path[2:]: entry for path, entry in manifest.items() if path.startswith("0/")}
        if len(entries) != len(manifest):
            raise CorruptSnapshotError("the manifest of a single rank must not have entries of other ranks")
        _check_widths(entries, len(manifest))
        return RankView(entries)
    view = RankView({})
    prefix, cut = f"{rank}/", len(str(rank)) + 1
    sharded: dict[str, list[tuple[int, Any]]] = {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        if entry.is_sharded:
            sharded.setdefault(logical, []).append((_parse_rank(path, number, saved), entry))
        elif entry.replicated:
            view.entries.setdefault(logical, entry)
        elif path.startswith(prefix):
            view.entries[path[cut:]] = entry
        elif rank >= saved and number == "0":
            if entry.is_container:
                view.entries[logical] = entry
            elif are_equal is not None and are_equal(logical):
                view.entries[logical] = msgspec.structs.replace(entry, replicated=True)
            else:
                view.withheld[logical] = "belongs to rank 0 alone"
        elif _parse_rank(path, number, saved) >= now and not entry.is_container:
            view.gone.append(path)
    _choose_sharded(view, sharded, rank)
    _check_widths(view.entries, len(manifest))
    _prune_containers(view, rank, saved)
    return view


def split_by_rank(manifest: Mapping[str, Any], saved: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the entries that all ranks share, and those of single ranks by the number in their paths.

    A view of both for one rank equals that of the whole manifest, and takes less time.
    """
    shared: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for path, entry in manifest.items():
        held = shared if saved == 1 or entry.is_shared else own.setdefault(path.partition("/")[0], {})
        held[path] = entry
    return shared, own


def _check_widths(entries: Mapping[str, Any], most: int) -> None:
    """Raise if containers claim more children than there are entries, or paths are too deep.

    The names alone could exhaust the memory.
    """
    if max(map(str.count, entries, repeat("/")), default=0) > DEEPEST + 1:
        raise CorruptSnapshotError(f"the manifest is nested more than {DEEPEST} deep")
    if sum(max(0, entry.width) for entry in entries.values() if entry.is_container) > most:
        raise CorruptSnapshotError(f"the manifest's containers have more children than its {most} entries")


def is_rank(number: str, saved: int) -> bool:
    """Return True if a path's first component is a rank's number in canonical form."""
    return bool(_RANK.fullmatch(number)) and int(number) < saved


def _parse_rank(path: str, number: str, saved: int) -> int:
    if not is_rank(number, saved):
        raise CorruptSnapshotError(f"{path[:200]!r} must begin with a rank below {saved}")
    return int(number)


def _choose_sharded(view: RankView, sharded: Mapping[str, list[tuple[int, Any]]], rank: int) -> None:
    """Choose, among sharded tensors of one name (such as one per pipeline stage), the one that this rank had."""
    for path, found in sharded.items():
        mine = [entry for number, entry in found if number == rank or entry.is_held_by(rank)]
        if not mine and path in view.entries:
            continue  # this rank had its own object under that name
        if len(found) > 1 and not mine:
            view.withheld[path] = f"a different tensor on each of the ranks {', '.join(str(n) for n, _ in found)}"
        else:
            view.entries[path] = mine[0] if mine else found[0][1]


def _prune_containers(view: RankView, rank: int, saved: int) -> None:
    """Remove missing children from the containers, and entries that no container names from the view."""
    named: set[str] = set()
    for path, entry in list(view.entries.items()):
        if not entry.is_container:
            continue
        components = entry.components()
        here = [f"{path}/{name}" for name in components]
        named.update(here)
        if rank >= saved and entry.is_keyed and not all(below in view.entries for below in here):
            for below in here:
                if below not in view.entries:
                    view.withheld.setdefault(below, "belongs to other ranks alone")
            view.entries[path] = entry.without_children(below not in view.entries for below in here)
    unnamed = {path for path in view.entries if path not in named and "/" in path}
    if any(view.entries[path].is_container for path in unnamed):  # removed with their contents
        for path in sorted(view.entries):
            if path.rpartition("/")[0] in unnamed:
                unnamed.add(path)
    for path in [path for path in view.entries if path in unnamed]:
        view.elsewhere[path] = view.entries.pop(path)


def adopt_entry(entries: dict[str, Any], path: str, entry: Entry) -> None:
    """Add an entry to a rank's entries, and its name to its parent dict."""
    entries[path] = entry
    while "/" in path:
        above, _, name = path.rpartition("/")
        parent = entries.get(above)
        if parent is None:
            parent = DictEntry([])
        if not parent.is_keyed or name in parent.components():
            return
        key = decode_component(name)
        entries[above] = msgspec.structs.replace(parent, keys=[*parent.keys, encode_key(key)])
        if parent.keys:
            return
        path = above


def remove_entry(entries: dict[str, Any], path: str) -> None:
    """Remove a leaf from a rank's entries, and its name from its parent dict."""
    del entries[path]
    above, _, name = path.rpartition("/")
    parent = entries[above]
    entries[above] = parent.without_children(each == name for each in parent.components())


def group_by_key(view: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a view's entries, grouped by the (encoded) key of the app state."""
    grouped: dict[str, dict[str, Any]] = {}
    prefix = ""
    group: dict[str, Any] | None = None
    for path, entry in view.items():
        if group is None or not path.startswith(prefix):
            key = path.partition("/")[0]
            prefix = key + "/"
            group = grouped.setdefault(key, {})
        group[path] = entry
    return grouped


MOST_RANKS = 1 << 17
"""Maximum number of ranks that are treated one by one, since the number in a manifest may be wrong."""
DEEPEST = 500
"""Maximum nesting of containers."""
_RANK = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")


def rename_view(view: RankView, change: Callable[[str], str]) -> RankView:
    """Return a view under other names."""
    elsewhere = {change(path): entry for path, entry in view.elsewhere.items()}
    withheld = {change(path): why for path, why in view.withheld.items()}
    return RankView(rename_entries(view.entries, change), elsewhere, withheld, view.gone, view.unknown)


def rename_entries(view: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the entries with leaves and containers renamed; the containers' keys follow.

    A mapping renames exact paths, and whole containers with everything below them.
    """
    made: dict[str, Any] = {}
    ints = {
        f"{path}/{name}"
        for path, entry in view.items()
        if entry.is_keyed
        for name, key in zip(entry.components(), entry.keys, strict=True)
        if type(key) is int
    }
    kinds: dict[str, Callable[[str], Any]] = {}
    for path, entry in view.items():
        name = change(path)
        if path in ints and _INT.fullmatch(name.rpartition("/")[2]):
            kinds[name] = int
        if name in made:
            raise RestoreError(f"rename gives two entries the name {name!r}", [f"{path}: also renamed to {name!r}"])
        made[name] = entry
    for path in list(made):  # parents that a new name needs
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
        if entry.is_keyed:
            old = dict(zip(entry.components(), entry.keys, strict=True))
            names = children.get(path, [])
            if list(old) != names:
                keys = [old.get(name, kinds.get(f"{path}/{name}", decode_component)(name)) for name in names]
                made[path] = entry.with_keys(keys)
    return made


def resolve_path(manifest: Mapping[str, Any], saved: int, path: str, where: str = "") -> str:
    """Return the manifest's path of an object that is named with or without its rank.

    A path of the manifest itself has priority, so a key that is a number remains reachable. Without a rank, raise
    RestoreError if several ranks have separate objects of that name.
    """
    if path in manifest or is_rank(path, saved):
        return path
    number, _, logical = path.partition("/")
    if logical and is_rank(number, saved):
        shared = [each for each in find_rank_paths(manifest, saved, logical) if manifest[each].is_shared]
        mine = [each for each in shared if manifest[each].is_sharded and manifest[each].is_held_by(int(number))]
        held = mine or shared
        if len(held) == 1:
            return held[0]
    found = find_rank_paths(manifest, saved, path)
    before = f"{where}: " if where else ""
    if not found:
        ranked = logical and is_rank(number, saved)
        names = manifest if ranked else dict.fromkeys(each.partition("/")[2] for each in manifest)
        raise RestoreError(f"{before}{path!r} not found; {suggest_names(path, names)}", [path])
    if len(found) > 1 and not _is_one_container(manifest, found, path):
        listed = ", ".join(map(repr, found[:10])) + (f" and {len(found) - 10:,} more" if len(found) > 10 else "")
        raise RestoreError(
            f"{before}{path!r} needs a rank: {len(found):,} ranks have one each; name one of {listed}",
            found,
        )
    return found[0]


def has_path(manifest: Mapping[str, Any], saved: int, path: str) -> bool:
    """Return True if a manifest has an object of a name, with or without its rank."""
    number, _, logical = path.partition("/")
    return bool(
        find_rank_paths(manifest, saved, path)
        or (logical and is_rank(number, saved) and find_rank_paths(manifest, saved, logical))
    )


def find_rank_paths(manifest: Mapping[str, Any], saved: int, logical: str) -> list[str]:
    """Return the paths of the manifest for a path with or without its rank."""
    if logical in manifest:
        return [logical]
    if saved > len(manifest):  # a wrong number of ranks must not cost time
        found = {path.partition("/")[0] for path in manifest if path.partition("/")[2] == logical}
        return [f"{rank}/{logical}" for rank in sorted(int(each) for each in found if is_rank(each, saved))]
    return [path for path in (f"{rank}/{logical}" for rank in range(saved)) if path in manifest]


def _is_one_container(manifest: Mapping[str, Any], found: list[str], logical: str) -> bool:
    """Return True if containers of several ranks are equal, and have only entries that these ranks share."""
    if not all(manifest[path].is_container for path in found):
        return False
    held: dict[str, dict[str, Any]] = {path.partition("/")[0]: {logical: manifest[path]} for path in found}
    for path, entry in manifest.items():
        number, _, below = path.partition("/")
        if not below.startswith(f"{logical}/"):
            continue
        if is_leaf(entry) and not entry.is_shared:
            return False
        if entry.is_container:
            held.setdefault(number, {})[below] = entry
    first, *others = held.values()
    return all(each == first for each in others)


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a hint for a missing name: the most similar names."""
    names = sorted(names)
    if len(names) > 2000:
        start = name.rpartition("/")[0]
        names = [each for each in names if each.startswith(start)][:2000] or names[:2000]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"the names are {', '.join(names[:10])}{', …' if len(names) > 10 else ''}" if names else "there are no names"
