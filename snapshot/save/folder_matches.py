"""Frozen parameters that a folder of weights has: found by their bytes, whatever they are called there.

The names of a model often differ from those in the folder that it was loaded from: PEFT, compilers and other wrappers
add components, and libraries rename modules. So equal bytes decide. Names only tell which tensor to compare first:
then a process reads no tensor of the folder that none of its parameters was loaded from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from snapshot.events import log
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.loading.base_folder import BaseFolder, Digest, Place, read_folder
from snapshot.loading.open import Opened
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, place_box
from snapshot.plan.names import WRAPPERS
from snapshot.save.base_files import ABSENT
from snapshot.save.begin import Claim
from snapshot.save.leaf_digests import digest_leaves
from snapshot.save.omission import Omitted
from snapshot.save.rank_share import RankShare
from snapshot.state.leaves import Leaf
from snapshot.tensors.geometry import find_flat_ranges, is_flat_range
from snapshot.tensors.memory import ITEMSIZE
from snapshot.text import counted, listed, size_text

_ADDED = frozenset((*WRAPPERS, "base_layer", "original_module"))
"""Components that wrappers and PEFT add to the names of a model."""
NAMED = 5
"""Maximum number of parameters that a note names."""

Group = tuple[str, tuple[int, ...], int, int]
"""The dtype and the shape of a parameter, and the begin and the length of a part of it: what bytes may be compared."""


class _Frozen(NamedTuple):
    """A frozen parameter, or the part of one that this rank writes."""

    number: int
    leaf: Leaf
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: int | None
    """The first byte of the part in the whole parameter; None if it is not one range of it."""

    @property
    def group(self) -> Group:
        return self.leaf.dtype, self.shape, self.start or 0, self.leaf.nbytes

    def place_in(self, stored: TensorEntry) -> Place:
        """Return where a stored tensor of the same dtype and shape has the bytes of the part."""
        begin = stored.byte_range[0] + (self.start or 0)
        return stored.location, begin, begin + self.leaf.nbytes


def find_in_folder(claim: Claim, share: RankShare, frozen: bytes, opened: Opened, notes: list[str]) -> Omitted | None:
    """Find the frozen parameters that a folder of weights has."""
    try:
        folder = run(read_folder(opened))
        omitted = _match_folder(claim.session, share.leaves, frozen, folder, notes)
    except ABSENT as error:
        notes.append(f"everything is written, since the base cannot be used: {error}")
        omitted = None
    if omitted is None and notes:
        log.warning("%s: %s", claim.session.url, notes[-1])
    return omitted


def _match_folder(
    session: Session, leaves: Sequence[Leaf], frozen: bytes, folder: BaseFolder, notes: list[str]
) -> Omitted | None:
    """Find the frozen parameters that a folder has, and note those that it lacks.

    A range of the folder is used for one parameter only, since two that are in one range would be restored as one
    tensor if the application has none of them yet.
    """
    all_frozen = list(_list_frozen(leaves, frozen))
    shapes: defaultdict[tuple[str, tuple[int, ...]], list[TensorEntry]] = defaultdict(list)
    for _, stored in folder.tensors:
        shapes[stored.dtype, stored.shape].append(stored)
    possible = [each for each in all_frozen if each.start is not None and (each.leaf.dtype, each.shape) in shapes]
    live = dict(zip((each.number for each in possible), _digest(session, possible), strict=True))
    names = _NameIndex(folder.tensors)
    digests: dict[Place, Digest] = {}
    found: dict[int, Place] = {}
    used: set[Place] = set()

    def use(each: _Frozen, place: Place) -> None:
        if place not in used and digests[place][0] == live[each.number]:
            found[each.number] = place
            used.add(place)

    first = [(each, names.find(each.leaf.path, each.leaf.dtype, each.shape)) for each in possible]
    guesses = [(each, each.place_in(stored)) for each, stored in first if stored is not None]
    digests |= run(folder.digest_ranges(place for _, place in guesses))
    for each, place in guesses:
        use(each, place)
    groups: defaultdict[Group, list[_Frozen]] = defaultdict(list)
    for each in possible:
        if each.number not in found:
            groups[each.group].append(each)
    rest = {key: [each[0].place_in(stored) for stored in shapes[key[0], key[1]]] for key, each in groups.items()}
    digests |= run(folder.digest_ranges(place for places in rest.values() for place in places))
    for key, members in groups.items():
        equal: defaultdict[str, list[Place]] = defaultdict(list)
        for place in rest[key]:
            equal[digests[place][0]].append(place)
        for each in members:
            for place in equal[live[each.number]]:
                if each.number not in found:
                    use(each, place)
    lacking = [each for each in all_frozen if each.number not in found]
    if lacking:
        known = {digest for digest, _ in digests.values()}
        nbytes = sum(each.leaf.nbytes for each in lacking)
        lines = [f"{each.leaf.path}: {_explain(each, names, live.get(each.number) in known)}" for each in lacking]
        notes.append(
            f"wrote {counted(len(lacking), 'frozen tensor')} ({size_text(nbytes)}), since {folder.url} does not have "
            f"what is equal:{listed(lines, NAMED)}"
        )
    return _omit(folder, [each for each in possible if each.number in found], found, digests)


def _list_frozen(leaves: Sequence[Leaf], frozen: bytes) -> Iterator[_Frozen]:
    for number, leaf in enumerate(leaves):
        if number < len(frozen) and frozen[number] and leaf.nbytes:
            shape, box = (leaf.whole or leaf).shape, place_box(leaf, None)
            start = find_flat_ranges(shape, box, 0)[0][0] * ITEMSIZE[leaf.dtype] if is_flat_range(shape, box) else None
            yield _Frozen(number, leaf, shape, start)


def _digest(session: Session, each: Sequence[_Frozen]) -> list[str]:
    return digest_leaves(session, [one.leaf for one in each]) if each else []


class _NameIndex:
    """The tensors of a folder by the ends of their names."""

    def __init__(self, tensors: Sequence[tuple[str, TensorEntry]]) -> None:
        self._tensors: dict[tuple[str, str, tuple[int, ...]], TensorEntry] = {}
        for name, stored in tensors:
            for end in (*_ends_of(name), ""):
                self._tensors.setdefault((end, stored.dtype, stored.shape), stored)
                self._tensors.setdefault((end, "", stored.shape), stored)

    def find(self, path: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry | None:
        """Return the tensor of a dtype ('' for any) and a shape whose name has the longest end in common with a path.

        Return None if no tensor has the dtype and the shape.
        """
        ends = ((end, dtype, shape) for end in (*_ends_of(path), ""))
        return next((self._tensors[key] for key in ends if key in self._tensors), None)


def _ends_of(name: str) -> Iterator[str]:
    """Yield the ends of a name, the longest first, without what wrappers add to names.

    >>> list(_ends_of("model/base_model.model.q.base_layer.weight"))[2:]
    ['q.weight', 'weight']
    """
    parts = [part for part in re.split(r"[./]", name) if part not in _ADDED]
    yield from (".".join(parts[at:]) for at in range(len(parts)))


def _explain(each: _Frozen, names: _NameIndex, is_known: bool) -> str:
    """Return why a parameter is written. `is_known`: the folder has the same bytes."""
    leaf = each.leaf
    if each.start is None:
        return "this rank's part of it is not one range of the whole tensor"
    if is_known:
        return "its bytes are left out for another parameter"
    other = names.find(leaf.path, leaf.dtype, each.shape) or names.find(leaf.path, "", each.shape)
    if other is None:
        return f"no tensor there has its shape, {list(each.shape)}"
    return "has other values" if other.dtype == leaf.dtype else f"is {leaf.dtype} here, and {other.dtype} there"


def _omit(
    folder: BaseFolder, matched: Sequence[_Frozen], found: dict[int, Place], digests: dict[Place, Digest]
) -> Omitted | None:
    if not matched:
        return None
    ranges: list[tuple[Extent, TensorEntry]] = []
    tables: dict[int, bytes] = {}
    for each in matched:
        name, begin, end = found[each.number]
        digest, table = digests[name, begin, end]
        stored = TensorEntry(folder.files[name].location, (begin, end), each.leaf.dtype, each.leaf.shape, digest)
        if table:
            tables[len(ranges)] = table
        ranges.append((Extent(each.number, 0, each.leaf.nbytes), stored))
    files = {file.location: file.entry for file in (folder.files[found[each.number][0]] for each in matched)}
    base = partial(Session, folder.opened.url, folder.opened.session.options)
    return Omitted(folder.reference, ranges, files, frozenset(found), "", base, tables)
