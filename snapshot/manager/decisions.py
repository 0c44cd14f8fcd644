"""Decisions of a training loop: when to take, when to stop, and how often takes are worth it."""

from __future__ import annotations

import signal
from dataclasses import replace

from snapshot.events import emit, log
from snapshot.io.url import URL
from snapshot.manager.advice import Advice, Measured
from snapshot.manager.channels import Channels
from snapshot.manager.pending_takes import PendingTakes
from snapshot.manager.schedule import Schedule
from snapshot.manager.signals import Signals
from snapshot.manager.step_metadata import checked_step
from snapshot.manager.tiers import ManagerTiers
from snapshot.text import Duration


class StepDecisions:
    """When to take, and when to stop. Base of `SnapshotManager`."""

    _url: URL
    _cadence: Schedule
    _measured: Measured
    _pendings: PendingTakes
    _channels: Channels
    _signals: Signals
    _stopping: bool
    _tiers: ManagerTiers | None

    def should_take(self, step: int) -> bool:
        """Return True if `every` says to take this step. The result is equal on all ranks, which must all call it.

        Call it at every step. No rank waits for another. If `every` is a time, all ranks take at the same step, soon
        after it has passed on rank 0's clock.
        """
        number = checked_step(step)
        self._measured.at_step(number)
        self._pendings.at_call()
        cadence = self._cadence
        if not cadence.given:
            raise ValueError("should_take: the manager was created without `every`")
        if cadence.steps is not None:
            return cadence.due_at(number)
        wish = number != cadence.last and cadence.due_now(busy=self._pendings.busy())
        return self._channels.ask("take", wish, leader_alone=True)

    def should_stop(self) -> bool:
        """Return True if a signal has asked any rank to stop: on all ranks from the same call on.

        All ranks must call it once a step. No rank waits for another, and most calls only count. Ranks query the store
        of their group about every half second, or at each call if calls are further apart. A rank that calls it more
        often than others stops earlier than they do.

        Raises:
            RankError: The store of the group cannot be reached.
        """
        self._measured.at_call()
        self._pendings.at_call()
        if not self._stopping:
            self._stopping = self._channels.ask("stop", self._signals.number is not None)
            if self._stopping:
                number = self._signals.number
                own = signal.Signals(number).name if number else "another rank's signal"
                emit("stopping", "should_stop", str(self._url), reason=own)
                log.info("should_stop %s: stopping because of %s", self._url, own)
        return self._stopping

    def advice(self, mtbf: Duration) -> Advice:
        """Return the interval between takes that loses least time, from the takes and steps of this rank so far.

        With `near`, the interval is that of near takes, and `upload_steps` that of uploads.

        `mtbf` is the mean time between failures: seconds, a `timedelta`, or a text such as `"12h"`.

        Raises SnapshotError if takes or steps were not measured yet.
        """
        advice = self._measured.advice(mtbf)
        return advice if self._tiers is None else replace(advice, upload=self._tiers.upload_seconds())
