"""The takes of a manager: their options, the pending ones, and failures that training survives.

Options are checked at the manager's creation, so that they cannot fail in the middle of a run.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from snapshot.errors import SnapshotError, SnapshotExistsError
from snapshot.events import emit, log
from snapshot.io.loop import start
from snapshot.io.system import find_signals
from snapshot.progress import Meter
from snapshot.save.take import AppState
from snapshot.snapshot import PendingSnapshot, Snapshot

if TYPE_CHECKING:
    from snapshot.manager.exports import StepExport


def checked_root(root: Any) -> str:
    """Return the root as a str; raise TypeError or ValueError if invalid."""
    text = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"root must be a path or a URL, got {root!r}")
    if not text:
        raise ValueError("root must be a path or a URL, got ''")
    return text


def checked_timeout(timeout: Any) -> float | None:
    """Return the timeout in seconds; raise TypeError or ValueError if not a number above 0."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
    return timeout


def checked_signals(signals: Any) -> list[signal.Signals]:
    """Return signals that a process can handle; raise TypeError or ValueError for other values."""
    if not isinstance(signals, Iterable) or isinstance(signals, (str, bytes)):
        raise TypeError(f"signals must be an iterable such as (signal.SIGTERM, signal.SIGUSR1), or (), got {signals!r}")
    found = []
    for each in signals:
        if isinstance(each, bool) or not isinstance(each, int) or each not in signal.valid_signals():
            raise ValueError(f"signals must be valid signals such as signal.SIGTERM, got {each!r}")
        if each in find_signals("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals must not include {signal.Signals(each).name}: no process can handle it")
        found.append(signal.Signals(each))
    return found


def checked_tolerance(on_error: Any) -> Tolerate | None:
    """Return the failures that training survives, None for none; raise ValueError if invalid."""
    if isinstance(on_error, Tolerate):
        return on_error
    if on_error not in ("raise", "warn"):
        raise ValueError(f"on_error must be 'raise', 'warn' or Tolerate(failures), got {on_error!r}")
    return Tolerate() if on_error == "warn" else None


def checked_exports(exports: Any, near: Any) -> tuple[StepExport, ...]:
    """Return the exports; raise TypeError or ValueError if invalid."""
    wrong = type, os.PathLike  # these may have the attribute, too
    if not isinstance(exports, (list, tuple)) or not all(
        hasattr(each, "open") and not isinstance(each, wrong) for each in exports
    ):
        raise TypeError(f"exports must be a list such as [KeptExport(...)], got {exports!r}")
    if exports and near is not None:
        raise ValueError("exports must be empty with `near`, since no host may have a whole step; use `convert`")
    names = [each.name for each in exports]
    if len({*names}) < len(names):
        raise ValueError(f"exports must have different names, got {', '.join(names)}")
    return tuple(exports)


@dataclass(frozen=True)
class Tolerate:
    """For `SnapshotManager(on_error=...)`: failed takes are logged, and training continues.

    Args:
        failures: Number of failed takes in a row that raises. Fewer are only logged.
    """

    failures: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.failures, bool) or not isinstance(self.failures, int) or self.failures < 1:
            raise ValueError(f"failures must be a number of takes, at least 1, got {self.failures!r}")


REMEMBERED = 8
"""Maximum number of asynchronous takes that a later take of the same step can wait for."""
AGO = 2
"""Two takes of a step count as one state if at most this many calls of `should_stop` and `should_take` came between.

Both are called once a step. After more calls the application is at another step, or back at an older snapshot."""


class PendingTakes:
    """Asynchronous takes by step."""

    def __init__(self) -> None:
        self._all: dict[int, PendingSnapshot] = {}
        self._latest: int | None = None
        """Step of the last take, if that was asynchronous and nothing was restored since."""
        self._calls = 0
        self._blocking: int | None = None
        """The step of a take that blocks the application now."""
        self._relies = False
        """True if that take may leave out what its base has."""

    @contextmanager
    def blocking(self, step: int, *, relies: bool) -> Iterator[None]:
        """Record a take of a step, with its arguments, while it blocks the application."""
        self._blocking, self._relies = step, relies
        try:
            yield
        finally:
            self._blocking, self._relies = None, False

    def add(self, step: int, pending: PendingSnapshot) -> None:
        """Add a take that has begun. Wait for the oldest if there are too many."""
        self._all[step] = pending
        self._latest, self._calls = step, 0
        if len(self._all) > REMEMBERED:  # by order, which is equal on all ranks; completion is not
            wait_for_pending(self._all.pop(next(iter(self._all))))

    def at_call(self) -> None:
        """Record that the application has moved to another step."""
        self._calls += 1

    def moved_on(self) -> None:
        """Record that the application's state may be that of another step."""
        self._latest = None

    def of(self, step: int) -> PendingSnapshot | None:
        """Return the pending take of a step."""
        return self._all.get(step)

    def is_latest(self, step: int) -> bool:
        """Return True if the application's state is probably still the one that was taken."""
        return step == self._latest and self._calls <= AGO

    def running(self, step: int) -> bool:
        """Return True if the take of this step is running."""
        pending = self._all.get(step)
        return step == self._blocking or (pending is not None and not pending.done())

    def needs(self, save_id: str) -> bool:
        """Return True if a running take left something out that the snapshot with this save id has, or may do so."""
        if self._relies:
            return True
        running = [each for each in list(self._all.values()) if not each.done()]
        return bool(save_id) and any(each.report is not None and each.report.base == save_id for each in running)

    def busy(self) -> bool:
        """Return True if any take is running."""
        return any(not each.done() for each in list(self._all.values()))

    def settle(self, until: float = math.inf) -> int | None:
        """Wait for all takes, at most until a monotonic time. Return a step whose take is still running, if any."""
        for step, pending in list(self._all.items()):
            wait_for_pending(pending, until)
            if not pending.done():
                return step
        return None

    def close(self) -> None:
        """Wait for all takes, and forget them."""
        self.settle()
        self._all.clear()
        self._latest = None


def wait_for_pending(pending: PendingSnapshot, until: float = math.inf) -> None:
    """Wait until a take is over, without raising: `wait()` would keep its failure from being logged."""
    while not pending.done() and time.monotonic() < until:
        time.sleep(0.005)


def settled_take(path: str, snapshot: Snapshot, error: SnapshotError | None = None) -> PendingSnapshot:
    """Return a take that is over before anything was written: that has failed, or has nothing to write."""

    async def end() -> None:
        if error is not None:
            raise error

    work = start(end())
    pending = PendingSnapshot(path, work, Meter("async_take", None), snapshot)
    work.settled()
    return pending


OnError = Literal["raise", "warn"] | Tolerate


OnException = Callable[[BaseException], tuple[int, AppState] | None]
"""A function of the exception that leaves a manager's context. It returns a step and an app state to save, or None."""


def save_after(error: BaseException, hook: OnException, take: Callable[[int, AppState], object]) -> None:
    """Save what a hook allows after an exception. A failure is logged, since the exception is being raised."""
    try:
        found = hook(error)
        if found is not None:
            take(*found)
    except Exception as failure:  # noqa: BLE001 - the first exception is the important one
        log.warning("nothing was saved after %s: %s", type(error).__name__, failure)


class Tolerance:
    """Counts failed takes. Failures that are tolerated are logged, until there are too many in a row."""

    def __init__(self, tolerated: Tolerate | None) -> None:
        self._warns = tolerated is not None
        self._most = tolerated.failures if tolerated is not None else 0
        self.failures = 0
        """Failures since the last take that was committed."""

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, path: str, error: BaseException) -> None:
        self.failures += 1
        if self._warns:
            log.warning("%s: the take failed (%d in a row): %s", path, self.failures, error)
            emit("tolerated", "take", path, error=error, failures=self.failures)

    def survives(self, error: BaseException) -> bool:
        """Return True if training continues after a failed take: not after wrong arguments, or too many failures."""
        known = isinstance(error, SnapshotError) and not isinstance(error, SnapshotExistsError)
        return self._warns and known and self.failures < self._most

    def expect_few(self, failures: int) -> None:
        """Raise if a rank has seen too many failures in a row."""
        if self._warns and failures >= self._most:
            raise SnapshotError(f"the last {failures} takes failed, and Tolerate({self._most}) allows no more")
