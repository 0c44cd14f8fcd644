"""SnapshotManager: the snapshots of one run, under one root."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.durations import Duration
from snapshot.errors import CorruptSnapshotError, SnapshotNotFoundError
from snapshot.events import emit, log
from snapshot.load.restore_options import RestoreArguments, RestoreOptions
from snapshot.manager import at_exit
from snapshot.manager.advice import Advice, Measured
from snapshot.manager.channels import Channels
from snapshot.manager.checked_arguments import checked_policy, checked_root, checked_signals, checked_timeout
from snapshot.manager.cleaner import Cleaner
from snapshot.manager.fallback import Fallback
from snapshot.manager.incremental import choose_base, find_bases
from snapshot.manager.pending_takes import PendingTakes
from snapshot.manager.policies import KeepBest, Policy, parts
from snapshot.manager.root import ManifestHead, Root
from snapshot.manager.schedule import Every, Schedule
from snapshot.manager.signals import Signals
from snapshot.manager.step_agreement import agree_on
from snapshot.manager.step_metadata import add_note, checked_metrics, checked_step, noted_metrics
from snapshot.options import Settings
from snapshot.runtime.loop import LoopFuture, run
from snapshot.save.take_options import AsyncTakeArguments, TakeArguments
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.takes import AppState
from snapshot.url import URL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SnapshotManager:
    """Snapshots of one run, in `step-<n>` below a root: take, restore, remove, and decide when.

    Args:
        root: A URL, or a path of the file system.
        keep: Policy of the snapshots to keep, such as `KeepLatest(3) | KeepBest("loss", 2)`. None keeps all.
        every: When `should_take` returns True: after some steps (an int) or a time (`timedelta`, `"10m"`), or
            whenever no take is running (`"continuous"`).
        incremental: Share files whose tensors are unchanged with earlier steps, so that two physical copies remain.
        pg: Process group of the participating ranks.
        storage_options: Options for the storage plugin.
        signals: Signals that ask the job to stop. Only a manager created in the main thread can handle them.
        allow_pickle: As for `Snapshot`.
        timeout: Seconds without a sign of life after which another rank, or the store of the group, counts as dead.

    >>> from snapshot import KeepLatest, StateDict
    >>> progress = StateDict(step=0)
    >>> with SnapshotManager("memory://docs/run", keep=KeepLatest(2), signals=()) as manager:
    ...     for step in (10, 20, 30):
    ...         snapshot = manager.take(step, {"progress": progress}, metrics={"loss": 1 / step})
    >>> manager.steps()
    [20, 30]
    >>> manager.restore_latest({"progress": progress})
    30
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Policy | None = None,
        every: Every | None = None,
        incremental: bool = False,
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        allow_pickle: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._url = URL.parse(checked_root(root))
        self._root = Root(self._url, storage_options)
        self._keep = checked_policy(keep)
        self._cadence = Schedule(every)
        self._incremental = incremental
        self._pg = pg
        self._options = storage_options
        self._allow_pickle = allow_pickle
        self._timeout = checked_timeout(timeout)
        self._measured = Measured()
        self._pendings = PendingTakes()
        self._using: set[int] = set()
        """Steps that are being taken or restored."""
        self._damaged: set[int] = set()
        """Steps of this library that `restore_latest` passed over."""
        self._cleaner = None if keep is None else Cleaner(self._root, keep, self._spared, lambda: set(self._damaged))
        self._channels = Channels(pg, timeout)
        self._leads = True
        self._stopping = False
        self._pid = os.getpid()
        self._signals = Signals(checked_signals(signals))
        weakref.finalize(self, self._signals.close)  # the signals would have no effect any more
        at_exit.open_ones.add(self)

    # Save

    def take(
        self,
        step: int,
        app_state: AppState,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **given: Unpack[TakeArguments],
    ) -> Snapshot:
        """Save a step, and return when it is committed.

        Snapshots that the policy does not keep are removed later, in the background. If `async_take` of this manager
        has just saved the step, wait for that take and return its snapshot. It counts as the same take if no other step
        was taken or restored since, and the loop is still at that step. A step that `restore_latest` found damaged is
        replaced.

        Args:
            step: Number of the step, equal on all ranks.
            app_state: As for `Snapshot.take`.
            metrics: Numbers by name, used by `best` and `KeepBest`. Those of rank 0 are stored.
            metadata: As for `Snapshot.take`.
            overwrite: Replace an existing snapshot of this step.
            given: Other arguments of `Snapshot.take`: `replicated`, `exclude`, `durable`, ...

        Raises:
            SnapshotExistsError: There is a snapshot of this step. Nothing was written.
            SnapshotError: The ranks passed different steps.
        """
        noted, number, pending, given = self._begin("take", step, metrics, metadata, given, overwrite=overwrite)
        if pending is not None:
            return self._snapshot(number)
        began = time.monotonic()
        self._using.add(number)
        try:
            snapshot = Snapshot.take(
                self._path(number),
                app_state,
                self._pg,
                storage_options=self._options,
                metadata=noted,
                overwrite=overwrite or number in self._damaged,
                **given,
            )
        finally:
            self._using.discard(number)
        self._took(number, began)
        self._ended(number, began, given.get("durable", True))
        return snapshot

    def async_take(
        self,
        step: int,
        app_state: AppState,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **given: Unpack[AsyncTakeArguments],
    ) -> PendingSnapshot:
        """Save a step as it is now, and write it while the application continues.

        Arguments are those of `take`; `given` are other arguments of `Snapshot.async_take`.
        """
        noted, number, pending, given = self._begin("async_take", step, metrics, metadata, given, overwrite=overwrite)
        if pending is not None:
            return pending
        began = time.monotonic()
        pending = Snapshot.async_take(
            self._path(number),
            app_state,
            self._pg,
            storage_options=self._options,
            metadata=noted,
            overwrite=overwrite or number in self._damaged,
            **given,
        )
        self._pendings.add(number, pending)
        self._took(number, began)
        pending.work.add_done_callback(partial(self._done, number, began, given.get("durable", True)))
        return pending

    def _begin(
        self,
        verb: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        given: Mapping[str, Any],
        *,
        overwrite: bool,
    ) -> tuple[dict[str, Any], int, PendingSnapshot | None, Any]:
        """Agree on the step. Return its metadata, its number, the async take that saved it already, and arguments."""
        with self._exchange(verb, given.get("timeout")) as exchange:
            number = checked_step(step)
            noted = add_note(number, checked_metrics(metrics), metadata)
            before = self._pendings.of(number)
            latest = self._pendings.is_latest(number) and number not in self._damaged and not overwrite
            bases = partial(find_bases, self._root, number, self._damaged) if self._incremental else list[int]
            begun = agree_on(exchange, self._root, number, before, latest=latest, find_bases=bases)
            exchange.close()
        self._leads = exchange.rank == 0
        self._measured.at_step(number)
        if not begun.known:
            self._pendings.moved_on()
        based = {"base": choose_base(self._root, self._keep, begun.bases)} if self._incremental else {}
        return noted, number, before if begun.known else None, {**based, **given}

    def _took(self, step: int, began: float) -> None:
        self._cadence.began(step)
        self._measured.took(began, time.monotonic() - began)

    def _done(self, step: int, began: float, durable: bool, work: LoopFuture[None]) -> None:
        """Handle the end of an async take. Called on the loop, so nothing here may block."""
        if not work.cancelled() and work.exception() is None:
            self._ended(step, began, durable)

    def _ended(self, step: int, began: float, durable: bool) -> None:
        """Record a committed take. If it is durable, rank 0 starts the removal of snapshots that the policy drops."""
        self._damaged.discard(step)
        self._measured.durable(began)
        if durable and self._leads and self._cleaner is not None:
            self._cleaner.committed(step, began)

    def _spared(self, step: int) -> bool:
        """Return True if the step is being taken or restored, or a running take is based on it."""
        return step in self._using or self._pendings.running(step) or self._pendings.needs(self._root.save_id(step))

    # Query

    def steps(self) -> list[int]:
        """Return the committed steps that this process sees now, ascending."""
        return sorted(run(self._root.folders()).committed)

    def latest(self, verify: bool = False) -> int | None:
        """Return the newest committed step, or None if there is none.

        With `verify`, read every byte, and pass over (and log) snapshots that fail verification.
        """
        for step in reversed(self.steps()):
            if not verify:
                return step
            try:
                report = self._snapshot(step).verify()
                fault = "" if report else str(report)
            except (CorruptSnapshotError, SnapshotNotFoundError) as error:
                fault = str(error)
            if not fault:
                return step
            log.warning("%s: passed over: verification failed: %s", self._root.step_url(step), fault)
        return None

    def best(self, metric: str | None = None, mode: str = "min") -> int | None:
        """Return the best step by a metric, or by the first `KeepBest` of the policy.

        Return None if no step has the metric.
        """
        if metric is not None:
            policy = KeepBest(metric, 1, mode)
        else:
            found = [each for each in parts(self._keep) if isinstance(each, KeepBest)] if self._keep else []
            if not found:
                raise ValueError(
                    "best: `keep` has no KeepBest; pass a metric, such as best('loss') or best('f1', 'max')"
                )
            policy = found[0]
        heads = run(self._root.heads(run(self._root.folders()).committed))
        for step, head in heads.items():
            if not isinstance(head, ManifestHead):
                log.warning("%s: passed over: %s", self._root.step_url(step), head)
        ranked = policy.ranked([head.taken(step) for step, head in heads.items() if isinstance(head, ManifestHead)])
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step."""
        return noted_metrics(self._snapshot(checked_step(step)).metadata.metadata)

    def snapshot(self, step: int) -> Snapshot:
        """Return the snapshot of a step, which need not exist."""
        number = checked_step(step)
        if not self._pendings.is_latest(number):
            self._pendings.moved_on()  # after a restore the state is that of this step
        return self._snapshot(number)

    def _snapshot(self, step: int) -> Snapshot:
        return Snapshot(self._path(step), self._pg, self._options, allow_pickle=self._allow_pickle)

    def pin(self, step: int) -> None:
        """Keep a step regardless of policies, also in other and later processes, until `unpin`."""
        run(self._root.pin(checked_step(step)))

    def unpin(self, step: int) -> None:
        """Let the policy decide about a step again."""
        run(self._root.unpin(checked_step(step)))

    def pinned(self) -> list[int]:
        """Return the pinned steps, ascending."""
        return sorted(run(self._root.pinned(self.steps())))

    # Load

    def restore_latest(self, app_state: AppState, **given: Unpack[RestoreArguments]) -> int | None:
        """Restore the newest undamaged step, the same one on all ranks. Return its number, or None if there is no step.

        A step with missing or short files, or with a wrong checksum, is passed over, with a log line and an event. A
        checksum can fail after live tensors were written to; the older step then overwrites them. A step that does not
        fit the application is an error, and so is a failing storage: neither means that a snapshot is damaged.

        Args:
            app_state: As for `Snapshot.restore`.
            given: Other arguments of `Snapshot.restore`. With `atomic=True`, a damaged step changes no live tensor.

        Raises:
            RestoreError: A step does not fit the application. Or a live tensor that a damaged step wrote to is missing
                from the step that is restored instead.
            CorruptSnapshotError: All steps are damaged. The error names each step and its fault, and in `touched` the
                live tensors that were written to.
        """
        began = time.monotonic()
        self._pendings.moved_on()
        begin = partial(self._exchange, "restore_latest", given.get("timeout"))
        step, damaged = Fallback(self._root, self._snapshot, begin, self._using).restore(
            app_state, RestoreOptions(**given)
        )
        self._damaged = set(damaged)
        if step is not None:
            self._cadence.began(step)
            self._measured.restore = time.monotonic() - began
        return step

    # When

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

        `mtbf` is the mean time between failures: seconds, a `timedelta`, or a text such as `"12h"`.

        Raises SnapshotError if takes or steps were not measured yet.
        """
        return self._measured.advice(mtbf)

    # Close

    def close(self) -> None:
        """Finish running takes and removals, and restore the signal handlers. Failures are logged.

        A signal that arrives meanwhile is recorded, and `should_stop` reports it afterwards.
        """
        if self._pid != os.getpid():
            return
        try:
            self._pendings.close()
            if self._cleaner is not None:
                self._cleaner.close()
        finally:
            self._signals.close()
        at_exit.open_ones.discard(self)

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, verb: str, timeout: float | None) -> Exchange:
        chosen = timeout if timeout is not None else self._timeout
        return Exchange(ranks_of(self._pg), verb, Settings.current().timeout if chosen is None else chosen)

    def _path(self, step: int) -> str:
        url = self._root.step_url(step)
        return url.location if url.scheme == "file" else url.reveal()

    def __repr__(self) -> str:
        return f"<SnapshotManager {self._url}: keep {self._keep or 'all'}>"
