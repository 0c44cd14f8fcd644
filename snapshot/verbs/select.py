"""What of a checkpoint is copied, and under which names: selected by globs, renamed, and read by one rank's eyes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.errors import RestoreError, UnsafeObjectError
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.pickled_objects import TRUST
from snapshot.formats.unpickling import is_refused
from snapshot.load.open import expect_files
from snapshot.load.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.counting import is_leaf
from snapshot.manifest.document import Document
from snapshot.manifest.paths import add_parents
from snapshot.manifest.rank_view import RankView, make_rank_view, rename_entries, suggest_names
from snapshot.manifest.validate import check_tensor, find_locations
from snapshot.plan.globs import find_unmatched, matcher
from snapshot.plan.renaming import Rename, compile_rename
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.text import listed


def chosen_of_ranks(
    manifest: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the entries of a manifest that are wanted, under the names that are wanted. What several ranks share
    stands under one of them, and the containers of all name it."""
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
            if known.get(path, True):  # its own, or a container that a new name supposes
                made[f"{number}/{path}"] = entry
    return made


def choose_entries(
    entries: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the entries of one view that are wanted, under the names that are wanted."""
    return _rename_paths(_select_paths(entries, select, exclude), change_of(rename, entries))


def change_of(rename: Rename | None, known: Mapping[str, Any]) -> Callable[[str], str]:
    """Return what gives a path its new name. Raises for a name that is not there."""
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
    """Raise where everything was left out."""
    if not entries:
        raise RestoreError("nothing is left of what was selected")


def _rename_paths(entries: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    if change is str:
        return entries
    for path in entries:
        name = change(path)
        if not name or "" in name.split("/"):
            raise RestoreError(f"{path}: rename gives it the name {name!r}, which is not a path", [path])
    made = rename_entries(entries, change)
    held = Counter(path.rpartition("/")[0] for path in made)
    for path, entry in made.items():
        above = path.rpartition("/")[0]
        if above and not isinstance(made[above], e.Container):
            raise RestoreError(f"{path}: rename puts it below {above}, which holds nothing", [path])
        whole = isinstance(entry, e.Container) and all(f"{path}/{name}" in made for name in entry.components())
        if isinstance(entry, e.Container) and not (whole and held[path] == entry.width):
            raise RestoreError(f"{path}: rename took elements out of a sequence, or added some", [path])
    return made


def _with_containers(entries: Mapping[str, Any], leaves: set[str]) -> dict[str, Any]:
    """Leaves, and the containers that they are in, without what else was in these."""
    needed = leaves | add_parents(leaves)
    kept = {}
    for path, entry in entries.items():
        if path not in needed:
            continue
        kept[path] = entry
        if isinstance(entry, e.Container) and entry.width:
            gone = [f"{path}/{name}" not in needed for name in entry.components()]
            if any(gone) and not isinstance(entry, e.DictEntry):
                raise RestoreError(f"{path}: a sequence can only be taken whole: select all of it, or nothing", [path])
            kept[path] = entry.without_children(gone)
    return kept


def expect_matches(document: Document, select: Sequence[str], exclude: Sequence[str]) -> None:
    """Raise where a glob matches nothing: it was meant to."""
    paths = [path.partition("/")[2] for path in document.manifest]
    missing = find_unmatched([*select, *exclude], paths) if select or exclude else []
    if missing:
        raise RestoreError(f"the glob {missing[0]!r} matches nothing in the checkpoint", missing)


def seen_by_rank(document: Document, select: Sequence[str], exclude: Sequence[str], rename: Rename | None) -> RankView:
    """Return what rank 0 sees of a checkpoint, with all that is sharded or shared; `gone` is what only other ranks
    had."""
    expect_matches(document, select, exclude)
    view = make_rank_view(document.manifest, 0, document.world_size, 1)
    wanted, unwanted = matcher(select or ["**"]), matcher(exclude)
    gone = [path for path in view.gone if wanted(path.partition("/")[2]) and not unwanted(path.partition("/")[2])]
    kept = choose_entries(view.entries, select, exclude, rename)
    if select or exclude:
        expect_something(kept)
    return RankView(kept, gone=gone)


def expect_sound(entries: Mapping[str, Any], document: Document) -> None:
    """Raise for a tensor that cannot be what its entry says: all of it is read part by part, and copied as it is."""
    for path, entry in entries.items():
        held: Any = [entry] if isinstance(entry, e.TENSORS) else []
        if isinstance(entry, e.NDArrayEntry):
            held = [entry.data]
        elif isinstance(entry, e.TensorPartsEntry):
            held = entry.parts.values()
        for tensor in held:
            check_tensor(path, tensor, document.files)


class Objects:
    """The values of what is neither a tensor nor in the manifest itself."""

    def __init__(self, session: Session, document: Document, *, allow_pickle: bool, verify: bool) -> None:
        self._session = session
        self._document = document
        self._allow_pickle = allow_pickle
        self._verify = verify

    def read(self, entries: Mapping[str, Any], *, all_or_none: bool = True) -> dict[str, Any]:
        """Return the values of entries; or of those that are read without running a pickle. `UnsafeObjectError` names
        all that only a pickle would make."""
        refused = [
            f"{path}: {entry.obj_type}"
            for path, entry in entries.items()
            if is_refused(entry) and not self._allow_pickle
        ]
        if refused:
            raise UnsafeObjectError(
                f"{self._session.url}: holds what only running a pickle would make; leave it out with exclude=[...], "
                f"or {TRUST}:{listed(refused)}"
            )
        run(expect_files(self._session, self._document, find_locations(entries, self._document.files)))
        read_plan = ReadPlan(self._document.files, allow_pickle=self._allow_pickle)
        for path, entry in entries.items():
            read_plan.new(path, entry)
        read_plan.execute(self._session, verify=self._verify, all_or_none=all_or_none)
        return read_plan.values

    def bytes_of(self, entries: Mapping[str, e.ObjectEntry]) -> dict[str, bytearray]:
        """Return the bytes of objects, as they are stored."""
        return self.read(
            {path: msgspec.structs.replace(each, serializer="bytearray") for path, each in entries.items()}
        )


def is_leaf_value(entry: e.Entry) -> bool:
    """Whether an entry stands for a value that has to be made: no container, no tensor."""
    return not isinstance(entry, (e.Container, *e.TENSORS))


def is_foreign_object(document: Document, entry: e.Entry) -> bool:
    """Whether an entry is an object that somebody else stored: there may be something plain in it."""
    return isinstance(entry, e.ObjectEntry) and isinstance(document, ForeignDocument)


def places_of(entry: e.AnyTensor) -> list[tuple[Any, ...]]:
    """Return where each box of a tensor is stored, and how: equal for two entries of the same stored values."""
    return [(box, each.location, each.byte_range, each.extra, each.serializer) for box, each in entry.pieces()]


def clean_extra(entry: e.AnyTensor) -> e.Extra | None:
    """Return an entry's `extra` without what only others' formats need."""
    if entry.extra is None:
        return None
    kept = msgspec.structs.replace(entry.extra, strides=None, storage_offset=None)
    return None if kept == e.PLAIN else kept
