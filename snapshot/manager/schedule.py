"""When to save: after so many steps, after so much time, or whenever no take is under way."""

from __future__ import annotations

import time
from datetime import timedelta

from snapshot.durations import Duration, seconds_of

Every = int | timedelta | str
"""A number of steps; a `timedelta` or a text such as `"10m"`; `"continuous"`."""


class Schedule:
    """What `every` says. Steps are counted by all ranks alike; time and what is under way are rank 0's to know."""

    def __init__(self, every: Every | None) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        self.continuous = every == "continuous"
        if isinstance(every, bool) or (every is not None and not isinstance(every, (int, str, timedelta))):
            raise TypeError(
                f"every={every!r}: it is a number of steps, a timedelta, a text such as '10m', or 'continuous'"
            )
        if isinstance(every, int):
            if every < 1:
                raise ValueError(f"every={every}: it is 1 step or more")
            self.steps = every
        elif every is not None and not self.continuous:
            duration: Duration = every
            self.seconds = seconds_of(duration, "every")
        self.last = 0
        """The step that was taken or restored last."""
        self._since = time.monotonic()

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.continuous or self.steps is not None or self.seconds is not None

    def began(self, step: int) -> None:
        """Note that a take of a step has begun, or that a step was restored."""
        self.last = step
        self._since = time.monotonic()

    def due_at(self, step: int) -> bool:
        """By steps: whether a multiple lies between the last one and this."""
        assert self.steps is not None
        if step < self.last:  # the application has gone back, to a snapshot that it restored by itself
            self.last = step - 1
        return step // self.steps > self.last // self.steps

    def due_now(self, *, busy: bool) -> bool:
        """By time, or whenever none is under way: whether one should begin."""
        if self.continuous:
            return not busy
        assert self.seconds is not None
        return time.monotonic() - self._since >= self.seconds
