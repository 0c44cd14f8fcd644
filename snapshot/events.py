"""What is reported while work runs: one line per verb in the log, handlers for events, and progress."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from snapshot.reports import Progress

log = logging.getLogger("snapshot")


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened: `start`, `staged`, `committed`, `restored`, `verified`, `deleted`, `converted`, `copied`,
    `compared`, `failed`, `cleaned`; and of a manager `pruned`, `fell_back` and `stopping`.

    And on the way: `retry`, whose verb is a request and whose path is its file, with `attempt`, `error` and `pause` (in
    seconds); `swept`, with the number of `uploads` that were dropped.
    """

    name: str
    verb: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Event], None]
GROUP = "snapshot.events"
"""The entry-point group of handlers that installed packages bring: `name = "package.module:function"`. They are loaded
with the first event of a process."""
_handlers: list[Handler] = []
_points = list(entry_points(group=GROUP))
"""Looked for at once, since that takes 20 ms; and loaded later, since they import us."""
_brought: list[Handler] = []


def add_handler(handler: Handler) -> None:
    """Call `handler` with every event. What it raises is logged, and fails nothing."""
    _handlers.append(handler)


def remove_handler(handler: Handler) -> None:
    """Call it no more."""
    _handlers.remove(handler)


def emit(name: str, verb: str, path: str, **fields: Any) -> None:
    """Tell the handlers; and the log, where it ends a verb."""
    if name in ("committed", "restored", "deleted", "verified", "converted", "copied", "compared"):
        log.info("%s %s: %s", verb, path, ", ".join(f"{key} {value}" for key, value in fields.items()))
    for handler in (*_installed(), *_handlers):
        try:
            handler(Event(name, verb, path, fields))
        except Exception:
            log.exception("an event handler failed on %s of %s", name, path)


def _installed() -> list[Handler]:
    """The handlers of installed packages. One that cannot be loaded is logged, and fails nothing."""
    while _points:
        point = _points.pop()
        try:
            _brought.append(point.load())
        except Exception:
            log.exception("the event handler %s = %s cannot be loaded", point.name, point.value)
    return _brought


ProgressArgument = bool | Callable[[Progress], None] | None


RECENT = 2.0
"""Over so many seconds a current rate is taken."""


class Meter:
    """Counts bytes as they arrive, from any thread, and shows them if it was asked to."""

    def __init__(self, verb: str, wanted: ProgressArgument) -> None:
        self.verb = verb
        self.total = 0
        self._done = self._staged = 0
        self._began = time.perf_counter()
        self._seconds = 0.0
        """How long it took, when it is over."""
        self._recent: deque[tuple[float, int]] = deque([(self._began, 0)])
        """When how many bytes were done: in the last seconds, and once before."""
        self._lock = threading.Lock()
        self._callback = wanted if callable(wanted) else None
        self._bar: Any = None
        if wanted is True:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=verb, unit="B", unit_scale=True, unit_divisor=1024)

    def begin(self, total: int) -> None:
        """How many bytes there will be."""
        self.total = total
        if self._bar is not None:
            self._bar.reset(total)

    def wrote(self, nbytes: int) -> None:
        """So many more bytes are where they belong."""
        now = time.perf_counter()
        with self._lock:
            self._done += nbytes
            self._recent.append((now, self._done))
            self._forget(now)
        if self._bar is not None:
            self._bar.update(nbytes)
        if self._callback is not None:
            try:
                self._callback(self.now())
            except Exception:
                log.exception("a progress callback failed, and is called no more")
                self._callback = None

    def staged(self, nbytes: int) -> None:
        """So many more bytes are safe from the application."""
        with self._lock:
            self._staged += nbytes

    def now(self) -> Progress:
        """How far it has come."""
        with self._lock:
            if self._seconds:
                return Progress(self._done, self.total, self._staged, self._seconds)
            now = time.perf_counter()
            self._forget(now)
            since, before = self._recent[0]
            rate = (self._done - before) / (now - since) if now > since else 0.0
            return Progress(self._done, self.total, self._staged, now - self._began, rate)

    def _forget(self, now: float) -> None:
        while len(self._recent) > 1 and self._recent[1][0] < now - RECENT:
            self._recent.popleft()

    def close(self) -> None:
        """It is over: show no more."""
        self._seconds = self._seconds or time.perf_counter() - self._began
        if self._bar is not None:
            self._bar.close()
