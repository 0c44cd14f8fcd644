"""Staging ahead of writing in asynchronous takes: values that the application may change next are copied first.

The call stages before the first byte is written, so that writing does not compete for memory bandwidth. What exceeds
the budget is staged as writes release memory. Values that only an optimizer's `step()` changes may be staged later by a
thread, while the application continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from snapshot.plan.layout import FilePart, FilePlan
from snapshot.runtime.arena import arena, arena_bytes
from snapshot.runtime.budget import MemoryBudget
from snapshot.save.staging import StagedPart
from snapshot.save.writer import Writer
from snapshot.trace import span

AHEAD = 2
"""Parts that are copied from accelerators at once: the next copy is queued before the previous one ends."""


class PartPrefetcher:
    """Parts that one thread stages and others write."""

    def __init__(
        self,
        writer: Writer,
        budget: MemoryBudget,
        files: Sequence[FilePlan],
        progress: Callable[[int], None],
        begin: Callable[[], object],
        *,
        shared: bool = False,
    ) -> None:
        self._source = writer.source
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
        size = arena_bytes(part.end - part.begin)
        slot, staged, granted = None, None, False
        try:
            granted = self._budget.try_acquire(size)
            if not granted:
                self._deliver(0)  # their memory is released once they are written
                self._begin()
                self.open()
                self._budget.acquire_blocking(size)
                granted = True
            slot = arena().take(part.end - part.begin, shared=self._shared, pinning=self._pinning)
            with span("stage", bytes=part.end - part.begin, copied=True):
                staged = self._source.begin(self._files[number], part, slot, self._budget)
        except BaseException:
            if staged is not None:
                staged.release()
                raise
            if slot is not None:
                arena().give(slot)
            if granted:
                self._budget.release(size)
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
                self._arriving.popleft()
                self._staged[number, position] = staged
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
