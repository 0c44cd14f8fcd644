"""Schedule of takes: after a number of steps, after a time, or whenever no take is running."""

from __future__ import annotations

import time
from datetime import timedelta

from snapshot.text import Duration, parse_duration, seconds_of

Every = int | timedelta | str
"""A number of steps; a `timedelta` or a text such as `"10m"`; `"continuous"`."""


class Schedule:
    """State of `every`. All ranks count steps equally; time and running takes are known to rank 0 only."""

    def __init__(self, every: Every | None) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        self.continuous = every == "continuous"
        if isinstance(every, bool) or (every is not None and not isinstance(every, (int, str, timedelta))):
            raise TypeError(
                f"every must be a number of steps, a timedelta, a text such as '10m', or 'continuous', got {every!r}"
            )
        if isinstance(every, int):
            if every < 1:
                raise ValueError(f"every must be at least 1 step, got {every}")
            self.steps = every
        elif every is not None and not self.continuous:
            if isinstance(every, str) and parse_duration(every) is None:
                raise ValueError(f"every must be steps, a duration such as '10m', or 'continuous', got {every!r}")
            duration: Duration = every
            self.seconds = seconds_of(duration, "every")
        self.last = 0
        """Step that was last taken or restored."""
        self._since = time.monotonic()

    @property
    def given(self) -> bool:
        """True if there is a schedule."""
        return self.continuous or self.steps is not None or self.seconds is not None

    def began(self, step: int) -> None:
        """Record that a take of a step has begun, or that a step was restored."""
        self.last = step
        self._since = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Return True if a multiple of `steps` is between the last step and this one."""
        assert self.steps is not None
        if step < self.last:  # the application itself restored an older snapshot
            self.last = step - 1
        return step // self.steps > self.last // self.steps

    def due_now(self, *, busy: bool) -> bool:
        """Return True if a take should begin now, by time or because none is running."""
        if self.continuous:
            return not busy
        assert self.seconds is not None
        return time.monotonic() - self._since >= self.seconds
