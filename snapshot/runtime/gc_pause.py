"""No garbage collection in the middle of making many small objects.

Ten thousand entries are enough to start a collection of everything that the process holds, which takes longer than
all else that is done with them; none of them is garbage.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside, the collector does not start by itself. May be nested, and entered by several threads."""
    global _inside, _was_enabled  # noqa: PLW0603 - the collector is one for the process
    with _lock:
        if _inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)
            if _inside == 0 and _was_enabled:
                gc.enable()


def _after_fork() -> None:
    """The threads that were inside are not in the child: it collects again."""
    global _inside, _lock  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    if _inside and _was_enabled:
        gc.enable()
    _inside = 0


os.register_at_fork(after_in_child=_after_fork)
