"""A take in the background: staged by the call, written while the application continues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from types import TracebackType

import torch

from snapshot.errors import SnapshotError, system_limits
from snapshot.events import emit, span
from snapshot.io.aio import in_thread, shielded
from snapshot.io.arena import Pinning, arena, arena_bytes, permit_capture
from snapshot.io.loop import LoopFuture, in_own_thread
from snapshot.plan.layout import FilePart, FilePlan, SavePlan
from snapshot.save.begin import Claim
from snapshot.save.digests import FileDigests
from snapshot.save.rank_share import RankShare
from snapshot.save.staging import Key, StagedAhead, StagedPart, Stager, key_of
from snapshot.save.step_barrier import PendingCopy
from snapshot.state.changing import OverlapEligible
from snapshot.tensors.memory import find_local_tensor

# Staging ahead of writing in asynchronous takes: values that the application may change next are copied first.
#
# The call stages before the first byte is written, so that writing does not compete for memory bandwidth. What
# exceeds the budget is staged as writes release memory. Values that only an optimizer's `step()` changes may be
# staged later by a thread, while the application continues. So up to three threads meet in `StagingAhead`: one stages,
# the loop waits for parts in `ready` and takes them, and the application's thread may stop everything. What they share
# is `_staged`, `_waiting`, `_error` and `_closed`, under one lock that is never held across a wait.

AHEAD = 2
"""Parts that are copied from accelerators at once: the next copy is queued before the previous one ends."""


PART_AHEAD = 32 << 20
"""Bytes of a part that is staged long before it is written.

The part has left the CPU caches by then, and fewer parts take the interpreter lock from training less often.
"""
CHANGED = (
    "parameters or optimizer state changed outside an optimizer's step() while they were copied, so nothing was "
    'committed; call wait_staged() before such changes, or use TakeOptions(staging="blocking")'
)


class LateCopies:
    """The leaves that are copied after the call returns, while the application already computes.

    From here on, the `step()` of their optimizers waits until they are copied. An error in the block ends the wait:
    nothing would be copied any more, and the application would stand still.
    """

    def __init__(self, claim: Claim, share: RankShare, *, overlapped: bool) -> None:
        self.marks = b""
        """One byte per leaf: 1 if it is copied after the call."""
        self.owners: list[torch.Tensor] = []
        """Tensors whose version counters show that a leaf was changed."""
        self.pending: PendingCopy | None = None
        eligible = OverlapEligible(share.statefuls) if overlapped else None
        if not eligible:
            return
        flat = share.flat
        # Of several ranks, each writes a share. Memory that holds anything else of the state is found in all of it.
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


class StagingAhead(StagedAhead):
    """The tensors of a take, which are staged ahead of writing: by the call, and by a thread after it.

    As a context, an error of the call ends the take, even if writing has begun.
    """

    def __init__(
        self, claim: Claim, share: RankShare, plan: SavePlan, late: PendingCopy | None, *, shared: bool, in_turn: bool
    ) -> None:
        """`shared`: another process must see the memory. `in_turn`: only some files are written at once."""
        self.stager = Stager(share.leaves, copies=True, parallel=True)
        if claim.session.storage.capabilities.local:
            self.part_bytes = PART_AHEAD
        self.late = late
        self._claim = claim
        self._budget = claim.session.budget
        self._plan = plan
        self._files = plan.files
        self._shared = shared
        self._in_turn = in_turn
        self._began = time.perf_counter()
        self._thread: threading.Thread | None = None
        self._write: Callable[[], LoopFuture[None]] | None = None
        """Begins to write: at the latest, when writing must release memory so that staging can continue."""
        self._parts: list[Sequence[FilePart]] = []
        self._pinning: Pinning | None = None
        self._stop_pinning: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._staged: dict[Key, StagedPart] = {}
        self._waiting: dict[Key, Callable[[], object]] = {}
        self._error: BaseException | None = None
        self._closed = False
        """True while staged parts are held back."""
        self._arriving: deque[tuple[FilePlan, FilePart, StagedPart]] = deque()
        """The parts whose copies from accelerators run."""

    # What the writer asks for

    def digests(self, file: FilePlan) -> FileDigests:
        return self.stager.digests(file)

    async def ready(self, file: FilePlan, part: FilePart) -> None:
        loop, key = asyncio.get_running_loop(), key_of(file, part)
        arrived = asyncio.Event()
        with self._lock:
            if self._error is not None:
                raise self._error
            there = key in self._staged and not self._closed
            if not there:
                self._waiting[key] = lambda: loop.call_soon_threadsafe(arrived.set)
        if not there:
            await arrived.wait()

    def take(self, file: FilePlan, part: FilePart) -> StagedPart:
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._staged.pop(key_of(file, part))

    def stop(self, error: BaseException) -> None:
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
        self._end_pinning()
        with self._lock:
            left, self._staged = self._staged, {}
        for staged in left.values():
            staged.release()

    # The steps of the take

    def begin(
        self, parts: Callable[[FilePlan], Sequence[FilePart]], write: Callable[[], LoopFuture[None]]
    ) -> LoopFuture[None]:
        """Stage what must be staged in the call, and begin to write: afterwards, or once the budget is used up."""
        files, last = self._files, len(self._files) - self._plan.late
        self._write = write
        self._parts = [parts(file) for file in files]
        total = sum(arena_bytes(part.end - part.begin) for each in self._parts for part in each)
        self._pinning = self.stager.pinning(self._budget, total)
        if self._pinning is not None:
            self._stop_pinning = arena().pin_ahead(self._shared, self._pinning)
        if not self._shared:
            self.stager.digest_ahead(files[:last], self._budget)
        self._stage_files(range(last))
        self.stager.end_digests()
        work = write()
        if last < len(files):
            self.stager.copy_alone()
            with self._lock:
                self._closed = True
            self._thread = threading.Thread(
                target=self._stage_late, args=(last,), name="snapshot-io-stage", daemon=True
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
        if self._write is not None:
            self.stop(error)
        work = self.work
        if work is None:
            self.release()
            return
        work.cancel()
        over = work.settled(60)
        self.release()
        if over and isinstance(error, asyncio.CancelledError) and not work.cancelled():
            cause = work.exception()
            if cause is not None:
                raise cause from None

    async def check(self) -> None:
        if self.late is not None:
            await in_thread(self.late.let_go)
            if self.late.changed:
                raise SnapshotError(CHANGED)

    async def end(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # it copies no part after the current one
            await shielded(in_own_thread(self._thread.join))
        self.release()
        if self.late is not None:
            self.late.end()

    def forget(self) -> None:
        self.stager.forget()

    # Staging

    def _stage_late(self, first: int) -> None:
        """Stage what may be staged after the call. An error fails the writer, which waits for the parts."""
        assert self.late is not None
        if self.stager.pinning(self._budget, 0) is not None:
            permit_capture()
        try:
            self._stage_files(range(first, len(self._files)))
            self.late.copied()
            self._all_staged()  # before the last parts can be written
            self._open()
        except BaseException as error:  # noqa: BLE001 - `wait()` raises it
            self.stop(error)
            self.late.end()

    def _all_staged(self) -> None:
        meter = self._claim.meter
        meter.staged(self._plan.blob_bytes)  # encoded bytes, not the application's memory
        seconds = round(time.perf_counter() - self._began, 3)
        emit("staged", meter.verb, str(self._claim.session.url), bytes=self._plan.total_bytes, seconds=seconds)

    def _stage_files(self, numbers: range) -> None:
        """Stage every part of some files. Return when the last one is in host memory."""
        order = self._order(numbers)
        try:
            for count, (file, part) in enumerate(order):
                if self._closed and 2 * count >= len(order):
                    self._open()
                self._stage(file, part)
            self._deliver(0)
        finally:
            try:
                with contextlib.ExitStack() as left:  # after an error
                    while self._arriving:
                        left.callback(self._arriving.pop()[2].release)
            finally:
                if numbers.stop == len(self._files):
                    self._end_pinning()

    def _order(self, numbers: range) -> list[tuple[FilePlan, FilePart]]:
        """Return the parts of some files in the order in which they are staged: round-robin.

        Files that are compressed are staged one after the other: only some of them are written at once, and they would
        wait for the memory of the others' parts.
        """
        order = [(at, number) for number in numbers for at in range(len(self._parts[number]))]
        if not self._in_turn:
            order.sort()
        return [(self._files[number], self._parts[number][at]) for at, number in order]

    def _end_pinning(self) -> None:
        if self._stop_pinning is not None:
            self._stop_pinning()

    def _stage(self, file: FilePlan, part: FilePart) -> None:
        nbytes = part.end - part.begin
        held = self._budget.try_hold(nbytes, shared=self._shared, pinning=self._pinning)
        if held is None:
            self._deliver(0)  # their memory is released once they are written
            assert self._write is not None
            self._write()
            self._open()
            held = self._budget.hold_blocking(nbytes, shared=self._shared, pinning=self._pinning)
        staged = None
        try:
            with span("stage", bytes=nbytes, copied=True):
                staged = self.stager.begin_part(file, part, held)
        except BaseException:
            if staged is not None:  # an interrupt after it began
                staged.release()
            held.release()
            raise
        self._arriving.append((file, part, staged))
        self._deliver(AHEAD if staged.events else 0)

    def _deliver(self, left: int) -> None:
        """Hand the oldest parts to the writer when they have arrived, until `left` are arriving."""
        while len(self._arriving) > left:
            file, part, staged = self._arriving[0]
            key = key_of(file, part)
            self.stager.end_part(file, part, staged)
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._staged[key] = staged  # first: an interrupt must not lose it
                self._arriving.popleft()
                wake = None if self._closed else self._waiting.pop(key, None)
            if wake is not None:
                wake()
            self._claim.meter.staged(part.end - part.begin)

    def _open(self) -> None:
        """Deliver staged parts to the writer.

        They are held back at first, since an optimizer's step may wait for the copy. Half of them are not: that would
        delay the snapshot.
        """
        with self._lock:
            self._closed = False
            ready = [self._waiting.pop(key) for key in list(self._waiting) if key in self._staged]
        for wake in ready:
            wake()
