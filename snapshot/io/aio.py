"""Coroutines and threads: blocking work in the pool, clean-up that cannot be cancelled, and latches."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from snapshot.io.system import WINDOWS

# Coroutines and threads: blocking work in the pool, coroutines without a loop, clean-up that is never interrupted.

A = TypeVar("A")
T = TypeVar("T")
_here = threading.local()


def inline() -> bool:
    """Return True if this thread drives a coroutine without a loop."""
    return getattr(_here, "inline", False)


def run_inline(work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a coroutine in this thread without a loop: for calls to `blocking` storages."""
    _here.inline = True
    coroutine = work(*arguments)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        _here.inline = False
        coroutine.close()
    raise RuntimeError(f"{work} must not wait for an event loop, since its storage is declared blocking")


def pop_first(queue: deque[T]) -> T | None:
    """Remove and return the first item of a queue that several threads empty; None if it is empty.

    They cannot share an iterator: without the GIL, two threads may get the same item.
    """
    try:
        return queue.popleft()
    except IndexError:
        return None


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function in the loop's thread pool, to its end."""
    if inline():
        return function(*arguments)
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, function, *arguments))


async def to_the_end(work: Awaitable[T]) -> T:
    """Wait for work in threads. A cancellation waits for it, too, and is raised afterwards.

    When this call returns or raises, no thread uses the arguments of the work any more. Otherwise a thread could still
    write to a released buffer or a reused descriptor.
    """
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(BaseException):
                await asyncio.shield(future)
        raise


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if it is cancelled meanwhile: partial clean-up is worse than a delay."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(BaseException):
            await asyncio.shield(task)
    return task.result()


async def gather_limited(items: Iterable[A], work: Callable[[A], Awaitable[T]], limit: int = 16) -> list[T]:
    """Process items concurrently, at most `limit` at a time. Return the results in order.

    After an error, the others are cancelled. When it is raised, none of them runs any more.
    """
    free = asyncio.Semaphore(limit)

    async def one(item: A) -> T:
        async with free:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await shielded(_await_all(tasks))
        raise


async def _await_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


# A latch that an interrupted wait cannot break.
#
# `threading.Condition`, and therefore events and futures, take their lock in Python code. A `KeyboardInterrupt` there
# leaves the lock held, and the thread that wakes the waiter waits forever. Here each waiter creates its own lock,
# which other threads only release.

_INTERVAL = 0.5


def _acquire(lock: _thread.LockType, timeout: float | None) -> bool:
    """Acquire a lock. On Windows, Ctrl-C does not interrupt a wait without a timeout."""
    while timeout is None and WINDOWS:
        if lock.acquire(timeout=_INTERVAL):
            return True
    return lock.acquire(timeout=-1 if timeout is None else min(timeout, _thread.TIMEOUT_MAX))


class Latch:
    """Opens once, and releases all waiting threads."""

    __slots__ = ("_locks", "_open")

    def __init__(self) -> None:
        self._open = False
        self._locks: list[_thread.LockType] = []

    def open(self) -> None:
        """Release all current and future waiters."""
        self._open = True
        while self._locks:
            try:
                lock = self._locks.pop()
            except IndexError:  # another thread opens it at the same time
                return
            lock.release()

    def is_open(self) -> bool:
        """Return True once the latch has been opened."""
        return self._open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open. Return False after a timeout."""
        if self._open or (timeout is not None and timeout <= 0):
            return self._open
        lock = _thread.allocate_lock()
        lock.acquire()
        self._locks.append(lock)
        if not self._open and not _acquire(lock, timeout):
            with contextlib.suppress(ValueError):  # it is being opened now
                self._locks.remove(lock)
        return self._open
