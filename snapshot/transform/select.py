"""Selection of entries by globs, renaming, and a single rank's view of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.errors import RestoreError, UnsafeObjectError
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.pickled import TRUST, is_refused
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.loading.open import expect_files
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, check_tensor, find_locations
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.paths import add_parents
from snapshot.manifest.rank_view import RankView, make_rank_view, rename_entries, suggest_names
from snapshot.plan.names import Rename, compile_rename, find_unmatched, matcher
from snapshot.text import listed


def chosen_of_ranks(
    manifest: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the selected entries of a manifest under their new names.

    Entries that several ranks share are listed under one of them, and the containers of all ranks name them.
    """
    union: dict[str, Any] = {}
    ranks: dict[str, dict[str, Any]] = {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        ranks.setdefault(number, {})[logical] = entry
        union.setdefault(logical, entry)
    change = change_of(rename, union)
    made: dict[str, Any] = {}
    for number, own in ranks.items():
        seen = dict(own)
        rest = list(own)
        while rest:
            path = rest.pop()
            entry = seen[path]
            for name in entry.components() if isinstance(entry, e.Container) else ():
                below = f"{path}/{name}"
                if below not in seen and below in union:
                    seen[below] = union[below]
                    rest.append(below)
        kept = _select_paths(seen, select, exclude)
        known = {change(path): path in own for path in kept}
        for path, entry in _rename_paths(kept, change).items():
            if known.get(path, True):  # its own, or a container that a new name implies
                made[f"{number}/{path}"] = entry
    return made


def choose_entries(
    entries: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the selected entries of one view under their new names."""
    return _rename_paths(_select_paths(entries, select, exclude), change_of(rename, entries))


def change_of(rename: Rename | None, known: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the renaming function. Raise if a name does not exist."""
    if rename is None:
        return str
    change, unmatched_names = compile_rename(rename, known)
    if unmatched_names:
        lines = [f"{name} is not in the checkpoint; {suggest_names(name, known)}" for name in unmatched_names]
        raise RestoreError(f"rename does not fit:{listed(lines)}", lines)
    return change


def _select_paths(entries: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    if not (select or exclude):
        return dict(entries)
    included, excluded = matcher(select or ["**"]), matcher(exclude)
    leaves = {path for path, entry in entries.items() if is_leaf(entry) and included(path) and not excluded(path)}
    return _with_containers(entries, leaves)


def expect_something(entries: Mapping[str, Any]) -> None:
    """Raise if nothing is selected."""
    if not entries:
        raise RestoreError("the selection is empty")


def _rename_paths(entries: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    if change is str:
        return entries
    for path in entries:
        name = change(path)
        if not name or "" in name.split("/"):
            raise RestoreError(f"{path}: rename must give it a valid path, got {name!r}", [path])
    made = rename_entries(entries, change)
    held = Counter(path.rpartition("/")[0] for path in made)
    for path, entry in made.items():
        above = path.rpartition("/")[0]
        if above and not isinstance(made[above], e.Container):
            raise RestoreError(f"{path}: rename moves it below {above}, which is not a container", [path])
        whole = isinstance(entry, e.Container) and all(f"{path}/{name}" in made for name in entry.components())
        if isinstance(entry, e.Container) and not (whole and held[path] == entry.width):
            raise RestoreError(f"{path}: rename must not add or remove elements of a sequence", [path])
    return made


def _with_containers(entries: Mapping[str, Any], leaves: set[str]) -> dict[str, Any]:
    """Return leaves with their containers, without the containers' other contents."""
    needed = leaves | add_parents(leaves)
    kept = {}
    for path, entry in entries.items():
        if path not in needed:
            continue
        kept[path] = entry
        if isinstance(entry, e.Container) and entry.width:
            gone = [f"{path}/{name}" not in needed for name in entry.components()]
            if any(gone) and not isinstance(entry, e.DictEntry):
                raise RestoreError(f"{path}: a sequence can only be selected whole or not at all", [path])
            kept[path] = entry.without_children(gone)
    return kept


def expect_matches(document: Document, select: Sequence[str], exclude: Sequence[str]) -> None:
    """Raise if a glob matches nothing."""
    paths = [path.partition("/")[2] for path in document.manifest]
    missing = find_unmatched([*select, *exclude], paths) if select or exclude else []
    if missing:
        raise RestoreError(f"the glob {missing[0]!r} matches nothing in the checkpoint", missing)


def selected_locations(document: Document, select: Sequence[str], exclude: Sequence[str]) -> set[str]:
    """Return the files to check before a selection is read: all of the snapshot, and the needed ones of its base."""
    found = find_locations(document.manifest, document.files)
    if document.base is None:
        return found
    wanted, unwanted = matcher(select or ["**"]), matcher(exclude)
    chosen = {
        path: entry
        for path, entry in document.manifest.items()
        if wanted(path.partition("/")[2]) and not unwanted(path.partition("/")[2])
    }
    return (found & document.own_files.keys()) | find_locations(chosen, document.files)


def seen_by_rank(document: Document, select: Sequence[str], exclude: Sequence[str], rename: Rename | None) -> RankView:
    """Return rank 0's view of a checkpoint, with all sharded and shared entries.

    `gone` has the entries that only other ranks had.
    """
    expect_matches(document, select, exclude)
    view = make_rank_view(document.manifest, 0, document.world_size, 1)
    wanted, unwanted = matcher(select or ["**"]), matcher(exclude)
    gone = [path for path in view.gone if wanted(path.partition("/")[2]) and not unwanted(path.partition("/")[2])]
    kept = choose_entries(view.entries, select, exclude, rename)
    if select or exclude:
        expect_something(kept)
    return RankView(kept, gone=gone)


def expect_sound(entries: Mapping[str, Any], document: Document) -> None:
    """Raise for invalid tensor entries, before their bytes are copied part by part."""
    for path, entry in entries.items():
        held: Any = [entry] if isinstance(entry, e.TENSORS) else []
        if isinstance(entry, e.NDArrayEntry):
            held = [entry.data]
        elif isinstance(entry, e.TensorPartsEntry):
            held = entry.parts.values()
        for tensor in held:
            check_tensor(path, tensor, document.files)


class Objects:
    """The values of objects that are stored outside the manifest."""

    def __init__(self, session: Session, document: Document, *, allow_pickle: bool, verify: bool) -> None:
        self._session = session
        self._document = document
        self._allow_pickle = allow_pickle
        self._verify = verify

    def read(self, entries: Mapping[str, Any], *, all_or_none: bool = True) -> dict[str, Any]:
        """Return the values of entries.

        If not `all_or_none`, skip entries that need a pickle. Otherwise `UnsafeObjectError` names all of them.
        """
        refused = [
            f"{path}: {entry.obj_type}"
            for path, entry in entries.items()
            if is_refused(entry) and not self._allow_pickle
        ]
        if refused:
            raise UnsafeObjectError(
                f"{self._session.url}: some objects can only be read by running a pickle; leave them out with "
                f"exclude=[...], or {TRUST}:{listed(refused)}"
            )
        run(expect_files(self._session, self._document, find_locations(entries, self._document.files)))
        read_plan = ReadPlan(self._document.files, allow_pickle=self._allow_pickle)
        for path, entry in entries.items():
            read_plan.new(path, entry)
        read_plan.execute(self._session, verify=self._verify, all_or_none=all_or_none)
        return read_plan.values

    def bytes_of(self, entries: Mapping[str, e.ObjectEntry]) -> dict[str, bytearray]:
        """Return the stored bytes of objects."""
        return self.read(
            {path: msgspec.structs.replace(each, serializer="bytearray") for path, each in entries.items()}
        )


def is_leaf_value(entry: e.Entry) -> bool:
    """Return True if an entry is neither a container nor a tensor."""
    return not isinstance(entry, (e.Container, *e.TENSORS))


def is_foreign_object(document: Document, entry: e.Entry) -> bool:
    """Return True if an entry is an object from another library, which may hold plain values."""
    return isinstance(entry, e.ObjectEntry) and isinstance(document, ForeignDocument)


def places_of(entry: e.AnyTensor) -> list[tuple[Any, ...]]:
    """Return the stored location and form of each box. It is equal for two entries of the same stored values."""
    if isinstance(entry, e.MappedTensorEntry):
        return [(part.grid, *places_of(part.entry)) for part in entry.parts]
    return [(box, each.location, each.byte_range, each.extra, each.serializer) for box, each in entry.pieces()]


def clean_extra(entry: e.AnyTensor) -> e.Extra | None:
    """Return an entry's `extra` without the fields that only other formats need."""
    if entry.extra is None:
        return None
    kept = msgspec.structs.replace(entry.extra, strides=None, storage_offset=None)
    return None if kept == e.PLAIN else kept
