"""Requests over a network, made again when what went wrong may pass: the one layer of all that retries.

Clients' own retries are off, so that one deadline counts, and every fault is seen as an event. What makes progress is
never hurried: `timeout` counts from the last byte that moved.
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
from snapshot.events import emit
from snapshot.storage import URL

T = TypeVar("T")
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 20.0


class TransientError(StorageError):
    """Raised inside a plugin for a fault that may pass: the request is made again, until its deadline.

    `after` is how long the server asked to be left alone; `refused` says that the request has had no effect for sure.
    """

    def __init__(self, message: str, *, after: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.after = after
        self.refused = refused


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long requests are waited for."""

    timeout: float = 60.0
    """Seconds without a byte moved, after which an attempt is given up."""
    deadline: float = 300.0
    """Seconds after which a request that keeps failing, and gains nothing, is given up."""

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} is not a number of seconds above 0")


class Attempt:
    """What one attempt of a request knows of those before it, and how it shows that it makes progress."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self._clock: asyncio.Timeout | None = None
        self.number = 1
        self.uncertain = False
        """Whether an earlier attempt may have taken effect, though no answer said so."""
        self.began = time.monotonic()
        """Since when nothing was gained."""

    def progress(self) -> None:
        """A byte has moved: the time that an attempt may take begins anew."""
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time() + self._patience.timeout)

    def gain(self) -> None:
        """The same of what need not be asked for again: the request's time begins anew, too."""
        self.began = time.monotonic()
        self.progress()


async def retry_request(
    name: str, url: URL, patience: RetryPolicy, request: Callable[[Attempt], Awaitable[T]], within: float | None = None
) -> T:
    """Make a request until it succeeds, fails for good, or its deadline is over; `within` is a shorter deadline."""
    deadline = min(patience.deadline, within or patience.deadline)
    attempt = Attempt(patience)
    while True:
        left = deadline - (time.monotonic() - attempt.began)
        limit = max(min(patience.timeout, left), 0.05)
        try:
            async with asyncio.timeout(limit) as attempt._clock:
                return await request(attempt)
        except TimeoutError as error:
            if isinstance(error, SnapshotError):
                raise
            failed = TransientError(f"{url}: no answer to {name} in {limit:.3g} seconds")
            failed.__cause__ = error
        except TransientError as error:
            failed = error
        except StorageConflictError:
            raise  # it is known who was first
        except StorageError as error:
            error.uncertain |= attempt.uncertain
            raise
        attempt.uncertain |= not failed.refused
        pause = random.uniform(0.5, 1)  # noqa: S311 - of how long to wait, nobody makes a secret
        pause *= min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt.number, 20))
        pause = max(pause, failed.after or 0)
        spent = time.monotonic() - attempt.began
        if spent + pause >= deadline:
            times = f"{attempt.number} attempts" if attempt.number > 1 else "1 attempt"
            raised = StorageError(f"{failed} (given up after {times} in {spent:.1f} seconds)")
            raised.uncertain = attempt.uncertain
            raise raised from failed.__cause__
        emit("retry", name, str(url), attempt=attempt.number, error=str(failed), pause=round(pause, 3))
        attempt.number += 1
        await asyncio.sleep(pause)
