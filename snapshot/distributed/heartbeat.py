"""Heartbeats: a rank in a call beats, and the ranks that wait for it check the beats.

A slow rank keeps beating and is waited for. A rank that is dead, stopped or absent does not beat.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from snapshot.errors import system_limits


def interval(timeout: float, world: int) -> float:
    """Return the seconds between beats: several per timeout, but no more than the store of a large group can handle."""
    return max(0.02, min(timeout / 5, max(1.0, world / 1000)))


class Heartbeat:
    """Beats in a thread while any call is in progress."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._calls: list[float] = []
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._stopped = False

    def begin(self, timeout: float) -> None:
        """Start beating for a call whose ranks expect a beat within `timeout` seconds."""
        with self._change:
            self._calls.append(timeout)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="snapshot-heart", daemon=True)
                try:
                    with system_limits("cannot start a thread"):
                        self._thread.start()
                except BaseException:
                    self._thread = None
                    self._calls.remove(timeout)
                    raise
            self._change.notify()

    def end(self, timeout: float) -> None:
        """Stop beating for that call."""
        with self._change:
            self._calls.remove(timeout)

    def stop(self) -> None:
        """Stop the thread: the group was destroyed."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._calls and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                self._change.wait(interval(min(self._calls), self._world))
                beating = bool(self._calls) and not self._stopped
            if beating:
                self._count += 1
                with contextlib.suppress(Exception):  # the waiting ranks detect a failed store
                    self._store.set(f"beat/{self._rank}", str(self._count))


class Liveness:
    """The beats of other ranks, as one waiting rank has seen them."""

    def __init__(self, store: Any, timeout: float, world: int) -> None:
        self._store = store
        self._timeout = timeout
        self._pause = interval(timeout, world)
        self._began = self._looked = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}

    def silent(self, missing: Callable[[], Iterable[int]]) -> int | None:
        """Return a missing rank that sent no heartbeat for the whole timeout, or None. Checks only occasionally."""
        now = time.monotonic()
        if now - self._looked < self._pause:
            return None
        self._looked = now
        for rank in missing():
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            last, since = self._seen.get(rank, (beat, self._began))
            if beat != last or rank not in self._seen:
                since = since if rank not in self._seen else now
                self._seen[rank] = beat, since
            if now - since > self._timeout:
                return rank
        return None
