"""The asynchronous takes of a manager: which are under way, and whether a second take of a step means the first."""

from __future__ import annotations

import time

from snapshot.snapshot import PendingSnapshot

REMEMBERED = 8
"""Asynchronous takes that are waited for when their steps are taken once more."""
AGO = 2
"""So many calls of `should_stop` and `should_take` may lie between the two takes of one step: they are asked once a
step, so after more of them the application is at another one, or has gone back to an older snapshot."""


class PendingTakes:
    """Remembers them by their steps."""

    def __init__(self) -> None:
        self._all: dict[int, PendingSnapshot] = {}
        self._latest: int | None = None
        """The step that was taken last, if it was taken asynchronously, and nothing has been restored since."""
        self._calls = 0

    def add(self, step: int, pending: PendingSnapshot) -> None:
        """One has begun. Waits for the oldest if there are too many."""
        self._all[step] = pending
        self._latest, self._calls = step, 0
        if len(self._all) > REMEMBERED:  # by their order, which all ranks share, and not by what is done here
            wait_for_pending(self._all.pop(next(iter(self._all))))

    def at_call(self) -> None:
        """Note that the application goes on to another step."""
        self._calls += 1

    def moved_on(self) -> None:
        """Note that the application's state may be that of another step."""
        self._latest = None

    def of(self, step: int) -> PendingSnapshot | None:
        """Return the pending take of a step."""
        return self._all.get(step)

    def is_latest(self, step: int) -> bool:
        """Whether the application's state is still what was taken, as far as can be seen."""
        return step == self._latest and self._calls <= AGO

    def running(self, step: int) -> bool:
        """Whether that of a step is under way."""
        pending = self._all.get(step)
        return pending is not None and not pending.done()

    def busy(self) -> bool:
        """Whether any is under way."""
        return any(not each.done() for each in list(self._all.values()))

    def close(self) -> None:
        """Wait for all, and forget them."""
        for pending in list(self._all.values()):
            wait_for_pending(pending)
        self._all.clear()
        self._latest = None


def wait_for_pending(pending: PendingSnapshot) -> None:
    """Wait until it is over, however it ends: `wait()` would keep a failure from the log."""
    while not pending.done():
        time.sleep(0.005)
