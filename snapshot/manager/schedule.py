"""When to take a step, by what a take and a failure cost; and when to stop, by a signal.

A take blocks training for C seconds. A failure loses half the interval T on average, plus the restart and the time
that a take needs to become durable. With a mean time M between failures, Young's interval is sqrt(2 C M). Daly's
interval corrects it for a C that is not small compared with M.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.io.system import find_signals
from snapshot.text import Duration, duration_text, parse_duration, seconds_of

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
        self._promise: tuple[int, float] | None = None
        """The step and the time of the last commit, or of the last warning that there was none since."""
        self._committed: int | None = None

    @property
    def given(self) -> bool:
        return self.continuous or self.steps is not None or self.seconds is not None

    def began(self, step: int) -> None:
        """Record that a take of a step has begun, or that a step was restored."""
        self.last = step
        self._since = time.monotonic()

    def committed(self, step: int) -> None:
        self._committed, self._promise = step, (step, time.monotonic())

    def overdue(self, step: int, *, busy: bool) -> str:
        """Return a warning if nothing was committed in two intervals, and again after each two; '' if all is well.

        While a take is running, it has twenty: steps can be much faster than a storage.
        """
        now, most = time.monotonic(), 20 if busy else 2
        if self._promise is None:
            self._promise = step, now
        before, at = self._promise
        late = self.steps is not None and step - before > most * self.steps
        if not late and not (self.seconds is not None and now - at > most * self.seconds):
            return ""
        self._promise = step, now
        last = "no step was committed" if self._committed is None else f"the last committed step is {self._committed}"
        return f"{last}, and the run is at step {step}"

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


RECENT = 20
"""Number of takes whose cost is kept."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advised interval and its cost. Times are in seconds, shares are fractions of all time."""

    mtbf: float
    """Mean time between failures, as passed by the caller."""
    blocked: float
    """Mean time that a take blocks training."""
    durable: float
    """Mean time from the start of a take until it is durable."""
    restore: float
    """Duration of the last restore; 0 if there was none."""
    step: float
    """Mean duration of a step."""
    takes: int
    """Number of takes that were measured."""
    young: float
    """Young's interval."""
    interval: float
    """Advised interval: Daly's, but at least the time that a take needs."""
    lost: float
    """Share of time lost to takes and failures at the advised interval."""
    interval_now: float | None
    """Current interval; None after a single take."""
    lost_now: float | None
    upload: float = 0.0
    """Mean duration of an upload to the far root, for a manager with `near`; 0 if none was measured."""

    @property
    def upload_steps(self) -> int:
        """The interval between uploads in steps. Uploads block nothing, so it is as short as they allow."""
        return max(self.steps, math.ceil(self.upload / self.step))

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
        if self.upload:
            lines.append(f"  an upload takes {duration_text(self.upload)}: upload every {self.upload_steps:,} steps")
        return "\n".join(lines)


def young_interval(cost: float, mtbf: float) -> float:
    """Return Young's interval between the beginnings of takes of this cost."""
    return math.sqrt(2 * cost * mtbf)


def daly_interval(cost: float, mtbf: float) -> float:
    """Return Daly's optimal interval between takes of this cost.

    >>> round(daly_interval(60, 86400)), round(math.sqrt(2 * 60 * 86400))
    (3180, 3220)
    >>> daly_interval(2.5, 1)  # a take costs more than the time between failures
    1
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young_interval(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lost_share(interval: float, cost: float, mtbf: float, rest: float) -> float:
    """Return the share of time lost with a take every `interval` seconds; `rest` is the fixed cost of a failure."""
    period = interval + cost
    return min(1.0, cost / period + (period / 2 + rest) / mtbf)


class Measured:
    """Measurements of takes, restores and steps."""

    def __init__(self) -> None:
        self._blocked: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._durable: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Start time and duration of each take."""
        self._warm: float | None = None
        """Start time of the first take. It includes one-off set-up, so later takes replace its measurement."""
        self.restore = 0.0
        self._first: tuple[float, int] | None = None
        self._latest: tuple[float, int] | None = None
        self._paused = 0.0
        self._calls: tuple[float, int] | None = None
        self._last_call = 0.0

    def at_step(self, step: int) -> None:
        now = time.monotonic()
        if self._first is None or step < self._first[1]:
            self._first, self._paused = (now, step), 0.0
        self._latest = now, step

    def at_call(self) -> None:
        """Record that the loop is at another step, without its number."""
        now = time.monotonic()
        self._calls = (now, 0) if self._calls is None else (self._calls[0], self._calls[1] + 1)
        self._last_call = now

    def took(self, began: float, blocked: float) -> None:
        """Record a take: its start time (of the monotonic clock), and how long it blocked the loop."""
        self._warm = began if self._warm is None else self._warm
        self._blocked.append((began, blocked))
        self._paused += blocked
        if self._latest is not None:  # a take does not count as time of a step
            self._latest = time.monotonic(), self._latest[1]
        self._last_call = time.monotonic()

    def durable(self, began: float) -> None:
        """Record that the take that began at this time is durable now."""
        self._durable.append((began, time.monotonic() - began))

    def slowest(self) -> float:
        """Return the time of the slowest of the last ten takes until it was durable; 0 if none was."""
        seen = list(self._durable)
        later = [seconds for began, seconds in seen if began != self._warm] or [seconds for _, seconds in seen]
        return max(later[-10:], default=0.0)

    def _mean(self, seen: deque[tuple[float, float]]) -> tuple[float, int]:
        """Return the mean time, and the number of takes that it is the mean of."""
        values = [seconds for began, seconds in seen if began != self._warm] or [seconds for _, seconds in seen]
        return sum(values) / len(values), len(values)

    def step_seconds(self) -> float | None:
        """Return the mean time of a step, without takes; None if too little was measured."""
        if self._first is not None and self._latest is not None and self._latest[1] > self._first[1]:
            spent = self._latest[0] - self._first[0] - self._paused
            return max(spent, 1e-9) / (self._latest[1] - self._first[1])
        if self._calls is not None and self._calls[1] > 0:
            return max(self._last_call - self._calls[0] - self._paused, 1e-9) / self._calls[1]
        return None

    def advice(self, mtbf: Duration) -> Advice:
        """Return the interval that loses least time. Raise SnapshotError if takes or steps were not measured yet."""
        mean = seconds_of(mtbf, "mtbf")
        step = self.step_seconds()
        if not self._durable:
            raise SnapshotError("advice: the cost of a take is unknown: no take of this manager is durable yet")
        if step is None:
            raise SnapshotError(
                "advice: the time of a step is unknown; call should_take(step) or should_stop() in each step"
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
            young_interval(blocked, mean),
            interval,
            lost_share(interval, blocked, mean, rest),
            now,
            None if now is None else lost_share(now, blocked, mean, rest),
        )


# Signals that ask the job to stop. They set a flag, and the previous handler is called, too.
#
# A handler must do next to nothing: it runs between any two steps of the main thread, which may hold any lock. So it
# sets a flag, and the reader of the flag logs it.

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
        self.closed = False
        self.before: dict[int, Any] = {}
        """The handlers that were installed before these."""
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
            self.before[number] = signal.signal(number, self._handle)

    @property
    def at(self) -> float | None:
        """Monotonic time at which the signal was received, if any."""
        return None if self.number is None else self._at

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.closed or self._pid != os.getpid():  # a forked child is not the job, and must exit on a signal
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

    def _earlier(self, number: int) -> Any:
        """Return the handler that was installed before, skipping those of closed managers."""
        before = self.before[number]
        while isinstance(owner := getattr(before, "__self__", None), Signals) and owner.closed:
            before = owner.before[number]
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
        for number in self.before:
            if signal.getsignal(number) == self._handle:
                before = self._earlier(number)
                # None is a handler that was not set from Python, which Python cannot set again
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def close(self) -> None:
        """Restore the previous handlers, unless others were set since.

        A signal that still arrives here later has the effect that it would have had without this handler.
        """
        self.closed = True
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
