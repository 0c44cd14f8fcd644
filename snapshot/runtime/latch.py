"""A latch that an interrupted wait cannot break.

`threading.Condition`, and therefore events and futures, take their lock in Python code. A `KeyboardInterrupt` there
leaves the lock held, and the thread that wakes the waiter waits forever. Here each waiter creates its own lock, which
other threads only release.
"""

from __future__ import annotations

import _thread
import contextlib

from snapshot.system_calls import WINDOWS

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
