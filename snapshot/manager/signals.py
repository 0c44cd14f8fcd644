"""Signals that ask the job to stop. They set a flag, and the previous handler is called, too.

A handler must do next to nothing: it runs between any two steps of the main thread, which may hold any lock. So it
sets a flag, and the reader of the flag logs it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from snapshot.events import log
from snapshot.io.system import find_signals

STOP_SIGNALS = find_signals("SIGTERM", "SIGUSR1")
"""Signals that schedulers send before they kill a job."""

SAME = 1.0
"""Signals within this many seconds of the first count as the same signal.

If a scheduler signals a whole process group, a launcher in it forwards the signal to ranks that already received it."""


class Signals:
    """Signal handlers, installed from the main thread, until `close`."""

    _passing_on = 0
    """Number of handlers that recorded a signal and are calling the previous handler (main thread only)."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.number: int | None = None
        """The signal that was received, if any."""
        self._at = 0.0
        self._pid = os.getpid()
        self._closed = False
        self._before: dict[int, Any] = {}
        wanted = [signal.Signals(number) for number in numbers]
        if not wanted:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "%s will not be noticed: a SnapshotManager created outside the main thread cannot handle signals",
                ", ".join(each.name for each in wanted),
            )
            return
        for number in wanted:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._closed or self._pid != os.getpid():  # a forked child is not the job, and must exit on a signal
            self._give_up(number, frame)
        elif self.number is None:
            self.number, self._at = number, time.monotonic()
            if (before := self._chained(number)) is not None:
                Signals._passing_on += 1
                try:
                    before(number, frame)
                finally:
                    Signals._passing_on -= 1
        elif time.monotonic() - self._at >= SAME:
            self._put_back()
            self._give_up(number, frame, at_once=True)

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    def earlier(self, number: int) -> Any:
        """Return the handler that was installed before this one."""
        return self._before[number]

    def _earlier(self, number: int) -> Any:
        """Return the handler that was installed before, skipping those of closed managers."""
        before = self._before[number]
        while isinstance(owner := getattr(before, "__self__", None), Signals) and owner.is_closed:
            before = owner.earlier(number)
        return before

    def _chained(self, number: int) -> Callable[[int, FrameType | None], Any] | None:
        """Return the previous handler if the application set it: the default ones would end the process."""
        before = self._earlier(number)
        return before if callable(before) and before is not signal.default_int_handler else None

    def _give_up(self, number: int, frame: FrameType | None, *, at_once: bool = False) -> None:
        """Do what would happen without this handler. `at_once`: end the process if that leaves it alive."""
        before = self._earlier(number)
        if callable(before):
            before(number, frame)
        # an open manager has recorded the signal, and the application's handler has called this one, which it had saved
        noted = Signals._passing_on > 0 and self._pid == os.getpid()
        if at_once or (before == signal.SIG_DFL and not noted):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _put_back(self) -> None:
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                before = self._earlier(number)
                # None is a handler that was not set from Python, which Python cannot set again
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def close(self) -> None:
        """Restore the previous handlers, unless others were set since.

        A signal that still arrives here later has the effect that it would have had without this handler.
        """
        self._closed = True
        if self._pid == os.getpid() and threading.current_thread() is threading.main_thread():
            self._put_back()


def ignore_stop_signals(worker: int = 0) -> None:
    """Ignore SIGTERM and SIGUSR1 in a worker process, unless its parent sent them: a DataLoader's `worker_init_fn`.

    Schedulers signal every process of a job. A worker that exits on that signal breaks the loop before its last take.
    A worker that also ignored its parent would never end. macOS and Windows do not tell who sent a signal, so nothing
    is ignored there. `worker` is the number that a DataLoader passes.

    A fork server, Python 3.14's default, ends on such a signal, and its workers end with it. Pass
    `multiprocessing_context="fork"` to the DataLoader there.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), num_workers=2, worker_init_fn=ignore_stop_signals)
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    numbers = set(STOP_SIGNALS)
    # blocked, so that a thread can receive them with the sender's pid, which a handler does not get
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    parent = multiprocessing.parent_process()  # the one that ends the worker; a fork server may be between them

    def wait() -> None:
        while True:
            sender = signal.sigwaitinfo(numbers).si_pid
            if sender == os.getppid() or (parent is not None and sender == parent.pid):
                os._exit(0)

    threading.Thread(target=wait, name="snapshot-signals", daemon=True).start()
