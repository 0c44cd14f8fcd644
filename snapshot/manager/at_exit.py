"""Exit hook of the interpreter that closes managers which are still open."""

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


# before the event loop's own exit hook, since closing a manager needs the loop
getattr(threading, "_register_atexit", lambda function: None)(_close_all)
