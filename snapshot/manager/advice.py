"""How often to save: the interval that loses least, from what takes cost here and how often the job fails.

A take blocks training for C seconds; a failure loses, on average, half the interval T, and what a take needs until it
is durable, and the restart. With a mean time M between failures Young's interval is sqrt(2 C M); Daly's, which is
better where C is not small beside M, corrects it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from snapshot.durations import Duration, duration_text, seconds_of
from snapshot.errors import SnapshotError

RECENT = 20
"""Takes of which the cost is kept."""


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to save, and what it costs; times are in seconds, shares are of all time."""

    mtbf: float
    """The mean time between failures that was given."""
    blocked: float
    """How long a take blocks training, on average."""
    durable: float
    """How long it is until a take is durable, from its beginning."""
    restore: float
    """How long the last restore took; 0 if there was none."""
    step: float
    """How long a step takes, on average."""
    takes: int
    """How many takes were measured."""
    young: float
    """Young's interval."""
    interval: float
    """The advised one: Daly's, but not shorter than a take needs."""
    lost: float
    """The share of time that is lost at that interval, to takes and failures."""
    interval_now: float | None
    """The interval now; None after a single take."""
    lost_now: float | None

    @property
    def steps(self) -> int:
        """The advised interval in steps."""
        return max(1, round(self.interval / self.step))

    def __str__(self) -> str:
        often = "step" if self.steps == 1 else f"{self.steps:,} steps"
        head = f"take every {often} ({duration_text(self.interval)}): {self.lost:.2%} of the time is lost"
        if self.interval_now is not None and self.lost_now is not None:
            head += f", and {self.lost_now:.2%} with one every {duration_text(self.interval_now)}, as now"
        lines = [
            head,
            f"  a take blocks for {duration_text(self.blocked)} and is durable after {duration_text(self.durable)} "
            f"(mean of {self.takes})",
            f"  a step takes {duration_text(self.step)}"
            + (f", a restore {duration_text(self.restore)}" if self.restore else ""),
            f"  one failure in {duration_text(self.mtbf)}: Young's interval is {duration_text(self.young)}",
        ]
        return "\n".join(lines)


def daly_interval(cost: float, mtbf: float) -> float:
    """Daly's optimum interval between takes that cost so much.

    >>> round(daly_interval(60, 86400)), round(math.sqrt(2 * 60 * 86400))
    (3180, 3220)
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lost_share(interval: float, cost: float, mtbf: float, rest: float) -> float:
    """Return the share of time lost with takes every so many seconds; `rest`: what a failure costs besides."""
    period = interval + cost
    return min(1.0, cost / period + (period / 2 + rest) / mtbf)


class Measured:
    """What was measured of takes, restores and steps."""

    def __init__(self) -> None:
        self._blocked: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._durable: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """When a take began, and how long it took."""
        self._warm: float | None = None
        """When the first one began, which makes what later ones find made: it counts only while it is alone."""
        self.restore = 0.0
        self._first: tuple[float, int] | None = None
        self._latest: tuple[float, int] | None = None
        self._paused = 0.0
        self._calls: tuple[float, int] | None = None
        self._last_call = 0.0

    def at_step(self, step: int) -> None:
        """Note the step that the loop is at."""
        now = time.monotonic()
        if self._first is None or step < self._first[1]:
            self._first, self._paused = (now, step), 0.0
        self._latest = now, step

    def at_call(self) -> None:
        """Note that the loop is at another step, without its number."""
        now = time.monotonic()
        self._calls = (now, 0) if self._calls is None else (self._calls[0], self._calls[1] + 1)
        self._last_call = now

    def took(self, began: float, blocked: float) -> None:
        """Note a take that began at a time of the monotonic clock, and how long it blocked the loop."""
        self._warm = began if self._warm is None else self._warm
        self._blocked.append((began, blocked))
        self._paused += blocked
        if self._latest is not None:  # the time of the take is no step's
            self._latest = time.monotonic(), self._latest[1]
        self._last_call = time.monotonic()

    def durable(self, began: float) -> None:
        """One that began then is durable now."""
        self._durable.append((began, time.monotonic() - began))

    def _mean(self, seen: deque[tuple[float, float]]) -> tuple[float, int]:
        """Return the mean time, and of how many."""
        values = [seconds for began, seconds in seen if began != self._warm] or [seconds for _, seconds in seen]
        return sum(values) / len(values), len(values)

    def step_seconds(self) -> float | None:
        """Return the mean time of a step, without that of takes; None if too little was seen."""
        if self._first is not None and self._latest is not None and self._latest[1] > self._first[1]:
            spent = self._latest[0] - self._first[0] - self._paused
            return max(spent, 1e-9) / (self._latest[1] - self._first[1])
        if self._calls is not None and self._calls[1] > 0:
            return max(self._last_call - self._calls[0] - self._paused, 1e-9) / self._calls[1]
        return None

    def advice(self, mtbf: Duration) -> Advice:
        """Return the interval that loses least. Raises where nothing was measured."""
        mean = seconds_of(mtbf, "mtbf")
        step = self.step_seconds()
        if not self._durable:
            raise SnapshotError("advice: no take of this manager is durable yet, so its cost is not known")
        if step is None:
            raise SnapshotError(
                "advice: the time of a step is not known: call should_take(step) or should_stop() in each step"
            )
        blocked, takes = self._mean(self._blocked)
        durable = max(blocked, self._mean(self._durable)[0])
        interval = max(daly_interval(blocked, mean), durable - blocked)
        now = None
        if len(self._blocked) > 1:
            now = max(0.0, (self._blocked[-1][0] - self._blocked[0][0]) / (len(self._blocked) - 1) - blocked)
        rest = durable - blocked + self.restore
        return Advice(
            mean,
            blocked,
            durable,
            self.restore,
            step,
            takes,
            math.sqrt(2 * blocked * mean),
            interval,
            lost_share(interval, blocked, mean, rest),
            now,
            None if now is None else lost_share(now, blocked, mean, rest),
        )
