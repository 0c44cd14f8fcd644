"""The memory budget of an operation: every buffer's bytes are acquired here first, in request order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from snapshot.io.aio import Latch, inline
from snapshot.io.arena import Pinning, Slot, arena, arena_bytes


class BudgetStatistics(NamedTuple):
    """Statistics of a budget."""

    limit: int
    used: int
    peak: int
    waits: int
    seconds_blocked: float


RESERVE = 32 << 20
"""The maximum part of a budget that is reserved for the storages' bounce buffers."""


@dataclass(eq=False, slots=True)
class BudgetRequest:
    """A pending request for bytes."""

    nbytes: int
    budget: MemoryBudget
    wake: Callable[[], object]
    granted: bool = False


class Pool:
    """The bytes that one or several operations may hold at once, granted in request order.

    Storages' bounce buffers come from a separate reserve. If they queued behind requests for slots, slot holders could
    wait for each other forever. The methods must be called with the lock held.
    """

    def __init__(self, limit: int, *, reserve: bool = True) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[BudgetRequest] = deque()
        self.used = 0
        self.reserve = Pool(0, reserve=False) if reserve else None
        self.limit = 0
        """The part of the limit for slots."""
        self.resize(limit)

    def resize(self, limit: int) -> None:
        """Change the limit. If more is held already, nothing is granted until less is held."""
        kept = 0
        if self.reserve is not None:
            kept = min(limit // 2, RESERVE)  # a budget of a few bytes still has slots
            with self.reserve.lock:
                self.reserve.resize(kept)
        self.limit = limit - kept
        self.serve()

    def fits(self, nbytes: int) -> bool:
        """Return True if there is room. A request above the limit fits if nothing else is held."""
        return self.used + nbytes <= self.limit or self.used == 0

    def serve(self) -> None:
        """Grant pending requests, as far as there is room."""
        # Only the oldest is looked at: if smaller ones passed it, a large request might wait as long as any come.
        while self.waiting and self.fits(self.waiting[0].nbytes):
            request = self.waiting.popleft()
            request.budget.took(request.nbytes)
            request.granted = True
            request.wake()


class HeldSlot:
    """A slot of the arena that is charged to a budget, until it is released."""

    __slots__ = ("_budget", "_nbytes", "_pinning", "_shared", "_slot")

    def __init__(self, budget: MemoryBudget, nbytes: int, shared: bool, pinning: Pinning | None) -> None:
        """Hold bytes that were acquired."""
        self._budget = budget
        self._nbytes = nbytes
        self._shared = shared
        self._pinning = pinning
        self._slot: Slot | None = None

    @property
    def slot(self) -> Slot:
        """The slot. Its memory is allocated when it is first used."""
        if self._slot is None:
            self._slot = arena().take(self._nbytes, shared=self._shared, pinning=self._pinning)
        return self._slot

    def release(self) -> None:
        """Return the memory, and release its bytes. Later calls do nothing."""
        # Both are cleared first: an error below must not let a second call return the memory again.
        slot, self._slot = self._slot, None
        nbytes, self._nbytes = self._nbytes, 0
        if slot is not None:
            arena().give(slot)
        if nbytes:
            self._budget.release(nbytes)


class MemoryBudget:
    """The bytes that an operation may hold at once, from its own pool or a shared one."""

    def __init__(self, limit: int, pool: Pool | None = None) -> None:
        self._pool = pool or Pool(limit)
        self.total = limit
        self.limit = self._pool.limit
        self._reserve = MemoryBudget(self._pool.reserve.limit, self._pool.reserve) if self._pool.reserve else None
        self._used = self._peak = self._waits = 0
        self._blocked = 0.0
        self._error: BaseException | None = None
        self._aside: list[MemoryBudget] = []

    def set_aside(self, nbytes: int) -> MemoryBudget:
        """Return a budget of its own for a part of these bytes: who holds slots here never waits for it."""
        with self._pool.lock:
            kept = self._pool.reserve.limit if self._pool.reserve is not None else 0
            self._pool.resize(max(1, self._pool.limit + kept - nbytes))
            self.limit = self._pool.limit
        self._aside.append(MemoryBudget(nbytes, Pool(nbytes, reserve=False)))
        return self._aside[-1]

    def took(self, nbytes: int) -> None:
        """Count bytes as held. The caller holds the pool's lock."""
        self._pool.used += nbytes
        self._used += nbytes
        self._peak = max(self._peak, self._used)

    def try_acquire(self, nbytes: int) -> bool:
        """Acquire bytes if they are free and no earlier request is pending."""
        with self._pool.lock:
            return self._at_once(nbytes)

    def _at_once(self, nbytes: int) -> bool:
        if self._error is not None:
            raise self._error
        if self._pool.waiting or not self._pool.fits(nbytes):
            return False
        self.took(nbytes)
        return True

    async def acquire(self, nbytes: int) -> None:
        """Acquire bytes; wait until they are free."""
        if inline():  # this coroutine is driven without a loop, so nothing else could run meanwhile
            self.acquire_blocking(nbytes)
            return
        loop = asyncio.get_running_loop()
        granted = asyncio.Event()
        request = BudgetRequest(nbytes, self, lambda: loop.call_soon_threadsafe(granted.set))
        if self._enqueue(request):
            return
        began = time.perf_counter()
        try:
            await granted.wait()
        except BaseException:
            self._withdraw(request)
            raise
        self._waited(request, began)

    def acquire_blocking(self, nbytes: int) -> None:
        """Acquire bytes in a thread that does not run the loop."""
        granted = Latch()
        request = BudgetRequest(nbytes, self, granted.open)
        if self._enqueue(request):
            return
        began = time.perf_counter()
        try:
            granted.wait()
        except BaseException:
            self._withdraw(request)
            raise
        self._waited(request, began)

    def _enqueue(self, request: BudgetRequest) -> bool:
        """Grant a request at once and return True, or add it to the queue."""
        with self._pool.lock:
            if self._at_once(request.nbytes):
                return True
            self._waits += 1
            self._pool.waiting.append(request)
            return False

    def _withdraw(self, request: BudgetRequest) -> None:
        """Withdraw a request, even if it was granted meanwhile."""
        with self._pool.lock:
            if request.granted:
                self._give_back(request.nbytes)
            elif request in self._pool.waiting:
                self._pool.waiting.remove(request)
                self._pool.serve()  # it may have been the first, and too large for what is free

    def _waited(self, request: BudgetRequest, began: float) -> None:
        with self._pool.lock:
            self._blocked += time.perf_counter() - began
            if self._error is not None:  # `fail` wakes requests without a grant
                if request.granted:
                    self._give_back(request.nbytes)
                raise self._error

    def release(self, nbytes: int) -> None:
        """Release bytes. The oldest pending request is served first."""
        with self._pool.lock:
            self._give_back(nbytes)

    def close(self) -> None:
        """Release what an interrupted call still holds, since the pool may be shared. Later releases do nothing."""
        with self._pool.lock:
            self._give_back(self._used)
        if self._reserve is not None:
            self._reserve.close()

    def _give_back(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._used)  # after `close`, slots that are still released hold nothing
        self._used -= nbytes
        self._pool.used -= nbytes
        self._pool.serve()

    def fail(self, error: BaseException) -> None:
        """Raise this error in all current and future requests of the operation."""
        with self._pool.lock:
            self._error = error
            for each in self._aside:
                each.fail(error)
            mine = [request for request in self._pool.waiting if request.budget is self]
            for request in mine:
                self._pool.waiting.remove(request)
                request.wake()
            self._pool.serve()

    async def hold(self, nbytes: int, *, pinning: Pinning | None = None) -> HeldSlot:
        """Acquire the bytes of a slot; wait until they are free. The caller releases them."""
        size = arena_bytes(nbytes)
        await self.acquire(size)
        return HeldSlot(self, size, False, pinning)

    def hold_blocking(self, nbytes: int, *, shared: bool = False, pinning: Pinning | None = None) -> HeldSlot:
        """As `hold`, in a thread that does not run the loop. A `shared` slot is seen by other processes."""
        size = arena_bytes(nbytes)
        self.acquire_blocking(size)
        return HeldSlot(self, size, shared, pinning)

    def try_hold(self, nbytes: int, *, shared: bool = False, pinning: Pinning | None = None) -> HeldSlot | None:
        """As `hold_blocking`, or return None if the bytes are not free."""
        size = arena_bytes(nbytes)
        return HeldSlot(self, size, shared, pinning) if self.try_acquire(size) else None

    @asynccontextmanager
    async def borrow(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Yield page-aligned scratch memory from this budget, for storage plugins."""
        async with (self._reserve or self).slot(nbytes) as slot:
            yield slot.view

    @asynccontextmanager
    async def count(self, nbytes: int) -> AsyncIterator[None]:
        """Count memory that a client allocates itself."""
        held = self._reserve or self
        await held.acquire(nbytes)
        try:
            yield
        finally:
            held.release(nbytes)

    @asynccontextmanager
    async def slot(self, nbytes: int, pinning: Pinning | None = None) -> AsyncIterator[Slot]:
        """Yield a slot of the arena, charged to this budget."""
        await self.acquire(nbytes)
        try:
            slot = arena().take(nbytes, pinning=pinning)
            try:
                yield slot
            finally:
                arena().give(slot)
        finally:
            self.release(nbytes)

    def statistics(self) -> BudgetStatistics:
        with self._pool.lock:
            seen = BudgetStatistics(self.total, self._used, self._peak, self._waits, self._blocked)
        for each in [*self._aside, *([] if self._reserve is None else [self._reserve])]:
            more = each.statistics()
            seen = BudgetStatistics(self.total, *(a + b for a, b in zip(seen[1:], more[1:], strict=True)))  # type: ignore[arg-type]
        return seen

    def __repr__(self) -> str:
        seen = self.statistics()
        return f"MemoryBudget({seen.used:,} of {seen.limit:,} bytes used, peak {seen.peak:,}, {seen.waits} waits)"
