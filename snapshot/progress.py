"""Progress of a take or a restore: bytes counted as they arrive, and shown as a bar or to a callback."""

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
    """How far a take or a restore has come."""

    done: int
    """Bytes that are where they belong."""
    total: int
    staged: int = 0
    """Bytes that no longer depend on the application's memory (of an asynchronous take)."""
    seconds: float = 0.0
    """Since the call."""
    rate: float = 0.0
    """Bytes a second, in the last two seconds; 0 when it is over."""

    @property
    def mean_rate(self) -> float:
        """Bytes a second, since the call."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        share = self.done / self.total if self.total else 1.0
        rate = self.rate if self.done < self.total else self.mean_rate
        return f"{size_text(self.done)} of {size_text(self.total)} ({share:.0%}), {size_text(rate)}/s"


def unmetered(nbytes: int) -> None:
    """Take note of nothing: for work whose progress is not shown."""


ProgressArgument = bool | Callable[[Progress], None] | None
RECENT = 2.0
"""Seconds over which the current rate is averaged."""


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
        """End: show no more."""
        self._seconds = self._seconds or time.perf_counter() - self._began
        if self._bar is not None:
            self._bar.close()
