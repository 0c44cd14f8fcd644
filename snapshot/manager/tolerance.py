"""Failures of takes that training survives, up to a number in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from snapshot.errors import SnapshotError, SnapshotExistsError
from snapshot.events import emit, log
from snapshot.manager.options import Tolerate
from snapshot.takes import AppState

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
        """Record a committed take."""
        self.failures = 0

    def failed(self, path: str, error: BaseException) -> None:
        """Record a failed take."""
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
