"""Files of the snapshot that a take is based on: what they hold, and whether the leaves of a take could fill them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapshot.manifest import entries as e
from snapshot.manifest.document import BaseReference, Document, FileEntry
from snapshot.plan.layout import FilePlan, Piece, plan_file
from snapshot.runtime.session import Session
from snapshot.signing.signed_storage import SignedStorage
from snapshot.state.leaves import Leaf
from snapshot.tensors.addresses import wrap_memory
from snapshot.tensors.digest import BLOCK, SIZE, digest_range
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.geometry import Box, find_flat_ranges, is_flat_range, is_inside, whole_box


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
    def place(self) -> str:
        """The URL of the file."""
        return str(self.base.session.url.join(self.location))

    @property
    def origin(self) -> str:
        """The file whose physical bytes these are: this one, or one of an earlier snapshot."""
        return self.entry.origin or self.location

    def differs_at_once(
        self, leaves: Sequence[Leaf], index: Mapping[str, list[int]], tables: Mapping[Any, bytes]
    ) -> bool:
        """Return True if the first block of the first or the last range shows that the tensors changed.

        Most files that changed are found here, before they are planned.
        """
        for each in (self.ranges[0], self.ranges[-1]):
            if each.box is not None or not each.stored.nbytes:
                continue
            numbers = [number for name in each.names for number in index.get(name, ())]
            leaf = leaves[numbers[0]] if len(numbers) == 1 else None
            if leaf is None or not leaf.plain or leaf.nbytes != each.stored.nbytes:
                continue
            digest = each.stored.digest
            if each.stored.blocks is not None:
                digest = f"xxh3:{tables.get(each.stored.blocks, b'')[:SIZE].hex()}"
            if digest_range(wrap_memory(leaf.address, min(leaf.nbytes, BLOCK))) != digest:
                return True
        return False

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
    shares: str
    """The way in which the take's storage shares its files, as in `Capabilities.shares`; empty if it cannot."""
    files: dict[str, BaseFile]
    """This rank's data files, by location."""
    elsewhere: frozenset[str] = frozenset()
    """The files that are not in this snapshot, but in its own base."""
    reference: BaseReference | None = None
    """The snapshot that has what this one left out."""
    signed: SignedStorage | None = None
    """Its signed files, if it was opened with a key that signed it."""

    def copies(self) -> dict[tuple[str, str], tuple[str | None, str]]:
        """Return the digest and the physical file of each leaf's range, by its path and its box."""
        return {
            (name, str(each.box or "")): (each.stored.digest, file.origin)
            for file in self.files.values()
            for each in file.ranges
            for name in each.names
        }


def open_base(session: Session, document: Document, rank: int, *, shares: str) -> Base:
    """Return a base with the files that one rank wrote."""
    elsewhere = frozenset(location for location, file in document.files.items() if file.in_base)
    base = Base(session, document, shares, {}, elsewhere, document.base)
    mine = {
        location
        for location in document.files
        if location.endswith(".safetensors") and location.split("-")[1:2] == [str(rank)]
    }
    held: dict[str, list[tuple[int, int, str, Box | None, e.TensorEntry]]] = {location: [] for location in mine}
    for path, entry in document.manifest.items():
        if type(entry) is e.TensorEntry:  # nearly all are, so this has the fewest steps
            if (found := held.get(entry.location)) is not None:
                found.append((*entry.byte_range, path.partition("/")[2], None, entry))
            continue
        for name, tensor in _named_tensors(path.partition("/")[2], entry):
            whole = isinstance(tensor, e.TensorEntry)
            for box, stored in tensor.pieces():
                if (found := held.get(stored.location)) is not None:
                    found.append((*stored.byte_range, name, None if whole else box, stored))
    for location, found in held.items():
        base.files[location] = BaseFile(base, location, document.files[location], _merge_ranges(found))
    return base


def _merge_ranges(found: list[tuple[int, int, str, Box | None, e.TensorEntry]]) -> list[BaseRange]:
    """Return the ranges of a file in order. Tied tensors are one range.

    Empty tensors at one position are in the order of their element sizes, as in the file.
    """
    found.sort(key=lambda each: (each[0], each[1], -ITEMSIZE[each[4].dtype] if each[0] == each[1] else 0))
    ranges: list[BaseRange] = []
    last = None
    for begin, end, name, box, stored in found:
        if begin < end and last == begin:
            ranges[-1].names.append(name)
        else:
            ranges.append(BaseRange([name], box, stored))
        last = begin if begin < end else None
    return ranges


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
    itemsize = ITEMSIZE[leaf.dtype]
    start = find_flat_ranges(leaf.shape, box, 0)[0][0] if box.numel else 0
    return number, start * itemsize, box.numel * itemsize, box
