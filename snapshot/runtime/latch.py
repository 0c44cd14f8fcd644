"""Waiting that an interruption cannot break.

`threading.Condition`, and with it events and futures, takes its lock in Python code: a `KeyboardInterrupt` in there
leaves the lock taken, and whoever wants to wake the waiter waits for ever. Here the waiter makes a lock of its own,
which others only ever release.
"""

from __future__ import annotations

import _thread
import contextlib


class Latch:
    """Opens once, for all who wait."""

    __slots__ = ("_locks", "_open")

    def __init__(self) -> None:
        self._open = False
        self._locks: list[_thread.LockType] = []

    def open(self) -> None:
        """Let everybody through, from now on."""
        self._open = True
        while self._locks:
            try:
                lock = self._locks.pop()
            except IndexError:  # another thread opens it, too
                return
            lock.release()

    def is_open(self) -> bool:
        """Whether nobody waits here any more."""
        return self._open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open; whether it is."""
        if self._open or (timeout is not None and timeout <= 0):
            return self._open
        lock = _thread.allocate_lock()
        lock.acquire()
        self._locks.append(lock)
        if not self._open and not lock.acquire(timeout=-1 if timeout is None else min(timeout, _thread.TIMEOUT_MAX)):
            with contextlib.suppress(ValueError):  # it is being opened just now
                self._locks.remove(lock)
        return self._open
