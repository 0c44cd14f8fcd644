"""Managers that nobody has closed are closed when the interpreter ends."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class _Closes(Protocol):
    def close(self) -> None: ...


open_ones: weakref.WeakSet[_Closes] = weakref.WeakSet()


def _close_all() -> None:
    for manager in list(open_ones):
        manager.close()


# before the loop's own end, on which what is finished here depends
getattr(threading, "_register_atexit", lambda function: None)(_close_all)
