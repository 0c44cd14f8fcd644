"""Sources of parts: files of another storage, and tensors of another checkpoint."""

from __future__ import annotations

import asyncio
import math
import mmap
import tempfile
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import xxhash

from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.formats.packed_tensors import is_streamed
from snapshot.io.aio import gather_limited, in_thread, shielded
from snapshot.io.arena import Slot
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all
from snapshot.io.session import Session
from snapshot.io.storage import Buffer, Storage
from snapshot.io.system import allocate
from snapshot.io.url import URL
from snapshot.loading.left_out import TABLE, find_uncovered, requests_of
from snapshot.loading.open import Opened
from snapshot.loading.read_plan import MOST_TIMES, ROOM, ReadPlan
from snapshot.loading.read_requests import copy_into, is_packed, is_spread
from snapshot.loading.reader import Reader, raise_faults
from snapshot.manifest.document import Document
from snapshot.manifest.entries import PLAIN, AnyTensor, MappedTensorEntry, TensorEntry
from snapshot.manifest.parts import ManifestPart
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.progress import unmetered
from snapshot.save.compression import Packing
from snapshot.save.digests import FileDigests
from snapshot.save.staging import Key, PartSource, StagedAhead, StagedPart, key_of
from snapshot.save.writer import Writer, writes_serially
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import BLOCK, RunningDigest, digest_range
from snapshot.tensors.geometry import Box, boxes_of_range, intersect, position_of
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, find_enclosing_tensor
from snapshot.text import listed

# Files of another storage as a source of parts: copied byte for byte, and digested in transit.
#
# A file is split as the destination requires, independently of its contents. So stored ranges are followed across
# parts, and compared when their last byte has passed.

FILES = 16
"""The number of files that are written in parallel."""


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """The contents of a range of a file."""

    name: str
    begin: int
    end: int
    digest: str | None
    plain: bool = False
    """True if the digest is of the bytes themselves, without blocks: for headers and digest tables."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file to copy."""

    location: str
    size: int
    token: str | None
    """The token of the file when it was inspected. Reading fails if the file is replaced meanwhile."""
    ranges: tuple[CheckedRange, ...] = ()
    """The ranges to compare in transit: in order and without gaps, or none."""

    def plan(self) -> FilePlan:
        """Return the file as the writer expects it."""
        return FilePlan(b"", tuple(Extent(0, each.begin, each.end) for each in self.ranges), self.size)


def checked_files(
    document: Document,
    parts: Sequence[ManifestPart],
    tokens: Mapping[str, str | None],
    *,
    url: URL,
    verify: bool,
) -> list[CopiedFile]:
    """Return data files of a snapshot, longest first, with the digests to compare. `tokens` names the files.

    Raise CorruptSnapshotError if the manifest and its parts do not describe all bytes of these files.
    """
    own = {location: document.files[location] for location in tokens}
    ranges: dict[str, list[CheckedRange]] = {location: [] for location in own}
    if verify:
        faults: list[str] = []
        some: list[dict[str, Any]] = [{}] if document.parts else []  # not all parts may be given
        requests = requests_of([document.manifest, *some, *(each.manifest for each in parts)], document.files, faults)
        faults += find_uncovered(own, [each for each in requests if each.location in own])
        if faults:
            raise CorruptSnapshotError(
                f"{url}: its manifest does not describe its files:{listed(faults)}", faults=faults
            )
        for location, file in own.items():
            if file.packed is not None:  # it is copied as it is stored
                name = f"{location} (compressed)"
                ranges[location] = [CheckedRange(name, 0, file.packed.size, file.packed.digest)]
            elif file.header:
                ranges[location].append(CheckedRange(f"{location} (header)", 0, file.header, file.header_digest, True))
        for request in requests:
            if request.begin < request.end and request.location in own and own[request.location].packed is None:
                plain = getattr(request.stored, "serializer", "") == TABLE
                ranges[request.location].append(
                    CheckedRange(request.name, request.begin, request.end, request.stored.digest, plain)
                )
    return [
        CopiedFile(location, file.stored_size, tokens[location], tuple(sorted(ranges[location], key=_begin_of)))
        for location, file in sorted(own.items(), key=lambda item: (-item[1].stored_size, item[0]))
    ]


def _begin_of(each: CheckedRange) -> int:
    return each.begin


class FileStream(PartSource):
    """The bytes of files on another storage."""

    def __init__(self, storage: Storage, files: Sequence[CopiedFile]) -> None:
        self._storage = storage
        self.waits = not storage.capabilities.blocking
        self.plans = [file.plan() for file in files]
        self._files = {id(plan): file for plan, file in zip(self.plans, files, strict=True)}

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        passed = self._files[id(file)]
        view = slot.view[: part.end - part.begin]
        await self._storage.read_into(passed.location, part.begin, [view], token=passed.token)

    def digests(self, file: FilePlan) -> FileDigests:
        return CheckedDigests(file, self._files[id(file)])


class PlainDigest:
    """The digest of a range's bytes themselves."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        self._digest.update(data)

    def finish(self) -> tuple[str, bytes]:
        return "xxh3:" + self._digest.hexdigest(), b""


class CheckedDigests(FileDigests):
    """Digests a file's ranges, and raises as soon as one does not match."""

    def __init__(self, file: FilePlan, passed: CopiedFile) -> None:
        super().__init__(file)
        self._passed = passed
        self._open: RunningDigest | PlainDigest | None = None

    def digest_part(self, part: FilePart, shares: Sequence[Buffer]) -> None:
        """Add a part's share of each extent."""
        for index, share in zip(range(part.first, part.last), shares, strict=True):
            each = self._passed.ranges[index]
            if each.digest is None:
                continue
            if each.begin >= part.begin and each.end <= part.end and (each.plain or each.end - each.begin <= BLOCK):
                self._compare(each, digest_range(share))
                continue
            if self._open is None:
                self._open = PlainDigest() if each.plain else RunningDigest()
            self._open.update(memoryview(share).cast("B"))
            if each.end <= part.end:
                self._compare(each, self._open.finish()[0])
                self._open = None

    def _compare(self, each: CheckedRange, actual: str) -> None:
        if actual != each.digest:
            where = f"{self._passed.location}[{each.begin}:{each.end}]"
            line = f"{each.name}: {where}: digest must be {each.digest}, got {actual}"
            raise CorruptSnapshotError(line, faults=[line])


class ReadAhead(StagedAhead):
    """Parts of files on another storage that are read ahead, several at once.

    The parts of each file are read in order, so that a part with memory never waits for a part without.
    """

    def __init__(self, source: FileStream, budget: MemoryBudget, at_once: int) -> None:
        self._source = source
        self._budget = budget
        self._at_once = max(2, at_once // max(1, min(FILES, len(source.plans))))
        self._parts: dict[int, list[FilePart]] = {}
        """The parts of each file that is being written, by its id."""
        self._reads: dict[Key, asyncio.Task[StagedPart]] = {}
        self._stopped = False

    def cut(self, file: FilePlan, nbytes: int) -> list[FilePart]:
        parts = self._parts[id(file)] = super().cut(file, nbytes)
        return parts

    def digests(self, file: FilePlan) -> FileDigests:
        return self._source.digests(file)

    async def ready(self, file: FilePlan, part: FilePart) -> None:
        parts = self._parts[id(file)]
        position = bisect_left(parts, part.begin, key=attrgetter("begin"))
        for ahead in parts[position : position + self._at_once]:
            key = key_of(file, ahead)
            if key not in self._reads and not self._stopped:
                self._reads[key] = asyncio.create_task(self._read(file, ahead))
        await self._reads[key_of(file, part)]

    def take(self, file: FilePlan, part: FilePart) -> StagedPart:
        return self._reads.pop(key_of(file, part)).result()

    async def _read(self, file: FilePlan, part: FilePart) -> StagedPart:
        held = await self._budget.hold(part.end - part.begin)
        try:
            return await self._source.fetch(file, part, held)
        except BaseException:
            held.release()
            raise

    def stop(self, error: BaseException) -> None:
        self._stopped = True
        for read in self._reads.values():
            read.cancel()

    async def end(self) -> None:
        self._stopped = True
        await shielded(cancel_all(list(self._reads.values())))
        for read in self._reads.values():
            if not read.cancelled() and read.exception() is None:
                read.result().release()
        self._reads.clear()


Write = Callable[[Writer, Sequence[FilePlan]], Coroutine[Any, Any, object]]


async def copy_files_through(
    source: Storage,
    target: Session,
    files: Sequence[CopiedFile],
    progress: Callable[[int], None],
    write: Write,
    *,
    packing: Packing | None = None,
) -> None:
    """Copy files between two storages, several parts of several files at once.

    `write` calls the writer with the destination names.
    """
    stream, part_bytes = FileStream(source, files), target.settings.part_bytes
    parts: PartSource = stream
    if writes_serially(target.storage, stream):
        part_bytes = part_bytes or source.limits.hot_part
    else:
        parts = ReadAhead(stream, target.budget, source.limits.parallel_parts)
    writer = Writer(
        target.storage, parts, target.budget, progress, wanted_part=part_bytes, most_files=FILES, packing=packing
    )
    try:
        await write(writer, stream.plans)
    finally:
        await parts.end()


async def stat_files(storage: Storage, locations: Iterable[str]) -> dict[str, tuple[int, str | None]]:
    """Return the size and version token of each file, so that a later replacement can be detected."""
    names = list(locations)

    async def look(location: str) -> tuple[int, str | None]:
        found = await storage.stat(location)
        return found.size, found.token or None

    return dict(zip(names, await gather_limited(names, look, FILES), strict=True))


# Tensors of another checkpoint as a source of parts, each read just before it is written, within the budget.

Held = int | tuple[int, int]
"""A leaf, or the leaf and the number of one of its stored pieces."""
Used = list[tuple[Held, int]]
"""Held tensors, and the number of their elements that were copied."""
Made = Callable[[], bytes]
"""Functions whose bytes depend on the bytes before them in the file."""


def expect_room(document: Document, leaves: Sequence[Leaf], origins: Sequence[Any]) -> None:
    """Raise if tensors would be written with far more bytes than the files have.

    Views may repeat a few bytes, and a compressed tensor may expand to any size.
    """
    stored = sum(file.size for file in document.files.values())
    most, total = ROOM + MOST_TIMES * stored, 0
    for leaf, origin in zip(leaves, origins, strict=True):
        if isinstance(origin, AnyTensor):
            total += math.prod(origin.shape) * ITEMSIZE[origin.dtype]
            if total > most:
                raise CorruptSnapshotError(
                    f"{leaf.path}: the tensors would take more than {most:,} bytes, but the files have {stored:,}; "
                    "convert fewer with select=[...], or restore them and take a snapshot"
                )


def reads_ranges(entry: AnyTensor) -> bool:
    """Return True if any range of a tensor can be read alone, so that several ranks can share it."""
    return not (entry.is_mapped or any(is_streamed(stored) or is_packed(stored) for stored in entry.stored()))


@dataclass(frozen=True)
class LeafReads:
    """How the leaves of a source are read."""

    verify: bool
    """Verify the digests of what is read."""
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For permuted leaves, the order of their dimensions in the entry."""
    sums: dict[int, int] | None = None
    """Collects the CRC32 of each leaf's bytes."""


class CheckpointSource(PartSource):
    """Leaves that are read from a checkpoint part by part, or whose bytes are given or computed when written."""

    def __init__(self, opened: Opened, leaves: Sequence[Leaf], origins: Sequence[Any], how: LeafReads) -> None:
        """`origins`: for each leaf its tensor's entry, its bytes, or a function that returns them."""
        self.leaves = leaves
        self._opened = opened
        self._document = opened.document
        self._origins = origins
        self._verify, self._orders, self._sums = how.verify, how.orders, how.sums
        self._held: dict[Held, torch.Tensor] = {}
        """Tensors that are read once as a whole, and such pieces: see `_whole` and `_piece`."""
        self._left: dict[Held, int] = {}
        """For each of them, the number of elements that have not been copied yet."""
        self.bytes_read = 0
        self._counting = threading.Lock()  # parts may be read in several threads
        self._making = asyncio.Lock()
        self._by_source: dict[int, bool] = {}
        """True for mapped tensors that are copied from whole stored ones: see `_needs_sources`."""
        self._parted: set[int] = set()
        """Leaves that are read part by part."""

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        if part.begin < len(file.header):
            header = file.header[part.begin : part.end]
            slot.view[: len(header)] = header
        read_plan = ReadPlan(self._document.files)
        copies: list[Callable[[], object]] = []
        used: Used = []
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            if begin == end:
                continue
            at, origin = begin - part.begin, self._origins[extent.leaf]
            first = extent.start + begin - extent.begin
            if callable(origin):
                continue  # depends on the bytes before it
            if isinstance(origin, bytes):
                slot.view[at : at + end - begin] = origin[first : first + end - begin]
            else:
                copies += await self._want(
                    read_plan, extent.leaf, origin, first, nbytes=end - begin, slot=slot, at=at, used=used
                )
        if read_plan.requests:
            await self._read(read_plan)
        await in_thread(self._finish, read_plan, copies, file, part, slot)
        for index, count in used:  # elements of held tensors that were copied
            self._left[index] -= count
            if not self._left[index]:
                del self._held[index]

    async def _want(
        self,
        read_plan: ReadPlan,
        index: int,
        entry: AnyTensor,
        first: int,
        *,
        nbytes: int,
        slot: Slot,
        at: int,
        used: Used,
    ) -> list[Callable[[], object]]:
        """Request a range of a tensor's bytes into the slot. Return the copies to make afterwards.

        The held tensors that they use are added to `used`.
        """
        leaf = self.leaves[index]
        dtype = BY_NAME[leaf.dtype]
        itemsize = dtype.itemsize
        if leaf.whole is not None:  # a box that is one range of the whole tensor
            first += itemsize * position_of(leaf.origin or (0,) * len(leaf.shape), leaf.whole.shape)
            leaf = leaf.whole
        staged = slot.tensor[at : at + nbytes].view(dtype)
        order = self._orders.get(index) or tuple(range(len(leaf.shape)))
        pieced = _is_pieced(entry)
        whole = None if pieced or self._needs_sources(entry) else await self._whole(index, entry)
        begin, end = first // itemsize, (first + nbytes) // itemsize
        copies: list[Callable[[], object]] = []
        for position, box in boxes_of_range(leaf.shape, begin, end):
            target = staged[position - begin : position - begin + box.numel].view(box.sizes)
            back = [order.index(axis) for axis in range(len(order))]
            target = target.permute(back)
            there = Box(tuple(box.offsets[axis] for axis in back), tuple(box.sizes[axis] for axis in back))
            if self._needs_sources(entry):
                copies += await self._copies_from_sources(entry, there, target, used)
            elif pieced:
                copies += await self._copies_from_pieces(index, entry, there, target, used)
            elif whole is None:
                read_plan.into_box(leaf.path, entry, there, target)
            else:
                copies.append(partial(target.copy_, whole[there.slices()]))
        if whole is not None:
            used.append((index, end - begin))
        return copies

    @property
    def is_blocking(self) -> bool:
        """True if the storage has only blocking calls."""
        return self._opened.storage.capabilities.blocking

    async def reads_parts(self, index: int) -> bool:
        """Return True if a tensor is read part by part, not once as a whole."""
        return not _is_pieced(self._origins[index]) and await self._whole(index, self._origins[index]) is None

    async def _copies_from_pieces(
        self, index: int, entry: AnyTensor, box: Box, target: torch.Tensor, used: Used
    ) -> list[Callable[[], object]]:
        """Return the copies that fill a box from pieces that are read once, each when its first element is needed."""
        copies: list[Callable[[], object]] = []
        for number, (piece, stored) in enumerate(entry.pieces()):
            shared = intersect(piece, box)
            if shared is not None:
                held = await self._piece((index, number), stored)
                source = held[shared.relative_to(piece.offsets).slices()]
                copies.append(partial(copy_into, target[shared.relative_to(box.offsets).slices()], source))
                used.append(((index, number), shared.numel))
        return copies

    async def _piece(self, key: tuple[int, int], stored: TensorEntry) -> torch.Tensor:
        """Return a stored piece of a tensor. It is kept until all of it is written."""
        async with self._making:
            if key not in self._held:
                self._held[key] = await self._read_whole(self.leaves[key[0]].path, stored)
                self._left[key] = math.prod(stored.shape)
            return self._held[key]

    async def _whole(self, index: int, entry: AnyTensor) -> torch.Tensor | None:
        """Return the whole tensor if reading it part by part would read its bytes repeatedly, otherwise None."""
        if index in self._parted:
            return None
        async with self._making:  # several files may contain parts of the tensor
            if index in self._parted:
                return None
            if index not in self._held:
                if not await self._is_scattered(index, entry):
                    self._parted.add(index)
                    return None
                self._held[index] = await self._read_whole(self.leaves[index].path, entry)
                self._left[index] = math.prod(self.leaves[index].shape)
            return self._held[index]

    def _needs_sources(self, entry: Any) -> bool:
        """Return True for one of several mapped tensors whose parts are scattered over the same stored tensor."""
        if not isinstance(entry, MappedTensorEntry):
            return False
        if id(entry) not in self._by_source:
            sources = {id(source): math.prod(source.shape) for source in entry.sources()}
            larger = sum(sources.values()) > 2 * math.prod(entry.shape)
            self._by_source[id(entry)] = larger and is_spread(entry)
        return self._by_source[id(entry)]

    async def _copies_from_sources(
        self, entry: Any, box: Box, target: torch.Tensor, used: Used
    ) -> list[Callable[[], object]]:
        """Return the copies that fill a box of a mapped tensor from stored tensors that are read once as a whole."""
        copies: list[Callable[[], object]] = []
        for part in entry.parts_in(box):
            grids = part.grid.clip("target", box)
            if grids:
                source = await self._source(part.entry)
                origin = (0,) * len(part.entry.shape)
                for grid in grids:
                    views = grid.view("target", target, box.offsets), grid.view("source", source, origin)
                    copies.append(partial(copy_into, *views))
                    used.append((id(part.entry), grid.numel))
        return copies

    async def _source(self, entry: AnyTensor) -> torch.Tensor:
        """Return a stored tensor that several mapped ones are copied from. It is kept until all of them are written."""
        key = id(entry)
        async with self._making:
            if key not in self._held:
                self._left[key] = sum(
                    part.grid.numel
                    for origin in self._origins
                    if self._needs_sources(origin)
                    for part in origin.parts
                    if part.entry is entry
                )
                self._held[key] = await self._read_whole("a source of the map", entry)
            return self._held[key]

    async def _read_whole(self, name: str, entry: AnyTensor) -> torch.Tensor:
        held = await in_thread(self._room, entry)
        read_plan = ReadPlan(self._document.files)
        read_plan.into(name, entry, held)
        await self._read(read_plan)
        await in_thread(read_plan.finish)
        return held

    def _room(self, entry: AnyTensor) -> torch.Tensor:
        """Allocate memory for a whole tensor; for a long one, in a temporary file that the system can page out."""
        dtype, count = BY_NAME[entry.dtype], math.prod(entry.shape)
        nbytes = count * dtype.itemsize
        if nbytes + sum(each.nbytes for each in self._held.values()) <= self._opened.budget.limit // 4:
            return torch.empty(entry.shape, dtype=dtype)
        try:
            with tempfile.TemporaryFile(prefix="snapshot-convert-") as file:
                allocate(file.fileno(), nbytes)  # a mapping without disk space kills the process
                return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=dtype).view(entry.shape)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: no space for a tensor of {nbytes:,} bytes, which must be read whole; "
                f"set TMPDIR to a larger folder: {error}"
            ) from error

    async def _is_scattered(self, index: int, entry: Any) -> bool:
        """Return True if a part of a long tensor, in write order, is scattered over its stored bytes."""
        if entry.is_mapped:
            return is_spread(entry)
        pieces = [stored for _, stored in entry.pieces()]
        if sum(stored.nbytes for stored in pieces) <= BLOCK:
            return False
        if index in self._orders or any(is_streamed(stored) for stored in pieces):
            return True
        path = self.leaves[index].path
        packed = [(path, stored) for stored in pieces if is_packed(stored) and stored.nbytes > BLOCK]
        return any(_is_odd(place.entry) for place in await self._reader().locate(packed))

    async def _read(self, read_plan: ReadPlan) -> None:
        result = await self._reader().read(read_plan.requests, unmetered)
        with self._counting:
            self.bytes_read += result.bytes_read
        raise_faults(self._opened, result)

    def _reader(self) -> Reader:
        return Reader(self._opened, verify=self._verify)

    def _finish(
        self, read_plan: ReadPlan, copies: list[Callable[[], object]], file: FilePlan, part: FilePart, slot: Slot
    ) -> None:
        read_plan.finish()
        for copy in copies:
            copy()
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            at, origin = slice(begin - part.begin, end - part.begin), self._origins[extent.leaf]
            if callable(origin):
                first = extent.start + begin - extent.begin
                slot.view[at] = origin()[first : first + end - begin]
            elif self._sums is not None and not isinstance(origin, bytes):
                self._sums[extent.leaf] = zlib.crc32(slot.view[at], self._sums.get(extent.leaf, 0))


def _is_pieced(entry: Any) -> bool:
    """Return True for a long tensor of several pieces that can each be read only from the first byte on."""
    if not isinstance(entry, AnyTensor) or entry.boxes is None:
        return False
    pieces = entry.stored()
    return len(pieces) > 1 and sum(each.nbytes for each in pieces) > BLOCK and any(map(is_streamed, pieces))


def _is_odd(tensor: TensorEntry) -> bool:
    """Return True if a tensor is not stored in the order of its dimensions, or overlaps itself."""
    shape, strides = tensor.shape, (tensor.extra or PLAIN).strides
    if strides is None:
        return False
    found = find_enclosing_tensor(shape, strides)
    return found is None or [axis for axis in found.order if shape[axis] > 1] != sorted(
        axis for axis in found.order if shape[axis] > 1
    )
