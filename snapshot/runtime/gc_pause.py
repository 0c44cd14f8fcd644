"""A pause of garbage collection while many small objects are created.

Ten thousand entries trigger a full collection. It takes longer than all other work on the entries, and finds no
garbage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from snapshot.per_process import PerProcess


class _Pauses:
    """The number of contexts inside `gc_paused`."""

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
        """Enable collection in a forked child: the threads in a context do not exist there."""
        if self._inside and self._was_enabled:
            gc.enable()


_pauses = PerProcess(_Pauses, _Pauses.forked)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause automatic collection. Contexts may be nested, and entered by several threads."""
    _pauses.get().enter()
    try:
        yield
    finally:
        _pauses.get().leave()  # a forked child has its own
