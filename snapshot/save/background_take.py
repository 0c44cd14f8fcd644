"""A take in the background: staged by the call, written while the application continues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from types import TracebackType
from typing import Any

import torch

from snapshot.errors import SnapshotError, system_limits
from snapshot.events import emit, span
from snapshot.io.aio import in_thread, shielded
from snapshot.io.arena import arena, arena_bytes, permit_capture
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import LoopFuture, in_own_thread
from snapshot.plan.layout import FilePart, FilePlan, SavePlan
from snapshot.save.begin import Claim
from snapshot.save.planned_take import PartStaging, Take, WrittenFiles
from snapshot.save.rank_share import RankShare
from snapshot.save.staging import StagedPart, Stager
from snapshot.save.step_barrier import PendingCopy
from snapshot.save.transaction import Transaction
from snapshot.save.writer import PartSink, Writer
from snapshot.state.model_state import OverlapEligible, find_local_tensor

# Staging ahead of writing in asynchronous takes: values that the application may change next are copied first.
#
# The call stages before the first byte is written, so that writing does not compete for memory bandwidth. What
# exceeds the budget is staged as writes release memory. Values that only an optimizer's `step()` changes may be
# staged later by a thread, while the application continues.

AHEAD = 2
"""Parts that are copied from accelerators at once: the next copy is queued before the previous one ends."""


class PartPrefetcher:
    """Parts that one thread stages and others write."""

    def __init__(
        self,
        writer: Writer,
        source: Stager,
        budget: MemoryBudget,
        files: Sequence[FilePlan],
        *,
        progress: Callable[[int], None],
        begin: Callable[[], object],
        shared: bool = False,
    ) -> None:
        self._source = source
        self._in_turn = writer.packing is not None
        self._budget = budget
        self._files = files
        self.parts = [writer.parts(file) for file in files]
        self._progress = progress
        self._shared = shared
        """True if another process must see the slots."""
        total = sum(arena_bytes(part.end - part.begin) for parts in self.parts for part in parts)
        self._pinning = self._source.pinning(budget, total)
        self._stop_pinning = arena().pin_ahead(shared, self._pinning) if self._pinning is not None else None
        self._staged: dict[tuple[int, int], StagedPart] = {}
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Callable[[], object]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._begin = begin
        """Called when writing must start so that staging can continue."""
        self._arriving: deque[tuple[int, int, StagedPart]] = deque()
        """The parts whose copies from accelerators run."""

    def stage(self, numbers: range) -> None:
        """Stage every part of some files. Return when the last one is in host memory."""
        order = self._order(numbers)
        try:
            for count, (number, position) in enumerate(order):
                if self._closed and 2 * count >= len(order):
                    self.open()
                self._stage(number, position, self.parts[number][position])
            self._deliver(0)
        finally:
            try:
                with contextlib.ExitStack() as left:  # after an error
                    while self._arriving:
                        left.callback(self._arriving.pop()[2].release)
            finally:
                if numbers.stop == len(self._files):
                    self._end_pinning()

    def _order(self, numbers: range) -> list[tuple[int, int]]:
        """Return the parts of some files in the order in which they are staged: round-robin.

        Files that are compressed are staged one after the other: only some of them are written at once, and they would
        wait for the memory of the others' parts.
        """
        order = [(number, position) for number in numbers for position in range(len(self.parts[number]))]
        return order if self._in_turn else sorted(order, key=lambda each: each[1])

    def _end_pinning(self) -> None:
        if self._stop_pinning is not None:
            self._stop_pinning()

    def _stage(self, number: int, position: int, part: FilePart) -> None:
        nbytes = part.end - part.begin
        held = self._budget.try_hold(nbytes, shared=self._shared, pinning=self._pinning)
        if held is None:
            self._deliver(0)  # their memory is released once they are written
            self._begin()
            self.open()
            held = self._budget.hold_blocking(nbytes, shared=self._shared, pinning=self._pinning)
        staged = None
        try:
            with span("stage", bytes=nbytes, copied=True):
                staged = self._source.begin(self._files[number], part, held)
        except BaseException:
            if staged is not None:  # an interrupt after it began
                staged.release()
            held.release()
            raise
        self._arriving.append((number, position, staged))
        self._deliver(AHEAD if staged.events else 0)

    def _deliver(self, left: int) -> None:
        """Hand the oldest parts to the writer when they have arrived, until `left` are arriving."""
        while len(self._arriving) > left:
            number, position, staged = self._arriving[0]
            part = self.parts[number][position]
            self._source.end(self._files[number], part, staged)
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._staged[number, position] = staged  # first: an interrupt must not lose it
                self._arriving.popleft()
                wake = None if self._closed else self._waiting.pop((number, position), None)
            if wake is not None:
                wake()
            self._progress(part.end - part.begin)

    def close(self) -> None:
        """Hold back staged parts until half of them are staged, or `open` is called.

        An optimizer step may wait for the copy, so copying comes first. Holding back all parts would delay the
        snapshot.
        """
        with self._lock:
            self._closed = True

    def open(self) -> None:
        """Deliver staged parts on request."""
        with self._lock:
            self._closed = False
            ready = [self._waiting.pop(part) for part in list(self._waiting) if part in self._staged]
        for wake in ready:
            wake()

    async def get(self, number: int, position: int) -> StagedPart:
        """Return a staged part as soon as it is ready."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._lock:
            if self._error is not None:
                raise self._error
            there = (number, position) in self._staged and not self._closed
            if not there:
                self._waiting[number, position] = lambda: loop.call_soon_threadsafe(arrived.set)
        if not there:
            await arrived.wait()
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._staged.pop((number, position))

    def stop(self, error: BaseException) -> None:
        """Stop the staging thread and all waiting readers with an error."""
        with self._lock:
            if not isinstance(
                error, Exception | asyncio.CancelledError
            ):  # such as KeyboardInterrupt: in a task, it would end the loop
                error = asyncio.CancelledError(f"staging was interrupted: {error!r}")
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        self._budget.fail(error)
        for wake in waiting.values():
            wake()

    def release(self) -> None:
        """Release the memory of parts that were staged but not written."""
        self._end_pinning()
        with self._lock:
            left, self._staged = self._staged, {}
        for staged in left.values():
            staged.release()


# A take in the background

PART_AHEAD = 32 << 20
"""Bytes of a part that is staged long before it is written.

The part has left the CPU caches by then, and fewer parts take the interpreter lock from training less often.
"""
CHANGED = (
    "parameters or optimizer state changed outside an optimizer's step() while they were copied, so nothing was "
    'committed; call wait_staged() before such changes, or use TakeOptions(staging="blocking")'
)


class LateCopies:
    """The leaves that are copied after the call returns; an optimizer's `step()` waits for them.

    As a context, an error that leaves it lets the `step()` continue.
    """

    def __init__(self, claim: Claim, share: RankShare, app_state: Mapping[str, Any] | None) -> None:
        self.marks = b""
        """One byte per leaf: 1 if it is copied after the call."""
        self.owners: list[torch.Tensor] = []
        """Tensors whose version counters show that a leaf was changed."""
        self.pending: PendingCopy | None = None
        eligible = OverlapEligible(app_state) if app_state is not None else None
        if not eligible:
            return
        flat = share.flat
        leaves = share.leaves if claim.exchange.alone else flat.leaves
        marks, owners = eligible.find_late(share.leaves, leaves, flat.shards, flat.ties)
        if not owners:
            self.marks = marks
            return
        try:
            late = [leaf.tensor for leaf in compress(share.leaves, marks)]
            uncounted = [
                held for held, owner in zip(late, owners, strict=True) if find_local_tensor(owner) is not owner
            ]
            self.pending = PendingCopy(eligible.optimizers, owners, uncounted)
        except RuntimeError:  # tensors of inference mode have no version counter
            return
        self.marks, self.owners = marks, owners
        self.pending.begin()

    def __enter__(self) -> LateCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.pending is not None:
            self.pending.end()


class StagingAhead(PartStaging):
    """Parts that are staged ahead of writing: by the caller, and by a thread after the call.

    As a context, an error of the call ends the take, even if writing has begun.
    """

    def __init__(self, claim: Claim, share: RankShare, plan: SavePlan, late: LateCopies, sink: PartSink | None) -> None:
        self.stager = Stager(share.leaves, copies=True, parallel=True)
        super().__init__(self.stager)
        if late.pending is not None:
            self.stager.watch(late.marks, late.owners, late.pending)
        if claim.session.storage.capabilities.local:
            self.part_bytes = PART_AHEAD
        self.late = late.pending
        self._sink = sink
        """A writer process that writes the data files in place of this process."""
        self._claim = claim
        self._plan = plan
        self._began = time.perf_counter()
        self._prefetcher: PartPrefetcher | None = None
        self._thread: threading.Thread | None = None
        self._take: Take | None = None

    def stage(self, take: Take) -> LoopFuture[None]:
        """Stage what must be staged in the call, and start the take: afterwards, or once the budget is used up."""
        budget, files = self._claim.session.budget, self._plan.files
        self._take = take
        self._prefetcher = prefetcher = PartPrefetcher(
            take.writer,
            self.stager,
            budget,
            files,
            progress=self._claim.meter.staged,
            begin=take.start,
            shared=self._sink is not None,
        )
        now, later = range(len(files) - self._plan.late), range(len(files) - self._plan.late, len(files))
        if self._sink is None:
            self.stager.digest_ahead(files[: now.stop], budget)
        prefetcher.stage(now)
        self.stager.end_digests()
        work = take.start()
        if later:
            self.stager.copy_alone()
            prefetcher.close()
            self._thread = threading.Thread(
                target=self._stage_late, args=(prefetcher, later), name="snapshot-io-stage", daemon=True
            )
            with system_limits("cannot start a thread"):
                self._thread.start()
        else:
            if self.late is not None:  # all that would be copied late is shared
                self.late.copied()
            self._all_staged()
        return work

    def __enter__(self) -> StagingAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything that was started. If writing failed, raise that error: it is the cause."""
        if error is None:
            return
        self.stager.end_digests()
        self.stop(error)
        work = None if self._take is None else self._take.work
        if work is None:
            self._release()
            return
        work.cancel()
        over = work.settled(60)
        self._release()
        if over and isinstance(error, asyncio.CancelledError) and not work.cancelled():
            cause = work.exception()
            if cause is not None:
                raise cause from None

    def _stage_late(self, prefetcher: PartPrefetcher, files: range) -> None:
        """Stage what may be staged after the call. An error fails the writer, which waits for the parts."""
        assert self.late is not None
        if self.stager.pinning(self._claim.session.budget, 0) is not None:
            permit_capture()
        try:
            prefetcher.stage(files)
            self.late.copied()
            self._all_staged()  # before the last parts can be written
            prefetcher.open()
        except BaseException as error:  # noqa: BLE001 - `wait()` raises it
            prefetcher.stop(error)
            self.late.end()

    def _all_staged(self) -> None:
        meter = self._claim.meter
        meter.staged(self._plan.blob_bytes)  # encoded bytes, not the application's memory
        seconds = round(time.perf_counter() - self._began, 3)
        emit("staged", meter.verb, str(self._claim.session.url), bytes=self._plan.total_bytes, seconds=seconds)

    async def write(self, writer: Writer, plan: SavePlan, transaction: Transaction, to: Sequence[str]) -> WrittenFiles:
        assert self._prefetcher is not None
        if self._sink is None:
            return await writer.write(plan.files, to, self._prefetcher)
        transaction.expect_files(to)
        return await self._sink.write(
            self._claim.session,
            plan.files,
            to,
            self._prefetcher.parts,
            staging=self._prefetcher,
            progress=self._claim.meter.wrote,
            packing=writer.packing,
            signed=writer.signed,
        )

    async def check(self) -> None:
        if self.late is not None:
            await in_thread(self.late.let_go)
            if self.late.changed:
                raise SnapshotError(CHANGED)

    def stop(self, error: BaseException) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop(error)

    async def end(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # it copies no part after the current one
            await shielded(in_own_thread(self._thread.join))
        self._release()

    def _release(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.release()

    def forget(self) -> None:
        if self.late is not None:
            self.late.end()
