"""Signals that end a verb, such that it always cleans up after itself.

A signal becomes an exception, which unwinds the stack. It must not strike between making something (a process, a
folder) and noting that it is to be removed: there it waits. And it strikes once: a second Ctrl-C would interrupt the
cleaning.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    """Within, the first SIGINT, SIGTERM or SIGHUP unwinds the stack, and those that follow do nothing."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set, and are they called
        yield
        return
    _state.reset()  # an earlier use may have been struck
    before = {number: signal.signal(number, _state.handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Within, signals wait; they strike at its end, when what was made is noted."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    if not _state.held:
        _state.strike()
