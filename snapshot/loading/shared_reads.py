"""Shared reads: one rank reads a range that all ranks want, and broadcasts it through the process group.

This is the only module that uses the group's collectives. It does so in the foreground, in one order on all ranks.
A rank whose read fails sends its error in the message that the others wait for.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
import xxhash

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError, SnapshotError
from snapshot.io.accelerators import await_current_streams
from snapshot.io.aio import in_thread
from snapshot.io.loop import run, start
from snapshot.io.url import URL
from snapshot.loading.open import Opened
from snapshot.loading.read_requests import ReadRequest, copy_into
from snapshot.loading.reader import Reader, ReadResult
from snapshot.loading.restore_plan import MATCH_NAMES, RestorePlan
from snapshot.manifest.document import save_id_in
from snapshot.plan.layout import FileRange, ReadPart, plan_reads
from snapshot.progress import Meter
from snapshot.tensors.buffers import copy_memory, wrap_memory
from snapshot.tensors.digest import BLOCK, digest_range, split_digests
from snapshot.text import listed

PART = 8 << 20
AHEAD = 2
"""The number of parts that a rank reads ahead of their turn."""
LOOK = 0.2
"""Seconds that a rank waits for a part before it checks whether the other ranks are alive."""
WORTH = 1 << 20
"""Ranges of fewer bytes in total are read by each rank itself."""
LONG = 64 << 10
"""Shorter ranges are ignored when ranks compare their reads: each rank has a few of its own, such as RNG states."""
_digest = xxhash.xxh3_128_digest


Ranges = frozenset[FileRange]
"""The ranges that all ranks want."""


class ReadVote(msgspec.Struct, array_like=True):
    """A rank's message after its plan fits."""

    once: bool
    requests: str
    """A digest of all ranges that it wants to read; without `once`, of the long ones. Empty if there are none."""
    host: str
    unexpected: list[str]
    """Shared names in the snapshot that this rank does not use."""
    unknown: list[str]
    """Names that were requested but not found here, with the reason."""
    waits: bool = False
    """True if the rank compares or verifies bytes before it touches a live tensor."""


class ReadDecision(msgspec.Struct, array_like=True):
    """The leader's response."""

    once: bool
    speakers: list[int]
    """The ranks that must send their read sets, if the ranks want different ranges."""
    names: bool
    """True if all ranks must send the names that they use."""
    waits: bool = False
    """True if no rank may touch a live tensor before all have compared or verified their bytes."""
    same: list[str] = msgspec.field(default_factory=list)
    """Digests of the read sets that several ranks of one host have, each for itself."""


class ReadSet(msgspec.Struct, array_like=True):
    """The ranges that a rank wants, sent on request."""

    requests: bytes = b""
    names: bytes = b""
    unexpected: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadAgreement:
    """The agreement of all ranks before the first byte is read."""

    common: Ranges = frozenset()
    """The ranges that all ranks want, if they are to be read once."""
    waits: bool = False
    """True if all ranks must wait until every rank has compared or verified its bytes, because at least one does."""
    same: bool = False
    """True if another rank of this host reads the same long ranges, each for itself."""


def share_checks(exchange: Exchange, opened: Opened, files: set[str]) -> set[str]:
    """Return the files that this rank must look at, if others need the same and look at the rest.

    Each look is a request if the storage is remote, and ranks with replicas need the same files. No rank reads before
    all have looked: they wait for each other in `agree_on_reads`. Files of a base are not shared: each rank may have
    passed another copy of it.
    """
    if exchange.alone or opened.session.storage.capabilities.local:  # the place that all ranks have agreed on
        return files
    ordered = sorted(each for each in files if save_id_in(each) == opened.document.save_id)
    mine = digest_range("\n".join(ordered).encode("utf-8", "surrogatepass"))
    digests = exchange.agree(mine, list, str, list[str])
    alike = [rank for rank, theirs in enumerate(digests) if theirs == mine]
    return files.difference(ordered) | set(ordered[alike.index(exchange.rank) :: len(alike)])


def agree_on_reads(exchange: Exchange, plan: RestorePlan, url: URL, *, once: bool, waits: bool) -> ReadAgreement:
    """Wait until all ranks are ready to read, or raise on all of them before anything is written.

    `waits`: this rank compares or verifies bytes before it touches a live tensor.
    """
    if exchange.alone:
        return ReadAgreement()
    everything = (*plan.reads.objects, *plan.reads.requests)
    if once:
        requests = [request for request in everything if request.opens is None]
    else:
        requests = [request for request in everything if request.end - request.begin >= LONG]
    ranges = {FileRange(request.location, request.begin, request.end) for request in requests}
    named = {_digest(repr(each).encode()): each for each in ranges}
    read_set = digest_range(b"".join(sorted(named))) if named else ""
    ready = ReadVote(once, read_set, platform.node(), list(plan.matched.unexpected), plan.unknown, waits)
    go = exchange.agree(ready, lambda all_: _decide(all_, url), ReadVote, ReadDecision)
    if go.names or (go.once and len(go.speakers) > 1):
        wishes = ReadSet()
        if go.once and exchange.rank in go.speakers:
            wishes.requests = b"".join(named)
        if go.names:
            wishes.names = b"".join(_digest(path.encode()) for kind in plan.adapters.values() for path in kind.live)
            wishes.unexpected = list(plan.matched.unexpected)
        common = exchange.agree(wishes, lambda all_: _common_ranges(all_, go.speakers, url), ReadSet, bytes)
        if go.once and len(go.speakers) > 1:
            ranges = {named[key] for key in split_digests(common)}
    if not go.once or sum(each.end - each.begin for each in ranges) < WORTH:
        return ReadAgreement(waits=go.waits, same=read_set in go.same)
    return ReadAgreement(frozenset(ranges), go.waits)


def _decide(all_: list[ReadVote], url: URL) -> ReadDecision:
    nowhere = [what for what in all_[0].unknown if all(what.partition(";")[0] in _unknown_heads(each) for each in all_)]
    if nowhere:
        raise RestoreError(f"{url}: does not fit the snapshot, and nothing was touched:{listed(nowhere)}", nowhere)
    once = all(ready.once for ready in all_)
    seen: dict[str, int] = {}  # without `once`, no rank sends its read set, and the message stays short
    for rank, ready in enumerate(all_):
        seen.setdefault(ready.requests if once else "", rank)
    readers = Counter((ready.host, ready.requests) for ready in all_ if ready.requests and not once)
    return ReadDecision(
        once,
        sorted(seen.values()),
        any(ready.unexpected for ready in all_),
        any(ready.waits for ready in all_),
        sorted({read_set for (_, read_set), count in readers.items() if count > 1}),
    )


def _unknown_heads(ready: ReadVote) -> set[str]:
    return {what.partition(";")[0] for what in ready.unknown}


def _common_ranges(all_: list[ReadSet], speakers: Sequence[int], url: URL) -> bytes:
    """Return the ranges that all differing ranks want. A name that no rank uses is an error, as on a single rank."""
    names = set().union(*(split_digests(wishes.names) for wishes in all_))
    left = {path: None for wishes in all_ for path in wishes.unexpected if _digest(path.encode()) not in names}
    if left:
        mismatches = [f"{path}: is in the snapshot, not in the application of any rank" for path in left]
        raise RestoreError(
            f"{url}: does not fit the application, and nothing was touched:{listed(mismatches, 100)}{MATCH_NAMES}",
            mismatches,
        )
    return b"".join(sorted(set.intersection(*({*split_digests(all_[rank].requests)} for rank in speakers))))


def split_requests(requests: Sequence[ReadRequest], common: Ranges) -> tuple[list[ReadRequest], list[ReadRequest]]:
    """Split requests into those of this rank alone, and those that all ranks share."""
    if not common:
        return list(requests), []
    parts: tuple[list[ReadRequest], list[ReadRequest]] = [], []
    for request in requests:
        shared = request.opens is None and FileRange(request.location, request.begin, request.end) in common
        parts[shared].append(request)
    return parts


class BroadcastReader:
    """Reads the shared parts in order: one rank reads each part and broadcasts it, and every rank places the bytes."""

    def __init__(
        self,
        exchange: Exchange,
        opened: Opened,
        requests: Sequence[ReadRequest],
        meter: Meter,
        touched: set[str],
        *,
        verify: bool,
    ) -> None:
        """Do everything that may fail on one rank alone before other ranks depend on it."""
        await_current_streams({request.device for request in requests})
        self._exchange = exchange
        self._storage = opened.storage
        self._reader = Reader(opened, verify=verify, touched=touched)
        if verify:
            run(self._reader.prepare_checks(requests))
        ranges = sorted({FileRange(request.location, request.begin, request.end) for request in requests})
        numbers = {each: number for number, each in enumerate(ranges)}
        self._requests: dict[int, list[ReadRequest]] = defaultdict(list)
        for request in requests:
            self._requests[numbers[FileRange(request.location, request.begin, request.end)]].append(request)
        size = max(BLOCK, min(PART, opened.budget.limit // 8))
        self._parts = plan_reads(ranges, size, opened.storage.limits.merge_gap)
        self._meter = meter
        longest = max((part.end - part.begin for part in self._parts), default=0)
        self._free = [torch.empty(longest + 1, dtype=torch.uint8) for _ in range(AHEAD + 3)]
        self._device: torch.Tensor | None = None
        devices = exchange.ranks.pg._device_types  # type: ignore[union-attr]
        if not any(device.type == "cpu" for device in devices):
            self._device = torch.empty(longest + 1, dtype=torch.uint8, device=devices[0])

    def run(self, result: ReadResult) -> None:
        """Read the shared ranges, each rank its share, and broadcast them. Faults are added to `result`."""
        self._pass_on()
        run(self._reader.again())
        own = self._reader.result
        result.bytes_read += own.bytes_read
        result.requests += own.requests
        result.faults += own.faults

    def _pass_on(self) -> None:
        """Broadcast all parts. A rank that fails continues until its error was sent, and then raises."""
        exchange = self._exchange
        mine = [number for number in range(len(self._parts)) if number % exchange.world == exchange.rank]
        reading: dict[int, tuple[torch.Tensor, Future[None]]] = {}
        placing: list[tuple[torch.Tensor, Future[None]]] = []
        ahead = iter(mine)

        def read_ahead() -> None:
            while len(reading) < AHEAD and (number := next(ahead, None)) is not None:
                held = self._free.pop()
                reading[number] = held, start(self._read(self._parts[number], held))

        error: Exception | None = None
        told = -1
        try:
            for number, part in enumerate(self._parts):
                root, end = number % exchange.world, part.end - part.begin
                if error is None:
                    read_ahead()
                held, work = reading.pop(number, (None, None))
                held = held if held is not None else self._free.pop()
                if work is not None:
                    error = _first(error, work)
                held[end] = error is not None
                self._send(held[: end + 1], root)
                if held[end]:
                    told = root
                    break
                placing.append((held, start(in_thread(self._place, part, held))))
                while placing and (placing[0][1].done() or len(self._free) < 1 + AHEAD - len(reading)):
                    held, done = placing.pop(0)
                    error = _first(error, done)
                    self._free.append(held)
                self._meter.wrote(end)
            while placing:
                error = _first(error, placing.pop(0)[1])
            if error is not None:
                raise error
            if told >= 0:
                raise self._failed(told)
        finally:
            for _, work in [*reading.values(), *placing]:
                work.cancel()
            for _, work in [*reading.values(), *placing]:
                with contextlib.suppress(BaseException):  # the first error is being raised
                    work.result()

    async def _read(self, part: ReadPart, held: torch.Tensor) -> None:
        length = part.end - part.begin
        await self._storage.read_into(part.location, part.begin, [wrap_memory(held.data_ptr(), length)])
        self._reader.result.bytes_read += length
        self._reader.result.requests += 1

    def _send(self, message: torch.Tensor, root: int) -> None:
        """Broadcast a part to all ranks, or receive it."""
        passed = message
        if self._device is not None:
            passed = self._device[: len(message)]
            if root == self._exchange.rank:
                passed.copy_(message)
        members, group = self._exchange.ranks.members, self._exchange.ranks.pg
        try:
            work = dist.broadcast(passed, src=members[root], group=group, async_op=True)
            arrived = self._arrives(work)
            if arrived:
                work.wait()
        except RuntimeError as error:
            self._exchange.broke_off()
            raise self._failed(root) from error
        if not arrived:
            raise self._failed(root)
        if passed is not message and root != self._exchange.rank:
            message.copy_(passed)

    def _arrives(self, work: dist.Work) -> bool:
        """Wait for a collective as long as all ranks are alive. Return False if it failed on another rank.

        A timeout of the collective itself would also end for a slow reader, and leave the group unusable.
        """
        end, pause = time.monotonic() + LOOK, 0.00005
        while not work.is_completed():
            if time.monotonic() > end:
                return self._exchange.together(work.is_completed)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.001)
        return True

    def _failed(self, rank: int) -> SnapshotError:
        """Return the error of the rank that failed: the error that it sent, or its missing heartbeat."""
        try:
            self._exchange.agree(False, all, bool, bool)
        except SnapshotError as error:
            return error
        return SnapshotError(f"the bytes that rank {rank} read did not reach all ranks through the process group")

    def _place(self, part: ReadPart, held: torch.Tensor) -> None:
        """Verify the received bytes and copy them to their destination."""
        address = held.data_ptr()
        for segment in part.segments:
            at, length = segment.begin - part.begin, segment.end - segment.begin
            share = wrap_memory(address + at, length)
            for request in self._requests[segment.request]:
                if not self._reader.is_verified(request, segment.begin, share):
                    continue
                if request.live:
                    self._reader.result.touched.add(request.name)
                if request.address:
                    copy_memory(request.address + segment.begin - request.begin, address + at, length)
                elif request.place is not None:
                    data = held[at : at + length]
                    data = data if at % 16 == 0 else data.clone()
                    for copy in request.place(segment.begin - request.stored.byte_range[0], data):
                        copy_into(*copy)


def _first(known: Exception | None, work: Future[None]) -> Exception | None:
    """Wait for a read or a copy. Return the first exception, to be sent to the other ranks before it is raised."""
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return known or error
