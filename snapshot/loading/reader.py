"""Reading: requested ranges are read straight to their destination and verified."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from snapshot.errors import CorruptSnapshotError, StorageNotFoundError
from snapshot.events import emit
from snapshot.formats.torch_save import (
    HEAD,
    LONGEST_HEAD,
    EmbeddedLayout,
    find_layout,
    is_archived,
    is_streamed,
)
from snapshot.formats.zip_archive import MoreBytesNeeded
from snapshot.io.accelerators import await_current_streams
from snapshot.io.aio import in_thread, inline, pop_first, run_inline, shielded
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all, run
from snapshot.io.storage import Buffer, Storage
from snapshot.loading.device_fills import DEVICE_LANES, DEVICE_PART, DeviceFills, PartFill
from snapshot.loading.embedded import EmbeddedParser, locate_embedded, parse_whole
from snapshot.loading.open import Opened
from snapshot.loading.read_requests import BlockCheck, ReadRequest, slot_bytes
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import ReadPart, plan_reads
from snapshot.progress import Meter, unmetered
from snapshot.tensors.digest import BLOCK, block_digest, digest_range, digest_table
from snapshot.tensors.memory import wrap_memory
from snapshot.text import listed

# A request with an address is read into it. Other requests go through a slot, and are copied once they are verified
# as far as possible. Every byte of storage is fetched once.

LOOK = 1 << 20
"""Bytes per read of a range that must be parsed sequentially."""

SHARES = 8192
"""Maximum number of ranges that are read at once from files. Each takes some hundred bytes of memory until then."""

Followed = tuple[ReadRequest, EmbeddedLayout | None]
"""A range that is parsed from its first byte, or from the start of its tensor's storage if that is known."""
HOST_LANES = 4
"""The number of threads that read files to host memory."""
TRIES = 4
"""Maximum attempts to find an archive's directory, reading more bytes each time."""


class _Table(msgspec.Struct, gc=False):
    """The location of a table of digests, and the bytes that were read of it."""

    location: str
    begin: int
    end: int
    held: bytearray


@dataclass
class ReadResult:
    """Counts, faults and written tensors of a read."""

    bytes_read: int = 0
    requests: int = 0
    faults: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)

    def add(self, other: ReadResult) -> None:
        """Add the counts of another read."""
        self.bytes_read += other.bytes_read
        self.requests += other.requests


class Reader:
    """Reads ranges from one storage."""

    def __init__(
        self,
        storage: Storage,
        budget: MemoryBudget,
        *,
        verify: bool,
        wanted_part: int = 0,
        touched: set[str] | None = None,
    ) -> None:
        self._storage = storage
        self._counting = threading.Lock()
        self._budget = budget
        self._verify = verify
        limits = storage.limits
        self._gap = limits.merge_gap
        self._blocking = storage.capabilities.blocking
        self._lanes = limits.parallel_parts
        self._device_part = wanted_part or DEVICE_PART
        part = wanted_part or (limits.hot_part if self._blocking else min(limits.preferred_part, limits.largest_part))
        # Threads take their slots in turn; requests without a slot must not wait for those with one.
        self._part = max(BLOCK, min(part, budget.limit // (max(2, limits.parallel_parts) if self._blocking else 2)))
        self._fills = DeviceFills((), 0, verify=False)
        self._stopped = False
        self._bad: list[ReadRequest] = []
        self.result = ReadResult(touched=set() if touched is None else touched)

    async def read(self, requests: Sequence[ReadRequest], progress: Callable[[int], None]) -> ReadResult:
        """Read all requests. Digest mismatches are added to the result's `faults`; any other error is raised."""
        await self._all(requests, progress)
        await self.again()
        return self.result

    async def again(self) -> None:
        """Retry ranges that failed verification: from other places, or once more over a network."""
        once_more = not self._storage.capabilities.local
        while self._bad:
            bad = list({id(request): request for request in self._bad}.values())
            if not (self._switch_sources(request.location for request in bad) or once_more):
                return
            once_more = False
            emit("retry", "read", str(self._storage.url), attempt=1, error="; ".join(self.result.faults), pause=0.0)
            self._bad, self.result.faults = [], []
            await self._all(bad, unmetered)

    def _switch_sources(self, locations: Iterable[str]) -> bool:
        """Read damaged files from other places from now on. Return False if one of them has no other place."""
        return not [each for each in sorted(set(locations)) if not self._storage.switch_source(each)]

    async def _all(self, requests: Sequence[ReadRequest], progress: Callable[[int], None]) -> None:
        lanes: list[asyncio.Task[None]] = []
        followed: deque[Followed] = deque()  # queues, since the lanes may be threads
        parts: deque[ReadPart] = deque()

        async def lane() -> None:
            while (each := pop_first(followed)) is not None:
                if self._stopped:
                    return
                await self._follow(*each)
                progress(each[0].end - each[0].begin)
            while (part := pop_first(parts)) is not None:
                if self._stopped:
                    return
                await self._fetch(part, requests)
                progress(part.end - part.begin)

        try:
            if any(request.opens is not None for request in requests):
                requests, more = await self._opened(requests)
                followed.extend(more)
            to_device = any(request.device is not None for request in requests)
            if to_device:
                self._fills = await in_thread(partial(DeviceFills, requests, self._budget.total, verify=self._verify))
            if self._blocking and to_device:
                self._lanes = min(self._lanes, DEVICE_LANES)
                self._part = max(BLOCK, min(self._device_part, self._budget.limit // (self._lanes + 1)))
            elif self._blocking:
                self._lanes = min(self._lanes, HOST_LANES)
            most = SHARES if self._blocking else len(requests)
            parts.extend(plan_reads(requests, self._part, self._gap, most))
            if self._verify:
                await self.prepare_checks(requests)
            if inline():  # the caller reads several times in one thread
                await lane()
                return
            count = min(self._lanes, len(parts) + len(followed))
            if self._blocking:
                lanes += [asyncio.create_task(in_thread(run_inline, lane)) for _ in range(count)]
            else:
                lanes += [asyncio.create_task(lane()) for _ in range(count)]
            await asyncio.gather(*lanes)
        except BaseException as error:
            self._stopped = True
            if lanes:
                await shielded(cancel_all(lanes))
            if isinstance(error, (CorruptSnapshotError, StorageNotFoundError)):
                raise CorruptSnapshotError(
                    f"{error}{_touched_text(self.result.touched)}",
                    faults=[str(error)],
                    touched=sorted(self.result.touched),
                ) from error
            if self.result.touched:
                error.add_note(f"live tensors that were written: {', '.join(sorted(self.result.touched))}")
            raise

    async def _opened(self, requests: Sequence[ReadRequest]) -> tuple[list[ReadRequest], list[Followed]]:
        """Locate long embedded tensors and add requests for them, and return the ranges to parse sequentially.

        Short embedded tensors are parsed on arrival.
        """
        found: list[ReadRequest] = []
        long: list[ReadRequest] = []
        followed: list[Followed] = []
        for request in requests:
            if request.opens is None or request.end - request.begin <= BLOCK:
                found.append(request)
            elif is_streamed(request.stored):
                followed.append((request, None))
            else:
                long.append(request)
        heads = await self._heads(long, [(HEAD, HEAD if is_archived(request.stored) else 0) for request in long])
        for request, held in zip(long, heads, strict=True):
            stored = request.stored
            assert isinstance(stored, TensorEntry)
            for _ in range(TRIES):
                try:
                    layout = find_layout(request.name, stored, *held)
                    break
                except MoreBytesNeeded as short:
                    most = min(request.end - request.begin, LONGEST_HEAD)
                    lengths = [(min(most, max(HEAD, short.args[0])), min(most, max(HEAD, short.args[1])))]
                    held = (await self._heads([request], lengths))[0]  # noqa: PLW2901 - the same, longer
            else:
                raise CorruptSnapshotError(f"{request.name}: not found in {request.location}[{request.begin}:...]")
            if layout.plain:
                found += locate_embedded(request, layout)
            else:
                followed.append((request, layout))
        return found, followed

    async def _heads(
        self, requests: Sequence[ReadRequest], lengths: Sequence[tuple[int, int]]
    ) -> list[tuple[bytearray, ...]]:
        """Return the first and the last bytes of ranges."""
        ranges: list[_Table] = []
        for request, (first, last) in zip(requests, lengths, strict=True):
            begin, end = request.begin, request.end
            low, high = min(begin + first, end), max(begin, end - last)
            ranges.append(_Table(request.location, begin, low, bytearray(low - begin)))
            ranges.append(_Table(request.location, high, end, bytearray(end - high)))
        await self._read_ranges(ranges)
        return [(first.held, last.held) for first, last in zip(ranges[::2], ranges[1::2], strict=True)]

    async def _follow(self, request: ReadRequest, layout: EmbeddedLayout | None) -> None:
        """Read a range sequentially, and deliver its contents."""
        parser = EmbeddedParser(request, layout)
        begin = request.begin if layout is None else layout.begin
        async with self._budget.slot(LOOK) as slot:

            async def through(step: Callable[[memoryview], object]) -> None:
                for at in range(begin, request.end, LOOK):
                    if self._stopped:
                        return
                    piece = slot.view[: min(LOOK, request.end - at)]
                    await self._storage.read_into(request.location, at, [piece])
                    self._count(len(piece))
                    if await in_thread(step, piece) is False:
                        return

            if parser.looks:
                await through(parser.look)
                await in_thread(parser.looked)
            if request.live:
                self.result.touched.add(request.name)
            await through(parser.take)
            if not self._stopped:
                await in_thread(parser.taken)

    async def prepare_checks(self, requests: Sequence[ReadRequest]) -> None:
        """Read and verify the digest tables of partly requested ranges, which are then checked block by block."""
        tables: dict[tuple[str, int, int], list[ReadRequest]] = defaultdict(list)
        for request in requests:
            stored = request.stored
            begin, end = stored.byte_range
            if end - begin <= BLOCK or stored.digest is None:
                continue
            if (request.begin, request.end) == (begin, end):
                request.check = BlockCheck(end - begin, None)
            elif stored.blocks is not None:
                tables[stored.blocks].append(request)
        bad = await self._read_tables(tables)
        once_more = not self._storage.capabilities.local
        while bad and (self._switch_sources(where[0] for where in bad) or once_more):  # as in `again`
            once_more = False
            bad = await self._read_tables(bad)
        for (location, begin, end), whose in bad.items():
            raise CorruptSnapshotError(
                f"{whose[0].name}: the table of digests in {location}[{begin}:{end}] does not match its "
                f"digest {whose[0].stored.digest}"
            )

    async def _read_tables(
        self, tables: Mapping[tuple[str, int, int], list[ReadRequest]]
    ) -> dict[tuple[str, int, int], list[ReadRequest]]:
        """Read tables, merging nearby ones into one request. Return the tables that failed verification."""
        ranges = [_Table(*where, bytearray(where[2] - where[1])) for where in tables]
        await self._read_ranges(ranges)
        bad = {}
        for (where, requests), table in zip(tables.items(), ranges, strict=True):
            digest, held = digest_table(table.held), bytes(table.held)
            for request in requests:
                request.check = BlockCheck(request.stored.nbytes, held)
                if digest != request.stored.digest:
                    bad[where] = requests
        return bad

    async def _read_ranges(self, ranges: Sequence[_Table]) -> None:
        """Read short ranges into memory, merging nearby ones into one request."""
        at_once = asyncio.Semaphore(self._lanes)

        async def read(part: ReadPart) -> None:
            buffers: list[Buffer] = []
            position = part.begin
            for segment in part.segments:
                table = ranges[segment.request]
                buffers.append(bytearray(segment.begin - position))
                buffers.append(memoryview(table.held)[segment.begin - table.begin : segment.end - table.begin])
                position = segment.end
            async with at_once:
                await self._storage.read_into(part.location, part.begin, buffers)
            self._count(part.end - part.begin)

        parts = plan_reads(ranges, self._part, self._gap)
        if inline():
            for part in parts:
                await read(part)
            return
        reads = [asyncio.create_task(read(part)) for part in parts]
        try:
            await asyncio.gather(*reads)
        except BaseException:
            await shielded(cancel_all(reads))
            raise

    async def _fetch(self, part: ReadPart, requests: Sequence[ReadRequest]) -> None:
        scratch = slot_bytes(part, requests)
        if scratch:
            pinning = self._fills.pinning(requests[segment.request] for segment in part.segments)
            more = self._fills.scratch_bytes(part, requests)
            async with self._budget.slot(scratch + more, pinning) as slot:
                await self._read(part, requests, self._fills.part(slot, scratch))
        else:
            await self._read(part, requests, self._fills.part(None, 0))

    async def _read(self, part: ReadPart, requests: Sequence[ReadRequest], fill: PartFill) -> None:
        slot = fill.slot
        buffers: list[Buffer] = []
        shares: list[Buffer] = []
        places: list[int] = []
        position, used = part.begin, 0
        touched = self.result.touched
        for segment in part.segments:
            begin, length = segment.begin, segment.end - segment.begin
            if begin > position:
                assert slot is not None
                buffers.append(slot.view[used : used + begin - position])
                used += begin - position
            request = requests[segment.request]
            share: Buffer
            if request.address:
                share = wrap_memory(request.address + begin - request.begin, length)
                if request.live:
                    touched.add(request.name)
            else:
                assert slot is not None
                used = -(-used // 16) * 16
                share = slot.view[used : used + length]
                places.append(used)
                used += length
            buffers.append(share)
            shares.append(share)
            position = segment.end
        await self._storage.read_into(part.location, part.begin, buffers)
        self._count(part.end - part.begin)
        if self._verify or slot is not None:
            await in_thread(self._arrived, part, requests, shares, places, fill)

    def _arrived(
        self,
        part: ReadPart,
        requests: Sequence[ReadRequest],
        shares: list[Buffer],
        places: list[int],
        fill: PartFill,
    ) -> None:
        """Verify the bytes of a part, and place those that went through a slot.

        On the host, bytes are verified before they are placed.
        """
        placed, slot = iter(places), fill.slot
        for segment, share in zip(part.segments, shares, strict=True):
            request = requests[segment.request]
            good = fill.verifies(request, segment.begin, share) or self.is_verified(request, segment.begin, share)
            if request.address or slot is None:
                continue
            at, length = next(placed), segment.end - segment.begin
            if request.opens is None and (not good or request.place is None):
                continue
            if request.live:
                self.result.touched.update((request.name, *request.also))
            data = slot.tensor[at : at + length]
            if request.opens is not None:
                parse_whole(request, share, data)
            else:
                fill.place(request, segment.begin - request.stored.byte_range[0], data)
        for checked, found in fill.finish():
            self.is_verified(checked.request, checked.begin, checked.share, found)

    def is_verified(
        self, request: ReadRequest, begin: int, share: Buffer, found: tuple[str, bytes] | None = None
    ) -> bool:
        """Return True if a request's bytes from `begin` on match their digests, as far as that is known yet.

        `found` is their digest, and the digests of their blocks if they have several.
        """
        if not self._verify or request.stored.digest is None:
            return True
        if request.check is not None:
            data = memoryview(share).cast("B")
            if found is None:
                made = b"".join(block_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
            else:
                made = found[1] or bytes.fromhex(found[0].rpartition(":")[2])
            return self._check(request, begin, made, len(data))
        actual = digest_range(share) if found is None else found[0]
        return actual == request.stored.digest or self._refuse(
            request, f"digest must be {request.stored.digest}, got {actual}"
        )

    def _check(self, request: ReadRequest, begin: int, made: bytes, nbytes: int) -> bool:
        check = request.check
        assert check is not None
        check.update(begin - request.stored.byte_range[0], made)
        if check.table is not None:
            return check.bad is None or self._refuse(request, check.bad)
        with self._counting:
            check.left -= nbytes
            complete = check.left == 0
        if complete:
            actual = digest_table(check.digests)
            if actual != request.stored.digest:
                return self._refuse(request, f"digest must be {request.stored.digest}, got {actual}")
        return True

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.result.bytes_read += nbytes
            self.result.requests += 1

    def _refuse(self, request: ReadRequest, what: str) -> bool:
        begin, end = request.stored.byte_range
        self.result.faults.append(f"{request.name}: {request.location}[{begin}:{end}]: {what}")
        self._bad.append(request)
        return False


def _touched_text(names: set[str]) -> str:
    return f"; live tensors that were written: {', '.join(sorted(names))}" if names else ""


# Read all requested ranges, and raise if any fails verification.


def fetch_requests(
    opened: Opened, requests: Sequence[ReadRequest], verify: bool, meter: Meter, touched: set[str] | None = None
) -> ReadResult:
    """Read ranges, and raise if any fails verification. `touched` collects the live tensors that are written."""
    touched = set() if touched is None else touched
    if not requests:
        return ReadResult(touched=touched)
    await_current_streams({request.device for request in requests})
    reader = Reader(
        opened.storage, opened.budget, verify=verify, wanted_part=opened.settings.part_bytes, touched=touched
    )
    result = run(reader.read(requests, meter.wrote))
    raise_faults(opened, result)
    return result


TOUCHED = "\nlive tensors that were written, and may hold wrong data now:"


def raise_faults(opened: Opened, result: ReadResult) -> None:
    """Raise if any range failed verification."""
    if result.faults:
        touched = sorted(result.touched)
        raise CorruptSnapshotError(
            f"{opened.url}: {len(result.faults)} damaged:{listed(result.faults)}"
            + (f"{TOUCHED}{listed(touched)}" if touched else ""),
            faults=result.faults,
            touched=touched,
        )
