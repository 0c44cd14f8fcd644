"""This process: signals that end a command after its clean-up, and a pause of garbage collection."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from snapshot.io.system import PerProcess, find_signals

# Signals that end a command after its clean-up.
#
# A signal becomes an exception, which unwinds the stack. Signals are held back between the creation of a process or
# folder and its registration for removal. Only the first signal counts, so that a second Ctrl-C does not interrupt
# the clean-up.

SIGNALS = find_signals("SIGINT", "SIGTERM", "SIGHUP")


class _State:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held = 0
        self.pending: int | None = None
        self.struck = False

    def handle(self, number: int, _frame: object) -> None:
        if self.struck:
            return
        self.pending = number
        if not self.held:
            self.strike()

    def strike(self) -> None:
        number, self.pending = self.pending, None
        if number is None:
            return
        self.struck = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


_state = _State()


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """In this context, the first SIGINT, SIGTERM or SIGHUP unwinds the stack, and later ones are ignored."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers exist in the main thread only
        yield
        return
    _state.reset()  # an earlier use may have received a signal
    before = {number: signal.signal(number, _state.handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Hold signals back in this context, and deliver them at its end."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    if not _state.held:
        _state.strike()


# A pause of garbage collection while many small objects are created.
#
# Ten thousand entries trigger a full collection. It takes longer than all other work on the entries, and finds no
# garbage.


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
