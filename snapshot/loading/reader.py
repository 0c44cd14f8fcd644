"""Reading: requested ranges are read straight to their destination and verified."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from snapshot.errors import CorruptSnapshotError, StorageNotFoundError
from snapshot.events import emit
from snapshot.formats.derived import DerivedStorage, InOrder, Located
from snapshot.io.accelerators import await_current_streams
from snapshot.io.aio import in_thread, inline, pop_first, run_inline, shielded
from snapshot.io.loop import cancel_all, run
from snapshot.io.storage import Buffer
from snapshot.io.system import count_cores
from snapshot.loading.device_fills import DEVICE_LANES, DEVICE_PART, DeviceFills, PartFill
from snapshot.loading.open import Opened
from snapshot.loading.read_requests import BlockCheck, ReadRequest, slot_bytes
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import FileRange, ReadPart, plan_reads
from snapshot.progress import Meter, unmetered
from snapshot.tensors.buffers import wrap_memory
from snapshot.tensors.digest import BLOCK, block_digest, digest_range, digest_table
from snapshot.text import listed

# A request with an address is read into it. Other requests go through a slot, and are copied once they are verified
# as far as possible. Every byte of storage is fetched once.

SHARES = 8192
"""Maximum number of ranges that are read at once from files. Each takes some hundred bytes of memory until then."""

HOST_LANES = 4
"""The number of threads that read files to host memory."""


class _Run(NamedTuple):
    """Requests for a derived file that is read in order, and the number of stored bytes that they need."""

    file: InOrder
    requests: list[ReadRequest]
    nbytes: int


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
    """Reads ranges from the storage of a checkpoint."""

    def __init__(self, opened: Opened, *, verify: bool, touched: set[str] | None = None) -> None:
        self._opened = opened
        self._storage = storage = opened.storage
        budget, wanted_part = opened.budget, opened.settings.part_bytes
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
        runs: deque[_Run] = deque()  # queues, since the lanes may be threads
        parts: deque[ReadPart] = deque()

        async def lane() -> None:
            while (run := pop_first(runs)) is not None:
                for each in plan_reads(run.requests, self._part, self._gap):
                    if self._stopped:
                        return
                    await self._fetch(each, run.requests)
                run.file.forget()
                progress(run.nbytes)
            while (part := pop_first(parts)) is not None:
                if self._stopped:
                    return
                await self._fetch(part, requests)
                progress(part.end - part.begin)

        try:
            if any(request.opens is not None for request in requests):
                requests = await self._expand(requests, runs)
            to_device = any(request.device is not None for request in requests)
            if to_device:
                self._fills = await in_thread(partial(DeviceFills, requests, self._budget.total, verify=self._verify))
            if self._blocking and to_device:
                self._lanes = min(self._lanes, DEVICE_LANES)
                self._part = max(BLOCK, min(self._device_part, self._budget.limit // (self._lanes + 1)))
            elif self._blocking:
                self._lanes = min(self._lanes, HOST_LANES, count_cores() + 1)  # what is cached takes a core
            most = SHARES if self._blocking else len(requests)
            parts.extend(plan_reads(requests, self._part, self._gap, most))
            if self._verify:
                await self.prepare_checks(requests)
            if inline():  # the caller reads several times in one thread
                await lane()
                return
            count = min(self._lanes, len(parts) + len(runs))
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

    async def locate(self, tensors: Sequence[tuple[str, TensorEntry]]) -> list[Located]:
        """Return where the elements of long packed tensors are, given by names and entries. Only headers are read."""
        return await self._opened.locate(tensors, self._read_places) if tensors else []

    async def _expand(self, requests: Sequence[ReadRequest], runs: deque[_Run]) -> list[ReadRequest]:
        """Replace requests for tensors that must be located by those for their elements.

        Those that must be read in order are added to `runs`.
        """
        found = [request for request in requests if request.opens is None]
        later = [request for request in requests if request.opens is not None]
        tensors = [(request.name, request.stored) for request in later if isinstance(request.stored, TensorEntry)]
        places = await self.locate(tensors)
        derived = {each.entry.location: each.derivation for each in places if each.derivation is not None}
        if derived:  # below them are those of an earlier call, whose ranges may be read again
            self._storage = DerivedStorage(self._storage, derived, {}, self._opened.session.packed_memory)
        for request, place in zip(later, places, strict=True):
            assert request.opens is not None
            if place.derivation is not None:
                runs.append(_Run(place.derivation, request.opens(place.entry), request.end - request.begin))
            else:
                found += request.opens(place.entry)
        return found

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
        bad = {}
        for (where, requests), read in zip(tables.items(), await self._read_places(list(tables)), strict=True):
            digest, held = digest_table(read), bytes(read)
            for request in requests:
                request.check = BlockCheck(request.stored.nbytes, held)
                if digest != request.stored.digest:
                    bad[where] = requests
        return bad

    async def _read_places(self, places: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """Return the bytes of short ranges, merging nearby ones into one request."""
        ranges = [FileRange(*place) for place in places]
        found = [bytearray(each.end - each.begin) for each in ranges]
        at_once = asyncio.Semaphore(self._lanes)

        async def read(part: ReadPart) -> None:
            buffers: list[Buffer] = []
            position = part.begin
            for segment in part.segments:
                begin, held = ranges[segment.request].begin, found[segment.request]
                buffers.append(bytearray(segment.begin - position))
                buffers.append(memoryview(held)[segment.begin - begin : segment.end - begin])
                position = segment.end
            async with at_once:
                await self._read_range(part.location, part.begin, part.end, buffers)

        parts = plan_reads(ranges, self._part, self._gap)
        if inline():
            for part in parts:
                await read(part)
            return found
        reads = [asyncio.create_task(read(part)) for part in parts]
        try:
            await asyncio.gather(*reads)
        except BaseException:
            await shielded(cancel_all(reads))
            raise
        return found

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
        if slot is None:  # most parts: no byte is discarded, or goes elsewhere than to an address
            await self._read_to_addresses(part, requests, fill)
            return
        buffers: list[Buffer] = []
        shares: list[Buffer] = []
        places: list[int] = []
        position, used = part.begin, 0
        touched = self.result.touched
        for segment in part.segments:
            begin, length = segment.begin, segment.end - segment.begin
            if begin > position:
                buffers.append(slot.view[used : used + begin - position])
                used += begin - position
            request = requests[segment.request]
            share: Buffer
            if request.address:
                share = wrap_memory(request.address + begin - request.begin, length)
                if request.live:
                    touched.add(request.name)
            else:
                used = -(-used // 16) * 16
                share = slot.view[used : used + length]
                places.append(used)
                used += length
            buffers.append(share)
            shares.append(share)
            position = segment.end
        await self._read_range(part.location, part.begin, part.end, buffers)
        await in_thread(self._arrived, part, requests, shares, places, fill)

    async def _read_to_addresses(self, part: ReadPart, requests: Sequence[ReadRequest], fill: PartFill) -> None:
        chosen = [requests[segment.request] for segment in part.segments]
        shares: list[Buffer] = [
            wrap_memory(request.address + segment.begin - request.begin, segment.end - segment.begin)
            for request, segment in zip(chosen, part.segments, strict=True)
        ]
        self.result.touched.update([request.name for request in chosen if request.live])
        await self._read_range(part.location, part.begin, part.end, shares)
        if self._verify:
            await in_thread(self._arrived, part, requests, shares, [], fill)

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
            digest = request.stored.digest
            if slot is None and request.check is None and (digest is None or digest_range(share) == digest):
                continue  # most ranges, in the fewest steps
            good = fill.verifies(request, segment.begin, share) or self.is_verified(request, segment.begin, share)
            if request.address or slot is None:
                continue
            at, length = next(placed), segment.end - segment.begin
            if not good or request.place is None:
                continue
            if request.live:
                self.result.touched.update((request.name, *request.also))
            fill.place(request, segment.begin - request.stored.byte_range[0], slot.tensor[at : at + length])
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

    async def _read_range(self, location: str, begin: int, end: int, buffers: Sequence[Buffer]) -> None:
        """Read a range into buffers, and count it."""
        await self._storage.read_into(location, begin, buffers)
        with self._counting:
            self.result.bytes_read += end - begin
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
    result = run(Reader(opened, verify=verify, touched=touched).read(requests, meter.wrote))
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
