"""Layout of data files: leaves are distributed over files and writers; reads are merged and split."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from snapshot.io.storage import Limits
from snapshot.manifest.paths import quote_path
from snapshot.tensors.digest import BLOCK, SIZE, count_blocks, digest_range
from snapshot.tensors.geometry import Box, Shape, split_shape, whole_box
from snapshot.tensors.memory import ITEMSIZE, SAFETENSORS
from snapshot.text import counted, size_text

# Assignment of writers to data that several ranks have, with equal loads.
#
# It is a pure function of data that all ranks know, so each rank finds its own share without communication.

SHORTEST = 256 << 10
"""Maximum length of pieces that are never split: one digest block."""
FINEST = 8
"""Pieces per rank's share, if a tensor is split."""
MOST_PIECES = 4096
"""Approximate number of pieces, for any number of ranks."""


class PartitionItem(NamedTuple):
    """A tensor, or a box of one, that several ranks have."""

    shape: Shape
    itemsize: int
    splits: bool = True
    """True if the item may be split."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self.itemsize


class Assignment(NamedTuple):
    """The part of an item that one rank writes: all of it, or a box."""

    item: int
    box: Box | None


def partition_items(items: Sequence[PartitionItem], loads: Sequence[int]) -> list[list[Assignment]]:
    """Return each rank's share, in the order of the items, given the bytes that each writes anyway.

    The longest pieces are assigned first, each to the rank with the smallest load. Long items are split before.

    >>> pieces = [PartitionItem((4,), 1), PartitionItem((2,), 1), PartitionItem((2,), 1)]
    >>> partition_items(pieces, [0, 0])
    [[Assignment(item=0, box=None)], [Assignment(item=1, box=None), Assignment(item=2, box=None)]]
    """
    shares: list[list[Assignment]] = [[] for _ in loads]
    sizes = [item.nbytes for item in items]
    total = sum(sizes)
    longest = max(SHORTEST, total // (FINEST * len(loads)), total // MOST_PIECES)
    pieces: list[tuple[int, int, Box | None]] = []
    for index, size in enumerate(sizes):
        item = items[index]
        if size <= longest or not item.splits:
            pieces.append((-size, index, None))
            continue
        even = -(-size // -(-size // longest))
        for box in split_shape(item.shape, max(1, even // item.itemsize)):
            pieces.append((-box.numel * item.itemsize, index, box))
    pieces.sort(key=lambda piece: (piece[0], piece[1]))
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    for size, index, part in pieces:
        load, rank = lightest[0]
        shares[rank].append(Assignment(index, part))
        heapq.heapreplace(lightest, (load - size, rank))
    for share in shares:
        share.sort(key=lambda dealt: (dealt.item, dealt.box or ()))
    return shares


# Planning of reads: wanted ranges that are close together are merged, and long ones are split.
#
# Nothing here depends on the purpose of the bytes. A part is one request that serves several ranges of a file.


class ByteRange(Protocol):
    """A range of a file to read."""

    location: str
    begin: int
    end: int


@dataclass(order=True, unsafe_hash=True)
class FileRange:
    """A range of a file."""

    location: str
    begin: int
    end: int


class ReadSegment(msgspec.Struct, gc=False):
    """A part's share of one wanted range, in bytes of the file."""

    request: int
    begin: int
    end: int


class ReadPart(msgspec.Struct, gc=False):
    """One request: a range of a file, and the segments in it. The bytes between segments are discarded."""

    location: str
    begin: int
    end: int
    ranges: Sequence[ByteRange]
    order: Sequence[int]
    """The numbers of all ranges, in storage order."""
    first: int
    """Ranges in the part, by position in the order: [first, last)."""
    last: int
    held: list[ReadSegment] | None = None

    @property
    def segments(self) -> list[ReadSegment]:
        """The shares of the ranges. They are created when the part is read, since there may be millions."""
        if self.held is None:
            held, low, high = [], self.begin, self.end
            for number in self.order[self.first : self.last]:
                each = self.ranges[number]
                held.append(ReadSegment(number, max(low, each.begin), min(high, each.end)))
            self.held = held
        return self.held


def plan_reads(ranges: Sequence[ByteRange], part_bytes: int, gap: int, most: int = 1 << 60) -> list[ReadPart]:
    """Return the requests that read every wanted range once, in storage order.

    Long ranges are split at multiples of the digest block size, counted from their begin. A part has at most `most`
    segments.
    """
    step = max(BLOCK, part_bytes // BLOCK * BLOCK)
    numbers = [number for number, each in enumerate(ranges) if each.begin < each.end]
    numbers.sort(key=[each.begin for each in ranges].__getitem__)
    numbers.sort(key=[each.location for each in ranges].__getitem__)
    order = array("q", numbers)
    parts: list[ReadPart] = []
    location, end, room = "", -1, 0
    for at, number in enumerate(numbers):
        request = ranges[number]
        begin, stop = request.begin, request.end
        close = request.location == location and 0 <= begin - end <= gap
        if close and stop - end <= room and at - parts[-1].first < most:
            room -= stop - end
            parts[-1].end = end = stop
            parts[-1].last = at + 1
            continue
        location = request.location
        for low in range(begin, stop, step):
            end = min(low + step, stop)
            parts.append(ReadPart(location, low, end, ranges, order, at, at + 1))
        room = step - (end - parts[-1].begin)
    return parts


# Layout of data files: leaves are distributed over files, and files are split into parts.
#
# Each data file is a valid safetensors file. A plan is a value: it names no snapshot and no rank, so it can be
# printed, compared, and reused.

MiB = 1 << 20
PAGE = 4096
LARGEST_FILE = 4 << 30
LARGEST_HEADER = 16 * MiB
CUT = 128 * MiB
"""Minimum size of a tensor that is split to balance loads."""
PARTS = 32
"""Minimum number of parts in a file whose parts grow."""
SHORTEST_PART = MiB // 4
"""Lower bound for parts under any budget: with parts of a few bytes a take would never end."""
WORTH_A_FILE = 16 * MiB
"""Minimum bytes of a separate file: a shorter one costs more than it gains."""
STABLE, LATE, LEFT_OUT = 1, 2, 255
"""Groups of leaves: those that rarely change, those that are staged late (or both), and those that are not written."""


class Room(NamedTuple):
    """Maximum bytes of a file's tensors, and of its header."""

    data: int
    header: int

    @classmethod
    def of(cls, longest: int) -> Room:
        """Return the room in a file of a maximum length; 0 is the usual one."""
        if not longest:
            return cls(LARGEST_FILE, LARGEST_HEADER)
        return cls(longest - longest // 8 - 2 * PAGE, min(LARGEST_HEADER, longest // 8))


class PlannedLeaf(Protocol):
    """Properties of a tensor that a plan needs."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    origin: tuple[int, ...] | None
    """Offsets of the box in its tensor, if the leaf is a box."""


class Extent(msgspec.Struct, gc=False):
    """A range of a data file with a tensor, or (`box`) with a part that is one range of the tensor's flat bytes."""

    leaf: int
    begin: int
    end: int
    start: int = 0
    """Begin in the tensor's flat bytes."""
    box: Box | None = None


class _HeaderItem(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FilePlan(msgspec.Struct, gc=False, frozen=True):
    """A data file: its header, and the extents after it, in order and without gaps."""

    header: bytes
    extents: tuple[Extent, ...]
    size: int


class FilePart(msgspec.Struct, gc=False, frozen=True):
    """A range of a file that is staged and written at once, and the extents that it overlaps."""

    begin: int
    end: int
    first: int
    """Extents in the part, by position in the file: [first, last)."""
    last: int


@dataclass(frozen=True)
class SavePlan:
    """Files and ranges that a take writes. Created by `Snapshot.plan`; equal for equal structures."""

    files: tuple[FilePlan, ...]
    blob_bytes: int
    """Bytes that are not tensors: those of other objects, and the tables of digests."""
    structure: str
    """Digest of all names, dtypes, shapes and locations."""
    staged_bytes: int
    """Maximum host memory that the take uses at once."""
    loads: tuple[int, ...] = ()
    """Bytes of tensors that each rank writes, if there are several."""
    late: int = 0
    """Number of files, at the end, with tensors that may be staged late."""

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files) + self.blob_bytes

    @property
    def bytes_per_rank(self) -> list[int]:
        """Bytes that each rank writes; with several ranks, without the headers of their files."""
        return list(self.loads) or [self.total_bytes]

    def __str__(self) -> str:
        ranges = sum(len(file.extents) for file in self.files)
        lines = [
            f"{size_text(self.total_bytes)} in {counted(len(self.files) + bool(self.blob_bytes), 'file')}, "
            f"{counted(ranges, 'range')}, {size_text(self.staged_bytes)} staged at most"
        ]
        if len(self.loads) > 1:
            lines[0] = "this rank: " + lines[0]
            most, mean = max(self.loads), sum(self.loads) / len(self.loads)
            lines.append(
                f"  all {len(self.loads):,} ranks: {size_text(sum(self.loads))}, {size_text(most)} at most on one, "
                f"{most / mean if mean else 1:.2f} of the mean"
            )
        lines += [
            f"  {n}.safetensors: {size_text(file.size)}, {counted(len(file.extents), 'range')}"
            for n, file in enumerate(self.files)
        ]
        return "\n".join(
            lines + ([f"  {len(self.files)}.bin: {size_text(self.blob_bytes)}"] if self.blob_bytes else [])
        )


def name_data_file(save_id: str, rank: int, number: int, kind: str) -> str:
    """Return the name of a data file below the snapshot."""
    return f"data/{save_id}-{rank}-{number}.{kind}"


def make_plan(
    leaves: Sequence[PlannedLeaf],
    blob_bytes: int,
    limits: Limits,
    lanes: int,
    *,
    staged_bytes: int,
    loads: tuple[int, ...] = (),
    groups: bytes = b"",
    longest: int = 0,
) -> SavePlan:
    """Distribute leaves over files: balanced over lanes, no file too long, the largest elements first in each.

    `groups` has a byte for each leaf, or is empty. Each group has files of its own. `longest`: maximum length of a
    file, if it is shorter than usual.
    """
    room = Room.of(longest)
    sizes = [leaf.nbytes for leaf in leaves]
    if LEFT_OUT in groups:
        sizes = [0 if group == LEFT_OUT else size for size, group in zip(sizes, groups, strict=True)]
    total = sum(sizes)
    most = min(limits.parallel_files, lanes)
    pieces = _cut_leaves(leaves, sizes, total, max(1, min(most, total // WORTH_A_FILE)), room.data)
    grouped = {0: pieces}
    if any(groups):
        grouped = {group: [] for group in sorted({0, *groups} - {LEFT_OUT})}
        for piece in pieces:
            if groups[piece[0]] != LEFT_OUT:
                grouped[groups[piece[0]]].append(piece)
    dealt = {
        group: [
            plan_file(leaves, chosen)
            for lane in _deal_pieces(these, most)
            for chosen in _fill_files(lane, leaves, room)
        ]
        for group, these in grouped.items()
    }
    files = tuple(file for made in dealt.values() for file in made)
    tables = 0
    if max(sizes, default=0) > BLOCK:
        tables = sum(SIZE * count_blocks(extent.end - extent.begin) for file in files for extent in file.extents)
    structure = digest_range(b"".join(file.header for file in files))
    late = sum(len(made) for group, made in dealt.items() if group & LATE)
    return SavePlan(files, blob_bytes + tables, structure, staged_bytes, loads, late)


Piece = tuple[int, int, int, Box | None]
"""Leaf, start and length in its flat bytes, box."""


def _cut_leaves(leaves: Sequence[PlannedLeaf], sizes: list[int], total: int, lanes: int, longest: int) -> list[Piece]:
    """Split leaves that are too long for one file, or for one lane's share."""
    share = max(CUT, -(-total // lanes)) if lanes > 1 else longest
    most = min(longest, share + share // 8)
    if max(sizes, default=0) <= most:
        return [(index, 0, size, None) for index, size in enumerate(sizes)]
    pieces: list[Piece] = []
    for index, size in enumerate(sizes):
        if size <= most:
            pieces.append((index, 0, size, None))
            continue
        leaf = leaves[index]
        itemsize = ITEMSIZE[leaf.dtype]
        even = -(-size // -(-size // min(most, share)))
        start = 0
        for box in split_shape(leaf.shape, max(1, even // itemsize)):
            length = math.prod(box.sizes) * itemsize
            pieces.append((index, start, length, box))
            start += length
    return pieces


def _deal_pieces(pieces: list[Piece], most: int) -> list[list[Piece]]:
    """Distribute pieces over lanes, longest first. Consecutive short pieces remain together."""
    total = sum(piece[2] for piece in pieces)
    lanes = max(1, min(most, total // WORTH_A_FILE))
    if lanes == 1:
        return [pieces]
    enough = total // (lanes * 16)
    groups: list[tuple[int, list[Piece]]] = []
    gathered: list[Piece] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += piece[2]
        if size >= enough:
            groups.append((size, gathered))
            gathered, size = [], 0
    if gathered:
        groups.append((size, gathered))
    loads = [0] * lanes
    dealt: list[list[tuple[int, list[Piece]]]] = [[] for _ in range(lanes)]
    for position in sorted(range(len(groups)), key=lambda i: -groups[i][0]):
        lightest = loads.index(min(loads))
        loads[lightest] += groups[position][0]
        dealt[lightest].append((position, groups[position][1]))
    return [[piece for _, group in sorted(lane, key=lambda item: item[0]) for piece in group] for lane in dealt if lane]


def _fill_files(pieces: list[Piece], leaves: Sequence[PlannedLeaf], room: Room) -> Iterable[list[Piece]]:
    """Distribute one lane's pieces over files, so that neither data nor header is too long."""
    names = sum(len(leaves[piece[0]].path) for piece in pieces)
    if sum(piece[2] for piece in pieces) <= room.data and 6 * names + 300 * len(pieces) <= room.header:
        if pieces:
            yield pieces
        return
    chosen: list[Piece] = []
    size = header = 0
    for piece in pieces:
        name = 6 * len(leaves[piece[0]].path) + 300
        if chosen and (size + piece[2] > room.data or header + name > room.header):
            yield chosen
            chosen, size, header = [], 0, 0
        chosen.append(piece)
        size += piece[2]
        header += name
    yield chosen


def plan_exact_file(
    leaves: Sequence[PlannedLeaf], chosen: Iterable[int], metadata: Mapping[str, str] | None = None
) -> FilePlan:
    """Return a file of whole leaves under their exact names, for readers without this library."""
    pieces: list[Piece] = [(index, 0, leaves[index].nbytes, None) for index in chosen]
    return plan_file(leaves, pieces, exact=True, metadata=metadata)


def plan_file(
    leaves: Sequence[PlannedLeaf],
    pieces: list[Piece],
    *,
    exact: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    """Return a file of some pieces, the largest elements first. With `exact`, names are not quoted."""
    dtypes = {leaves[piece[0]].dtype for piece in pieces}
    if len({ITEMSIZE[name] for name in dtypes}) > 1:
        pieces = sorted(pieces, key=lambda piece: -ITEMSIZE[leaves[piece[0]].dtype])
    items: dict[str, object] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    position = 0
    known = SAFETENSORS
    for index, _, length, box in pieces:
        leaf = leaves[index]
        path, shape, end = leaf.path, leaf.shape, position + length
        if not exact and ("[" in path or path == "__metadata__"):
            path = _header_name(path)
        if box is not None:
            shape = box.sizes
        if box is not None or leaf.origin is not None:
            path = f"{path}[{place_box(leaf, box)}]"
        theirs = known.get(leaf.dtype)
        if theirs is None:
            theirs, shape = "U8", (*shape, ITEMSIZE[leaf.dtype])
        items[path] = _HeaderItem(theirs, shape, (position, end))
        position = end
    text = _encode(items)
    items.clear()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    header = b"".join(((begin - 8).to_bytes(8, "little"), text, b" " * (begin - 8 - len(text))))
    extents: list[Extent] = []
    position = begin
    for index, start, length, box in pieces:  # an end is the next begin: one number for both
        end = position + length
        extents.append(Extent(index, position, end, start, box))
        position = end
    return FilePlan(header, tuple(extents), position)


def group_in_order(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Split items, in order, into groups of at most `most` bytes, and return their numbers. A larger item is alone."""
    groups: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(number)
        held += size
    return groups


def place_box(leaf: PlannedLeaf, box: Box | None) -> Box:
    """Return a piece of a leaf, as a box of the tensor that the leaf is a box of."""
    box = box or whole_box(leaf.shape)
    return box if leaf.origin is None else box.moved_by(leaf.origin)


_encode = msgspec.json.Encoder().encode


def _header_name(path: str) -> str:
    """Return the header's name of a leaf.

    A user's path cannot contain `%[`: it marks a part of a composite tensor.
    """
    owner, _, part = path.partition("%[")
    return f"{quote_path(owner)}[{part}" if part else quote_path(path)


def cut_file(file: FilePlan, part_bytes: int) -> list[FilePart]:
    """Split a file into parts of equal length, the last one shorter."""
    parts: list[FilePart] = []
    extents = file.extents
    count, at = len(extents), 0
    for begin in range(0, file.size, part_bytes):
        end = min(begin + part_bytes, file.size)
        while at < count and extents[at].end <= begin:
            at += 1
        last = at
        while last < count and extents[last].begin < end:
            last += 1
        parts.append(FilePart(begin, end, at, last))
    return parts


def choose_part_size(limits: Limits, budget: int, file_size: int, wanted: int = 0) -> int:
    """Return the length of parts: the storage's preference, limited by the budget and the number of parts.

    The parts of a long file grow, so that a job with many terabytes does not pay for millions of requests.
    """
    size = wanted or max(limits.preferred_part, min(limits.grown_part, file_size // PARTS, budget // 8))
    share = max(SHORTEST_PART, budget // max(2, min(limits.parallel_parts, 8)))  # rather fewer than ever smaller parts
    size = min(size, limits.largest_part, max(limits.smallest_part, share))
    size = max(size, limits.smallest_part, -(-file_size // limits.most_parts))
    multiple = math.lcm(limits.multiple, PAGE)  # so that no element is split
    return max(multiple, -(-size // multiple) * multiple)
