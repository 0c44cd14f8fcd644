"""Files of the snapshot that a take is based on: what they hold, compared with the live tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from msgspec.structs import replace

from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.loading.open import Opened
from snapshot.manifest import entries as e
from snapshot.manifest.document import BaseReference, FileEntry
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, FilePlan, Piece, plan_file
from snapshot.save.begin import Claim
from snapshot.save.digests import FileDigests
from snapshot.save.staging import Stager
from snapshot.state.leaves import Leaf
from snapshot.tensors.buffers import wrap_memory
from snapshot.tensors.digest import BLOCK, SIZE, FileTree, count_blocks, digest_range, digest_table
from snapshot.tensors.geometry import Box, find_flat_ranges, is_flat_range, is_inside, whole_box
from snapshot.tensors.memory import ITEMSIZE
from snapshot.text import listed

# Files of the snapshot that a take is based on: what they hold, and whether the leaves of a take could fill them.


ABSENT = (SnapshotNotFoundError, CorruptSnapshotError, UnsupportedFormatError, StorageError)
"""Errors of a base that make a take write everything."""


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
        if self.entry.name and self.base.reference is not None:
            return f"{self.base.reference.url}: {self.entry.name}"
        return str(self.base.opened.url.join(self.location))

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


@runtime_checkable
class SignedFiles(Protocol):
    """A storage with the signed hashes of its files."""

    async def tree(self, path: str) -> FileTree:
        """Return the signed hashes of a file."""
        ...


@dataclass
class Base:
    """An earlier snapshot, opened for a take that is based on it."""

    opened: Opened
    shares: str
    """The way in which the take's storage shares its files, as in `Capabilities.shares`; empty if it cannot."""
    files: dict[str, BaseFile]
    """This rank's data files, by location."""
    elsewhere: frozenset[str] = frozenset()
    """The files that are not in this snapshot, but in its own base."""
    reference: BaseReference | None = None
    """The snapshot that has what this one left out."""
    signed: SignedFiles | None = None
    """Its signed files, if it was opened with a key that signed it."""

    def copies(self) -> dict[tuple[str, str], tuple[str | None, str]]:
        """Return the digest and the physical file of each leaf's range, by its path and its box."""
        return {
            (name, str(each.box or "")): (each.stored.digest, file.origin)
            for file in self.files.values()
            for each in file.ranges
            for name in each.names
        }


def open_base(opened: Opened, rank: int, *, shares: str) -> Base:
    """Return a base with the files that one rank wrote."""
    document = opened.document
    elsewhere = frozenset(location for location, file in document.files.items() if file.in_base)
    base = Base(opened, shares, {}, elsewhere, document.base)
    mine = {
        location
        for location, file in document.files.items()
        if location.endswith(".safetensors") and (file.name or location.split("-")[1:2] == [str(rank)])
    }
    held: dict[str, list[tuple[int, int, str, Box | None, e.TensorEntry]]] = {location: [] for location in mine}
    for path, entry in document.manifest.items():
        if type(entry) is e.TensorEntry:  # nearly all are, so this has the fewest steps
            if (found := held.get(entry.location)) is not None:
                found.append((*entry.byte_range, path.partition("/")[2], None, entry))
            continue
        for suffix, tensor in entry.tensors():
            name, whole = path.partition("/")[2] + suffix, tensor.boxes is None
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


# Comparison of a base's files with the live tensors, and with their own bytes on the disk.

CHECKED = 16
"""Each take reads one of this many parts of the shared bytes from the disk. So 16 takes in a row read all of them."""
AT_RANDOM = 64
"""The first time that a process shares a file, it also reads one of this many parts, chosen at random."""
PART = 4 << 20
IN_FLIGHT = 3
"""Reads of one file at once."""
SLICE = 64 << 20
"""Bytes that one thread compares in a row."""
KEPT = 4096
"""Number of files whose uses are counted."""
Tables = Mapping[tuple[str, int, int], bytes]
"""Tables of digests, by file and range."""

_uses: PerProcess[dict[str, int]] = PerProcess(dict)
"""Number of times that this process shared the same file of the same base, by URL."""


def count_uses(held: BaseFile) -> int:
    """Return the number of takes in a row that shared a file's bytes, as far as the manifest and this process know."""
    return held.entry.age + _uses.get().get(held.place, 0)


def add_use(held: BaseFile, *, again: bool = True) -> None:
    """Count one more use. With `again=False`, the file was written instead, and counting starts from 0."""
    uses = _uses.get()
    uses[held.place] = uses.pop(held.place, 0) + 1 if again else -held.entry.age
    drop_oldest(uses, KEPT)


class Slice(NamedTuple):
    """Some extents of a file, as a file of their own without a header."""

    of: Comparison
    first: int
    plan: FilePlan
    expected: list[tuple[str | None, bytes]]


class Comparison:
    """The comparison of a base's file, or of some of its ranges, with the live tensors: in slices for several threads.

    If the `plan` is a whole file, it has a header, and one difference ends the comparison.
    """

    def __init__(self, held: BaseFile, plan: FilePlan, ranges: Sequence[BaseRange], tables: Tables) -> None:
        self.held = held
        self.plan = plan
        self.ranges = ranges
        self.equal = True
        self.changed: set[int] = set()
        """The leaves that differ, if only some ranges are compared."""
        self.token = ""
        self.read: list[tuple[int, str]] = []
        """The begin of each block that was read from the disk, and its digest."""
        self.faults: list[str] = []
        """The differences between the file on the disk and the live tensors."""
        self.digests = [""] * len(plan.extents)
        self.tables: dict[int, bytes] = {}
        self.slices = list(self._cut(tables))

    def _cut(self, tables: Tables) -> Iterator[Slice]:
        extents, first = self.plan.extents, 0
        for last in range(1, len(extents) + 1):
            if last == len(extents) or extents[last].end - extents[first].begin > SLICE:
                stored = [each.stored for each in self.ranges[first:last]]
                expected = [(each.digest, tables.get(each.blocks, b"") if each.blocks else b"") for each in stored]
                yield Slice(self, first, _without_gaps(extents[first:last]), expected)
                first = last

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the header, and of each block."""
        if self.plan.header:
            yield 0, len(self.plan.header)
        for extent in self.plan.extents:
            for begin in range(extent.begin, extent.end, BLOCK):
                yield begin, min(begin + BLOCK, extent.end)

    def live(self) -> dict[int, str]:
        """Return the digest of the header, and of the live bytes of each unchanged block, by its begin."""
        found = {0: digest_range(self.plan.header)}
        for index, extent in enumerate(self.plan.extents):
            if extent.begin == extent.end or extent.leaf in self.changed:
                continue
            table = self.tables.get(index)
            if table is None:
                found[extent.begin] = self.digests[index]
            else:
                pairs = zip(range(extent.begin, extent.end, BLOCK), range(0, len(table), SIZE), strict=True)
                found |= {begin: f"xxh3:{table[at : at + SIZE].hex()}" for begin, at in pairs}
        return found

    def add(self, slice_: Slice, found: FileDigests) -> None:
        """Record the digests of a slice."""
        self.digests[slice_.first : slice_.first + len(found.digests)] = found.digests
        self.tables.update({slice_.first + index: table for index, table in found.tables.items()})
        pairs = zip(slice_.plan.extents, found.digests, slice_.expected, strict=True)
        self.changed |= {extent.leaf for extent, digest, (expected, _) in pairs if digest != expected}


def _without_gaps(extents: Sequence[Extent]) -> FilePlan:
    moved: list[Extent] = []
    end = 0
    for each in extents:
        moved.append(replace(each, begin=end, end=end + each.end - each.begin))
        end = moved[-1].end
    return FilePlan(b"", tuple(moved), end)


class Comparer:
    """Compares files of bases with the tensors of one take, while it reads a part of each file from the disk."""

    def __init__(self, claim: Claim, stager: Stager, notes: list[str], *, read_all: bool) -> None:
        """`read_all`: read the files whole, instead of a part of them."""
        self._claim = claim
        self._session = claim.session
        self._stager = stager
        self.notes = notes
        self._read_all = read_all
        self._rotten: set[str] = set()

    async def compare(self, comparisons: Sequence[Comparison]) -> None:
        """Run some comparisons."""
        slices = [each for comparison in comparisons for each in comparison.slices]
        await in_thread(self._stager.digest_ahead, [each.plan for each in slices], self._session.budget)
        lanes = self._session.settings.lane_count()
        digest = partial(gather_limited, slices, partial(in_thread, self._compare_slice), lanes)
        read = partial(gather_limited, comparisons, self._read_turn, lanes)
        await gather_limited((digest, read), lambda each: each())  # the disk is read meanwhile

    def _compare_slice(self, slice_: Slice) -> None:
        """Compare a slice with the live tensors, unless another slice of the whole file differs already."""
        of = slice_.of
        if not of.equal:
            return
        expected = slice_.expected if of.plan.header else None
        found = self._stager.digest_file(slice_.plan, self._session.budget, expected)
        if found is None:
            of.equal = False
        else:
            of.add(slice_, found)

    async def _read_turn(self, compared: Comparison) -> None:
        """Read a part of the base's file from the disk, another one in each take."""
        storage, held = compared.held.base.opened.storage, compared.held
        try:
            stat = await storage.stat(held.location)
            if stat.size != held.entry.stored_size:
                raise CorruptSnapshotError(f"must have {held.entry.stored_size:,} bytes, got {stat.size:,}")
            compared.token = stat.token
            if not (self._read_all or storage.capabilities.local):  # a server checks its own disks
                return
            await storage.drop_caches([held.location])
            read = partial(self._read_back, compared)
            for found in await gather_limited(list(_runs_of(self._turn(compared))), read, IN_FLIGHT):
                compared.read += found
        except StorageNotFoundError as error:
            compared.equal = False
            self.note(held, f"cannot be used: {error}")
        except (CorruptSnapshotError, StorageError) as error:
            compared.faults.append(str(error))

    def _turn(self, compared: Comparison) -> list[tuple[int, int]]:
        """Return the blocks to read. The first use in a process also reads some at random: it may be the only one."""
        blocks = list(compared.places())
        if self._read_all or compared.held.entry.size <= PART:
            return blocks
        turn = count_uses(compared.held) % CHECKED
        chosen = set(range(turn * len(blocks) // CHECKED, (turn + 1) * len(blocks) // CHECKED))
        if compared.held.place not in _uses.get():
            begin = random.SystemRandom().randrange(len(blocks))
            chosen.update(range(begin, min(begin + -(-len(blocks) // AT_RANDOM), len(blocks))))
        return [blocks[each] for each in sorted(chosen)]

    async def _read_back(self, compared: Comparison, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
        """Return the begin of each block, and the digest of its bytes on the disk; [] if the file differs anyway."""
        if not compared.equal:
            return []
        held = compared.held
        begin, nbytes = blocks[0][0], blocks[-1][1] - blocks[0][0]
        async with self._session.budget.slot(arena_bytes(nbytes)) as slot:
            await held.base.opened.storage.read_into(held.location, begin, [slot.view[:nbytes]])

            def digests() -> list[tuple[int, str]]:
                return [(low, digest_range(slot.view[low - begin : high - begin])) for low, high in blocks]

            return await in_thread(digests)

    def is_sound(self, compared: Comparison) -> bool:
        """Return True if the bytes that were read from the disk are those of the live tensors; report it if not."""
        held = compared.held
        live = compared.live() if compared.read else {}
        compared.faults += [
            f"block at byte {begin}: digest must be {live[begin]}, got {digest}"
            for begin, digest in compared.read
            if live.get(begin, digest) != digest
        ]
        place = held.place
        if compared.faults and place not in self._rotten:
            self._rotten.add(place)
            self.note(held, f"damaged, so its tensors are written again: {'; '.join(compared.faults[:3])}")
            log.error("%s: damaged; its tensors are written again from memory:%s", place, listed(compared.faults, 10))
            url, verb = str(self._session.url), self._claim.meter.verb
            emit("rotten", verb, url, file=place, faults=list(compared.faults))
        return not compared.faults

    def note(self, held: BaseFile, what: str) -> None:
        """Add a line about a file to the report."""
        self.notes.append(f"{held.place}: {what}")


def _runs_of(blocks: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Split blocks into runs of adjacent ones, of at most PART bytes or one block."""
    first = 0
    for index in range(1, len(blocks) + 1):
        at_end = index == len(blocks)
        if at_end or blocks[index][0] != blocks[index - 1][1] or blocks[index][1] - blocks[first][0] > PART:
            yield blocks[first:index]
            first = index


def _is_table(files: Mapping[str, FileEntry], stored: TensorEntry) -> bool:
    """Return True if the place of a table is inside its file, and has the right length."""
    location, begin, end = stored.blocks or ("", 0, 0)
    table = files.get(location)
    return table is not None and 0 <= begin <= end <= table.size and end - begin == SIZE * count_blocks(stored.nbytes)


async def read_tables(base: Base, ranges: Iterable[BaseRange]) -> dict[tuple[str, int, int], bytes]:
    """Read the tables of digests of some ranges. A damaged table is left out: its tensor counts as changed."""
    wanted = {each.stored.blocks: each.stored for each in ranges if each.stored.blocks is not None}
    runs: list[list[tuple[str, int, int]]] = []
    files = base.opened.document.files
    for place in sorted(place for place, stored in wanted.items() if place and _is_table(files, stored)):
        if not runs or (runs[-1][-1][0], runs[-1][-1][2]) != place[:2]:
            runs.append([])
        runs[-1].append(place)
    tables: dict[tuple[str, int, int], bytes] = {}

    async def read(run: list[tuple[str, int, int]]) -> None:
        location, begin, end = run[0][0], run[0][1], run[-1][2]
        data = bytearray(end - begin)
        try:
            await base.opened.storage.read_into(location, begin, [data])
        except SnapshotError as error:
            log.warning("%s: cannot be read: %s", base.opened.url.join(location), error)
            return
        for place in run:
            table = bytes(data[place[1] - begin : place[2] - begin])
            if digest_table(table) == wanted[place].digest:
                tables[place] = table

    await gather_limited(runs, read)
    return tables
