"""State that a process has once: made at first use, made anew in a forked child, and reset by tests.

What the library makes for itself and changes is held in a `PerProcess`, so that one hook handles forks, and a test can
put it back. Outside stay what a fork inherits unchanged: registered plugins and event handlers, counters, and caches of
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
    """One value of a process.

    Args:
        make: Makes the value, at first use.
        in_child: Called in a forked child with the value that the parent had made, to let go of what belongs to the
            parent. What it returns is the child's value; None makes a new one at first use.

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
        """Return the value; make it if there is none."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._make()
        return value

    def made(self) -> T | None:
        """Return the value, or None if it was not made yet."""
        return self._value

    def reset(self) -> None:
        """Forget the value: the next `get` makes a new one."""
        self._value = None

    def renew(self) -> None:
        """Give a forked child its own value."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        value, self._value = self._value, None
        if value is not None and self._in_child is not None:
            self._value = self._in_child(value)


def _after_fork() -> None:
    for each in _all:
        each.renew()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_after_fork)
