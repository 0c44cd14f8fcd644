"""Process-wide state: created on first use, renewed in a forked child, and reset by tests.

All mutable state of the library is held in a `PerProcess`, so that one hook handles forks and tests can reset it.
Exceptions are values that a fork inherits unchanged: registered plugins and event handlers, counters, and caches of
pure functions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_all: list[PerProcess[Any]] = []


class PerProcess(Generic[T]):
    """One value per process.

    Args:
        make: Creates the value, on first use.
        in_child: Called in a forked child with the parent's value, to release the parent's resources. Its result is the
            child's value; None creates a new one on first use.

    >>> numbers = PerProcess(list)
    >>> numbers.get().append(3)
    >>> numbers.get()
    [3]
    >>> numbers.reset()
    >>> numbers.made() is None
    True
    """

    def __init__(self, make: Callable[[], T], in_child: Callable[[T], T | None] | None = None) -> None:
        self._make = make
        self._in_child = in_child
        self._value: T | None = None
        self._lock = threading.RLock()
        _all.append(self)

    def get(self) -> T:
        """Return the value; create it if there is none."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._make()
        return value

    def made(self) -> T | None:
        """Return the value, or None if it does not exist yet."""
        return self._value

    def reset(self) -> None:
        """Discard the value: the next `get` creates a new one."""
        self._value = None

    def renew(self) -> None:
        """Give a forked child its own value."""
        self._lock = threading.RLock()  # a thread of the parent may have held the lock
        value, self._value = self._value, None
        if value is not None and self._in_child is not None:
            self._value = self._in_child(value)


def drop_oldest(kept: dict[Any, Any], most: int) -> None:
    """Drop the first items of a dictionary with more than `most`, which other threads may change at the same time.

    >>> numbers = {1: "a", 2: "b", 3: "c"}
    >>> drop_oldest(numbers, 2)
    >>> numbers
    {2: 'b', 3: 'c'}
    """
    if len(kept) > most:
        for key in list(kept)[:-most]:
            kept.pop(key, None)


def _after_fork() -> None:
    for each in _all:
        each.renew()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_after_fork)
