"""Progress of a take or a restore: counts bytes, and shows a bar or calls a function."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapshot.text import size_text

log = logging.getLogger("snapshot")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a take or a restore."""

    done: int
    """Bytes that are written or read so far."""
    total: int
    staged: int = 0
    """Bytes of an asynchronous take that are copied from the application's memory."""
    seconds: float = 0.0
    """Seconds since the call."""
    rate: float = 0.0
    """Bytes per second over the last two seconds; 0 when it is over."""

    @property
    def mean_rate(self) -> float:
        """Bytes per second since the call."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        share = self.done / self.total if self.total else 1.0
        rate = self.rate if self.done < self.total else self.mean_rate
        return f"{size_text(self.done)} of {size_text(self.total)} ({share:.0%}), {size_text(rate)}/s"


def unmetered(nbytes: int) -> None:
    """Count nothing: for work without a progress display."""


ProgressArgument = bool | Callable[[Progress], None] | None
RECENT = 2.0
"""Seconds over which the current rate is averaged."""


class Meter:
    """Counts bytes from any thread, and shows them if requested."""

    def __init__(self, verb: str, wanted: ProgressArgument) -> None:
        self.verb = verb
        self.total = 0
        self._done = self._staged = 0
        self._began = time.perf_counter()
        self._seconds = 0.0
        """Total seconds, once it is over."""
        self._recent: deque[tuple[float, int]] = deque([(self._began, 0)])
        """Times and byte counts: of the last seconds, and one before."""
        self._lock = threading.Lock()
        self._callback = wanted if callable(wanted) else None
        self._bar: Any = None
        if wanted is True:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=verb, unit="B", unit_scale=True, unit_divisor=1024)

    def begin(self, total: int) -> None:
        """Set the total number of bytes."""
        self.total = total
        if self._bar is not None:
            self._bar.reset(total)

    def wrote(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as done."""
        now = time.perf_counter()
        with self._lock:
            self._done += nbytes
            self._recent.append((now, self._done))
            self._forget(now)
            if self._bar is not None:
                self._bar.update(nbytes)  # it counts, too, and not atomically
        if self._callback is not None:
            try:
                self._callback(self.now())
            except Exception:
                log.exception("a progress callback failed, and is not called again")
                self._callback = None

    def staged(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as staged."""
        with self._lock:
            self._staged += nbytes

    def now(self) -> Progress:
        """Return the progress so far."""
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
        """Stop showing progress."""
        self._seconds = self._seconds or time.perf_counter() - self._began
        if self._bar is not None:
            self._bar.close()
