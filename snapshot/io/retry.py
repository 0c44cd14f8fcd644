"""The only layer that retries requests over a network.

The clients' own retries are off, so that one deadline applies and every failure is an event. A slow request that makes
progress is never aborted: `timeout` counts from the last transferred byte.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from snapshot.errors import SnapshotError, StorageConflictError, StorageError
from snapshot.events import emit, log
from snapshot.io.storage import URL
from snapshot.io.system import PerProcess

T = TypeVar("T")
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 20.0


class TransientError(StorageError):
    """Transient failure inside a plugin: the request is retried until its deadline.

    `after` is the pause in seconds that the server asked for. `refused` means that the request certainly had no effect.
    """

    def __init__(self, message: str, *, after: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.after = after
        self.refused = refused


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits of requests."""

    timeout: float = 60.0
    """Seconds without a transferred byte after which an attempt is aborted."""
    deadline: float = 300.0
    """Seconds without new bytes after which a failing request is no longer retried."""

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}")


class RequestAttempts:
    """State of a request over its attempts, and its progress."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self._clock: asyncio.Timeout | None = None
        self.number = 1
        self.uncertain = False
        """True if an earlier attempt without a response may have taken effect."""
        self.began = time.monotonic()
        """Time of the last received byte that need not be requested again."""
        self.heard = self.began
        """Time of the last transferred byte."""

    def time_out_after(self, seconds: float) -> asyncio.Timeout:
        """Return the context manager that bounds this attempt; `progress` restarts it."""
        self._clock = asyncio.timeout(seconds)
        return self._clock

    def progress(self) -> None:
        """Restart the time-out of the attempt after a transferred byte."""
        self.heard = time.monotonic()
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time() + self._patience.timeout)

    def gain(self) -> None:
        """Restart the time-out and the deadline after bytes that need not be requested again."""
        self.began = time.monotonic()
        self.progress()


SILENT = 5.0
"""Seconds without a transferred byte after which a line is logged."""
STILL_SILENT = 30.0
"""Seconds between such lines for one server."""
_logged: PerProcess[dict[str, float]] = PerProcess(dict)
"""Time of the last line about each server."""


class _Silence:
    """Logs a line while a server does not respond, for the first of its requests that notices it."""

    def __init__(self, name: str, url: URL, attempt: RequestAttempts) -> None:
        self._name = name
        self._url = url
        self._attempt = attempt
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SILENT, self._look)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now, attempt = time.monotonic(), self._attempt
        left = SILENT - (now - attempt.heard)
        if left <= 0:
            server, known = f"{self._url.scheme}://{self._url.location.partition('/')[0]}", _logged.get()
            if now - known.get(server, -math.inf) >= STILL_SILENT - 1:
                known[server] = now
                log.warning(
                    "%s: no response to %s for %.0f s (attempt %d); still waiting",
                    self._url,
                    self._name,
                    now - attempt.heard,
                    attempt.number,
                )
            left = STILL_SILENT
        self._timer = asyncio.get_running_loop().call_later(left, self._look)


async def retry_request(
    name: str,
    url: URL,
    patience: RetryPolicy,
    request: Callable[[RequestAttempts], Awaitable[T]],
    within: float | None = None,
) -> T:
    """Repeat a request until it succeeds, fails permanently, or its deadline passes. `within` is a shorter deadline."""
    deadline = min(patience.deadline, within or patience.deadline)
    attempt = RequestAttempts(patience)
    with _Silence(name, url, attempt):
        while True:
            left = deadline - (time.monotonic() - attempt.began)
            limit = max(min(patience.timeout, left), 0.05)
            try:
                async with attempt.time_out_after(limit):
                    return await request(attempt)
            except TimeoutError as error:
                if isinstance(error, SnapshotError):
                    raise
                failed = TransientError(f"{url}: no response to {name} in {limit:.3g} seconds")
                failed.__cause__ = error
            except TransientError as error:
                failed = error
            except StorageConflictError:
                raise  # the outcome is certain
            except StorageError as error:
                error.uncertain |= attempt.uncertain
                raise
            attempt.uncertain |= not failed.refused
            pause = random.uniform(0.5, 1)  # noqa: S311 - a pause is not a secret
            pause *= min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt.number, 20))
            pause = max(pause, failed.after or 0)
            spent = time.monotonic() - attempt.began
            if spent + pause >= deadline:
                times = f"{attempt.number} attempts" if attempt.number > 1 else "1 attempt"
                raised = StorageError(f"{failed} (failed after {times} in {spent:.1f} seconds)")
                raised.uncertain = attempt.uncertain
                raise raised from failed.__cause__
            emit("retry", name, str(url), attempt=attempt.number, error=str(failed), pause=round(pause, 3))
            attempt.number += 1
            await asyncio.sleep(pause)
