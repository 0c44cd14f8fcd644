"""Frozen parameters that a folder of weights has: found by their bytes, whatever they are called there.

The names of a model often differ from those in the folder that it was loaded from: PEFT, compilers and other wrappers
add components, and libraries rename modules, or stack experts. So equal bytes decide. Names only tell which tensor to
compare first: then a process reads no tensor of the folder that none of its parameters was loaded from.
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
from snapshot.tensors.geometry import Box, find_flat_ranges, is_flat_range
from snapshot.tensors.memory import ITEMSIZE
from snapshot.text import counted, listed, size_text

NAMED = 5
"""Maximum number of parameters that a note names."""
_ADDED = frozenset((*WRAPPERS, "base_layer", "original_module"))
"""Components that wrappers and PEFT add to the names of a model."""

Shape = tuple[int, ...]
Group = tuple[str, Shape, int, int]
"""The dtype and the shape of a tensor, and the begin and the length of a range in it: what bytes may be equal."""


class _Part(NamedTuple):
    """A frozen parameter, or a part of one, that may be a range of a tensor in the folder."""

    number: int
    """The position of its parameter among the leaves."""
    leaf: Leaf
    box: Box | None
    """Its box in what this rank writes of the parameter, if it is not all of that."""
    begin: int
    """Its first byte there."""
    shape: Shape
    """The shape of the tensor in the folder."""
    start: int
    """Its first byte in that tensor."""

    @property
    def group(self) -> Group:
        return self.leaf.dtype, self.shape, self.start, self.leaf.nbytes

    def place_in(self, stored: TensorEntry) -> Place:
        """Return where a stored tensor has the bytes of the part."""
        begin = stored.byte_range[0] + self.start
        return stored.location, begin, begin + self.leaf.nbytes


def find_in_folder(claim: Claim, share: RankShare, frozen: bytes, opened: Opened, notes: list[str]) -> Omitted | None:
    """Find the frozen parameters that a folder of weights has, and note those that it lacks."""
    leaves = {number: leaf for number, leaf in enumerate(share.leaves[: len(frozen)]) if frozen[number] and leaf.nbytes}
    try:
        matches = _Matches(claim.session, run(read_folder(opened)))
        for cut in (_keep_whole, _cut_slices, _cut_halves):
            left = [(number, leaf) for number, leaf in leaves.items() if number not in matches.found]
            matches.find([part for number, leaf in left for part in cut(number, leaf)])
        lacking = [leaf for number, leaf in leaves.items() if number not in matches.found]
        omitted = matches.omit()
        if lacking:
            notes.append(matches.explain(lacking))
    except ABSENT as error:
        notes.append(f"everything is written, since the base cannot be used: {error}")
        omitted = None
    if omitted is None and notes:
        log.warning("%s: %s", claim.session.url, notes[-1])
    return omitted


# The parts that a parameter is looked for as.


def _keep_whole(number: int, leaf: Leaf) -> Iterator[_Part]:
    """Yield the parameter, or what this rank writes of it, as a range of a tensor of the same shape."""
    shape, box = _whole_shape(leaf), place_box(leaf, None)
    if is_flat_range(shape, box):
        yield _Part(number, leaf, None, 0, shape, find_flat_ranges(shape, box, 0)[0][0] * ITEMSIZE[leaf.dtype])


def _cut_slices(number: int, leaf: Leaf, halves: int = 1) -> Iterator[_Part]:
    """Yield the matrices of a stack, such as the experts of a layer, which a folder may have one by one."""
    if len(leaf.shape) != 3 or leaf.shape[1:] != _whole_shape(leaf)[1:] or leaf.shape[1] % halves:
        return
    rows, columns = leaf.shape[1] // halves, leaf.shape[2]
    for index in range(leaf.shape[0]):
        for half in range(halves):
            part = leaf.take_box(box := Box((index, half * rows, 0), (1, rows, columns)))
            yield _Part(number, part, box, (index * halves + half) * part.nbytes, (rows, columns), 0)


def _cut_halves(number: int, leaf: Leaf) -> Iterator[_Part]:
    """Yield the halves of such matrices: the projections of a gate and of its input are often joined."""
    return _cut_slices(number, leaf, 2)


def _whole_shape(leaf: Leaf) -> Shape:
    return (leaf.whole or leaf).shape


# The ranges of the folder.


class _Matches:
    """The frozen parameters that were found in a folder.

    A range of the folder is used once, since two parameters in one range would be restored as a single tensor if the
    application has none of them yet.
    """

    def __init__(self, session: Session, folder: BaseFolder) -> None:
        self._session = session
        self._folder = folder
        self._names = _NameIndex(folder.tensors)
        self._shapes: defaultdict[tuple[str, Shape], list[TensorEntry]] = defaultdict(list)
        for _, stored in folder.tensors:
            self._shapes[stored.dtype, stored.shape].append(stored)
        self._digests: dict[Place, Digest] = {}
        self._used: set[Place] = set()
        self._live: dict[str, str] = {}
        """The digests of the parameters that may be whole in the folder, by path."""
        self.found: dict[int, list[tuple[_Part, Place]]] = {}
        """The parts of each parameter, and their places."""

    def find(self, parts: Sequence[_Part]) -> None:
        """Find parts. A parameter is found if all of its parts are."""
        parts = [part for part in parts if (part.leaf.dtype, part.shape) in self._shapes]
        live = digest_leaves(self._session, [part.leaf for part in parts]) if parts else []
        self._live |= {part.leaf.path: digest for part, digest in zip(parts, live, strict=True) if part.box is None}
        places = self._guess(parts, live)
        self._search(parts, live, places)
        pairs: defaultdict[int, list[tuple[_Part, Place | None]]] = defaultdict(list)
        for part, place in zip(parts, places, strict=True):
            pairs[part.number].append((part, place))
        for number, held in pairs.items():
            complete = [(part, place) for part, place in held if place is not None]
            if len(complete) == len(held):
                self.found[number] = complete
            else:
                self._used.difference_update(place for _, place in complete)

    def _guess(self, parts: Sequence[_Part], live: Sequence[str]) -> list[Place | None]:
        """Return the place of each part that is in the tensor whose name is most like that of its parameter."""
        guesses = []
        for part in parts:
            stored = self._names.find(part.leaf, part.leaf.dtype, part.shape)
            guesses.append(part.place_in(stored or self._shapes[part.leaf.dtype, part.shape][0]))
        self._digests |= run(self._folder.digest_ranges(guesses))
        return [self._use(place, digest) for place, digest in zip(guesses, live, strict=True)]

    def _search(self, parts: Sequence[_Part], live: Sequence[str], places: list[Place | None]) -> None:
        """Find the other parts in all tensors of the same dtype and shape."""
        missing = [number for number, place in enumerate(places) if place is None]
        alike: dict[Group, list[Place]] = {}
        for part in (parts[number] for number in missing):
            if part.group not in alike:
                alike[part.group] = [part.place_in(each) for each in self._shapes[part.leaf.dtype, part.shape]]
        self._digests |= run(self._folder.digest_ranges(place for held in alike.values() for place in held))
        equal: defaultdict[tuple[Group, str], list[Place]] = defaultdict(list)
        for group, held in alike.items():
            for place in reversed(held):
                equal[group, self._digests[place][0]].append(place)
        for number in missing:
            candidates = equal[parts[number].group, live[number]]
            while candidates and places[number] is None:
                places[number] = self._use(candidates.pop(), live[number])

    def _use(self, place: Place, digest: str) -> Place | None:
        if place in self._used or self._digests[place][0] != digest:
            return None
        self._used.add(place)
        return place

    def omit(self) -> Omitted | None:
        """Return what was found, for the take; None if nothing was."""
        if not self.found:
            return None
        folder = self._folder
        ranges: list[tuple[Extent, TensorEntry]] = []
        tables: dict[int, bytes] = {}
        for part, place in (pair for number in sorted(self.found) for pair in self.found[number]):
            digest, table = self._digests[place]
            if table:
                tables[len(ranges)] = table
            leaf, location = part.leaf, folder.files[place[0]].location
            stored = TensorEntry(location, place[1:], leaf.dtype, leaf.shape, digest)
            ranges.append((Extent(part.number, 0, leaf.nbytes, part.begin, part.box), stored))
        names = {place[0] for pairs in self.found.values() for _, place in pairs}
        files = {folder.files[name].location: folder.files[name].entry for name in sorted(names)}
        base = partial(Session, folder.opened.url, folder.opened.session.options)
        tokens = {name: folder.files[name].token for name in names}
        return Omitted(folder.reference, ranges, files, frozenset(self.found), "", base, tables, tokens)

    def explain(self, lacking: Sequence[Leaf]) -> str:
        """Return a note about the parameters that are written."""
        nbytes = sum(leaf.nbytes for leaf in lacking)
        lines = [f"{leaf.path}: {self._reason(leaf)}" for leaf in lacking]
        return (
            f"wrote {counted(len(lacking), 'frozen tensor')} ({size_text(nbytes)}), since {self._folder.url} does not "
            f"have what is equal:{listed(lines, NAMED)}"
        )

    def _reason(self, leaf: Leaf) -> str:
        shape = _whole_shape(leaf)
        if (leaf.dtype, shape) not in self._shapes:
            other = self._names.find(leaf, "", shape)
            if other is None:
                return f"no tensor there has its shape, {list(shape)}"
            return f"is {leaf.dtype} here, and {other.dtype} there"
        digest = self._live.get(leaf.path)
        if digest is None:
            return "this rank's part of it is not one range of the whole tensor"
        if any(digest == known for known, _ in self._digests.values()):
            return "its bytes are left out for another parameter"
        return "has other values"


class _NameIndex:
    """The tensors of a folder by the ends of their names."""

    def __init__(self, tensors: Sequence[tuple[str, TensorEntry]]) -> None:
        self._tensors: dict[tuple[str, str, Shape], TensorEntry] = {}
        for name, stored in tensors:
            for end in (*_ends_of(name), ""):
                self._tensors.setdefault((end, stored.dtype, stored.shape), stored)
                self._tensors.setdefault((end, "", stored.shape), stored)

    def find(self, leaf: Leaf, dtype: str, shape: Shape) -> TensorEntry | None:
        """Return the tensor of a dtype ('' for any) and a shape whose name has the longest end in common with a leaf's.

        Return None if no tensor has the dtype and the shape.
        """
        ends = ((end, dtype, shape) for end in (*_ends_of(leaf.path), ""))
        return next((self._tensors[key] for key in ends if key in self._tensors), None)


def _ends_of(name: str) -> Iterator[str]:
    """Yield the ends of a name, the longest first, without what wrappers add to names.

    >>> list(_ends_of("model/base_model.model.q.base_layer.weight"))[2:]
    ['model.q.weight', 'q.weight', 'weight']
    """
    parts = [part for part in re.split(r"[./]", name) if part not in _ADDED]
    yield from (".".join(parts[at:]) for at in range(len(parts)))
