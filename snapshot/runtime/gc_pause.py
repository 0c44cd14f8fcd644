"""No garbage collection while many small objects are made.

Ten thousand entries are enough to start a collection of everything that the process holds. That takes longer than all
else that is done with the entries, and none of them is garbage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from snapshot.per_process import PerProcess


class _Pauses:
    """How many contexts are inside `gc_paused`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._inside == 0 and self._was_enabled:
                gc.enable()

    def forked(self) -> None:
        """Collect again: the threads that were inside are not in the child."""
        if self._inside and self._was_enabled:
            gc.enable()


_pauses = PerProcess(_Pauses, _Pauses.forked)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector from starting by itself. May be nested, and entered by several threads."""
    _pauses.get().enter()
    try:
        yield
    finally:
        _pauses.get().leave()  # in a forked child another one
