"""Files of the snapshot that a take is based on: what they hold, and whether the leaves of a take could fill them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, FileEntry
from snapshot.plan.layout import FilePlan, Piece, plan_file
from snapshot.runtime.session import Session
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import digest_range
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.geometry import Box, is_flat_range, is_inside, whole_box


class BaseRange(NamedTuple):
    """A stored range of a base's file."""

    names: list[str]
    """The paths of the leaves that it was written for: tied tensors have several."""
    box: Box | None
    """Its box, if it is a part of a tensor."""
    stored: e.TensorEntry


@dataclass(frozen=True)
class BaseFile:
    """A data file of a base."""

    base: Base
    location: str
    entry: FileEntry
    ranges: list[BaseRange]

    @property
    def origin(self) -> str:
        """The file whose physical bytes these are: this one, or one of an earlier snapshot."""
        return self.entry.origin or self.location

    def plan(self, leaves: Sequence[Leaf], index: Mapping[str, list[int]]) -> FilePlan | None:
        """Return the same file with these leaves, or None if they do not fill it, or if its header would differ."""
        pieces: list[Piece] = []
        for each in self.ranges:
            found = (fit_leaf(number, leaves[number], each) for name in each.names for number in index.get(name, ()))
            piece = next((piece for piece in found if piece is not None), None)
            if piece is None:
                return None
            pieces.append(piece)
        made = plan_file(leaves, pieces)
        same = made.size == self.entry.size and digest_range(made.header) == self.entry.header_digest
        placed = [(extent.begin, extent.end) for extent in made.extents]
        return made if same and placed == [each.stored.byte_range for each in self.ranges] else None


@dataclass
class Base:
    """An earlier snapshot, opened for a take that is based on it."""

    session: Session
    document: Document
    shares: bool
    """True if the take's storage can share its files."""
    links: bool
    """True if shared files have one physical copy."""
    files: dict[str, BaseFile]
    """This rank's data files, by location."""

    def copies(self) -> dict[tuple[str, str], tuple[str | None, str]]:
        """Return the digest and the physical file of each leaf's range, by its path and its box."""
        return {
            (name, str(each.box or "")): (each.stored.digest, file.origin)
            for file in self.files.values()
            for each in file.ranges
            for name in each.names
        }


def open_base(session: Session, document: Document, rank: int, *, shares: str) -> Base:
    """Return a base with the files that one rank wrote. `shares`: how the take's storage shares its files."""
    base = Base(session, document, bool(shares), shares == "link", {})
    mine = {
        location
        for location in document.files
        if location.endswith(".safetensors") and location.split("-")[1:2] == [str(rank)]
    }
    held: defaultdict[str, dict[tuple[int, int, str], BaseRange]] = defaultdict(dict)
    for path, entry in document.manifest.items():
        for name, tensor in _named_tensors(path.partition("/")[2], entry):
            whole = isinstance(tensor, e.TensorEntry)
            for box, stored in tensor.pieces():
                if stored.location in mine:
                    begin, end = stored.byte_range
                    key = begin, end, "" if begin < end else name
                    held[stored.location].setdefault(key, BaseRange([], None if whole else box, stored)).names.append(
                        name
                    )
    for location, ranges in held.items():
        # Empty tensors at one position are in the order of their sizes, as in the file.
        ordered = sorted(ranges.values(), key=lambda each: (*each.stored.byte_range, -ITEMSIZE[each.stored.dtype]))
        base.files[location] = BaseFile(base, location, document.files[location], ordered)
    return base


def _named_tensors(path: str, entry: Any) -> Iterator[tuple[str, e.AnyTensor]]:
    """Yield the tensors of an entry, under the names of their leaves."""
    if isinstance(entry, e.TENSORS):
        yield path, entry
    elif isinstance(entry, e.NDArrayEntry):
        yield path, entry.data
    elif isinstance(entry, e.TensorPartsEntry):
        for part, tensor in entry.parts.items():
            yield f"{path}%[{part}]", tensor


def fit_leaf(number: int, leaf: Leaf, held: BaseRange) -> Piece | None:
    """Return a stored range as a piece of a leaf, or None if it is none."""
    stored, box = held.stored, held.box
    if leaf.dtype != stored.dtype:
        return None
    if box is None:
        return (number, 0, leaf.nbytes, None) if leaf.origin is None and leaf.shape == stored.shape else None
    if len(box.sizes) != len(leaf.shape):
        return None
    if leaf.origin is not None:
        box = box.relative_to(leaf.origin)
        if box == whole_box(leaf.shape):
            return number, 0, leaf.nbytes, None
    if not is_inside(box, leaf.shape) or not is_flat_range(leaf.shape, box):
        return None
    itemsize, start = ITEMSIZE[leaf.dtype], 0
    for axis, offset in enumerate(box.offsets):
        start += offset * math.prod(leaf.shape[axis + 1 :])
    return number, start * itemsize, box.numel * itemsize, box
