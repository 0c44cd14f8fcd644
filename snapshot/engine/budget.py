"""The memory budget of one operation: whoever needs a buffer takes its bytes here first, in order of asking."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from snapshot.engine.arena import Slot, arena
from snapshot.storage import inline


class Statistics(NamedTuple):
    """What a budget has seen."""

    limit: int
    used: int
    peak: int
    waits: int
    seconds_blocked: float


RESERVE = 32 << 20
"""At most so much of a budget is kept for what storages bounce."""


class MemoryBudget:
    """Bytes that may be held at once. A request larger than all of it is granted when nothing else is held.

    What a storage bounces while it fills or empties a slot comes from a reserve of its own: were it to queue behind
    requests for slots, those who hold slots could wait for each other for ever.
    """

    def __init__(self, limit: int, *, reserve: bool = True) -> None:
        kept = min(limit // 2, RESERVE) if reserve else 0
        self._reserve = MemoryBudget(kept, reserve=False) if reserve else None
        self.total = limit
        self.limit = limit - kept
        """What slots may take."""
        self._used = self._peak = self._waits = 0
        self._blocked = 0.0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._error: BaseException | None = None

    def _fits(self, nbytes: int) -> bool:
        return self._used + nbytes <= self.limit or self._used == 0

    def _grant(self, nbytes: int) -> None:
        self._used += nbytes
        self._peak = max(self._peak, self._used)

    def try_acquire(self, nbytes: int) -> bool:
        """Take bytes if they are there now, and nobody has asked before."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._waiting or not self._fits(nbytes):
                return False
            self._grant(nbytes)
            return True

    async def acquire(self, nbytes: int) -> None:
        """Take bytes, waiting for others to give theirs back."""
        if inline():
            self.acquire_blocking(nbytes)
            return
        if self.try_acquire(nbytes):
            return
        loop = asyncio.get_running_loop()
        granted = asyncio.Event()
        request = (nbytes, lambda: loop.call_soon_threadsafe(granted.set))
        began = time.perf_counter()
        if self._enqueue(request):
            try:
                await granted.wait()
            except BaseException:
                self._withdraw(request)
                raise
        self._waited(began)

    def acquire_blocking(self, nbytes: int) -> None:
        """The same for a thread that is not the loop's."""
        if self.try_acquire(nbytes):
            return
        granted = threading.Event()
        request = (nbytes, granted.set)
        began = time.perf_counter()
        if self._enqueue(request):
            try:
                granted.wait()
            except BaseException:
                self._withdraw(request)
                raise
        self._waited(began)

    def _enqueue(self, request: tuple[int, Callable[[], object]]) -> bool:
        with self._lock:
            self._waits += 1
            if self._error is not None:
                return False
            if not self._waiting and self._fits(request[0]):
                self._grant(request[0])
                return False
            self._waiting.append(request)
            return True

    def _withdraw(self, request: tuple[int, Callable[[], object]]) -> None:
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                return
        self.release(request[0])

    def _waited(self, began: float) -> None:
        with self._lock:
            self._blocked += time.perf_counter() - began
            if self._error is not None:
                raise self._error

    def release(self, nbytes: int) -> None:
        """Give bytes back; whoever waits longest is served first."""
        with self._lock:
            self._used -= nbytes
            while self._waiting and self._fits(self._waiting[0][0]):
                wanted, wake = self._waiting.popleft()
                self._grant(wanted)
                wake()

    def fail(self, error: BaseException) -> None:
        """Let everybody who waits, or will ask, see this error."""
        with self._lock:
            self._error = error
            while self._waiting:
                self._waiting.popleft()[1]()

    @asynccontextmanager
    async def borrow(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Page-aligned scratch memory out of this budget: what a storage plugin sees of it."""
        async with (self._reserve or self).slot(nbytes) as slot:
            yield slot.view

    @asynccontextmanager
    async def count(self, nbytes: int) -> AsyncIterator[None]:
        """The same for memory that a client makes itself."""
        held = self._reserve or self
        await held.acquire(nbytes)
        try:
            yield
        finally:
            held.release(nbytes)

    @asynccontextmanager
    async def slot(self, nbytes: int) -> AsyncIterator[Slot]:
        """A slot of the arena out of this budget."""
        await self.acquire(nbytes)
        try:
            slot = arena().take(nbytes)
            try:
                yield slot
            finally:
                arena().give(slot)
        finally:
            self.release(nbytes)

    def statistics(self) -> Statistics:
        with self._lock:
            seen = Statistics(self.total, self._used, self._peak, self._waits, self._blocked)
        if self._reserve is None:
            return seen
        more = self._reserve.statistics()
        return Statistics(self.total, *(a + b for a, b in zip(seen[1:], more[1:], strict=True)))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"MemoryBudget({seen.used:,} of {seen.limit:,} bytes used, peak {seen.peak:,}, {seen.waits} waits)"


def available_memory() -> int:
    """How much memory this process may still use: the host's, or its control group's if that is less."""
    free = _meminfo("MemAvailable")
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as most, open(usage) as used:
                free = min(free, int(most.read()) - int(used.read()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def _meminfo(name: str) -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return 8 << 30


def total_memory() -> int:
    """The host's memory."""
    return _meminfo("MemTotal")
