"""No garbage collection in the middle of making many small objects.

Ten thousand entries are enough to start a collection of everything that the process holds, which takes longer than
all else that is done with them; none of them is garbage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def no_collection() -> Iterator[None]:
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
            _inside -= 1
            if _inside == 0 and _was_enabled:
                gc.enable()
