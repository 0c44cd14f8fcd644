"""SnapshotManager: the snapshots of one run, under one root."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError
from snapshot.events import emit, log
from snapshot.io.loop import LoopFuture, before_exit, run
from snapshot.io.session import Key
from snapshot.io.url import URL
from snapshot.loading.restore_options import RESTORE_OPTIONS, RestoreOptions
from snapshot.manager.agreement import Channels, StepBegin, agree_on, may_be_committed
from snapshot.manager.policies import KeepBest, Policy, checked_policy, every_policy
from snapshot.manager.preemption import (
    AHEAD,
    RESERVE,
    Deadline,
    LastSave,
    SaveCosts,
    Source,
    choose_save,
    limited_by,
    parameter_share,
    partial_note,
    without_optimizers,
)
from snapshot.manager.restore_latest import Fallback
from snapshot.manager.retention import CLEANER
from snapshot.manager.root import Root, taken_of
from snapshot.manager.schedule import STOP_SIGNALS, Advice, Every, Measured, Schedule, Signals
from snapshot.manager.step_metadata import add_note, checked_step, noted_expiry, noted_metrics
from snapshot.manager.steps import Begun, PlainSteps, RunOptions, Steps, find_kind
from snapshot.manager.takes import (
    OnError,
    OnException,
    PendingTakes,
    Tolerance,
    checked_exports,
    checked_root,
    checked_signals,
    checked_timeout,
    checked_tolerance,
    save_after,
    settled_take,
)
from snapshot.manifest.document import ManifestHead
from snapshot.options import expect_options, with_given, with_options
from snapshot.progress import ProgressArgument
from snapshot.reports import RestoreReport, Saved, TakeReport
from snapshot.save.findings import suspicions
from snapshot.save.take import AppState
from snapshot.save.take_options import TAKE_OPTIONS, BaseArgument, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.text import Duration, duration_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from snapshot.manager.exports import StepExport


ASKED_AGAIN = 5.0
"""Seconds between two questions to the uploader while a source tells the end of the job."""


class SnapshotManager:
    """Snapshots of one run, in `step-<n>` below a root: take, restore, remove, and decide when.

    Args:
        root: A URL, or a path of the file system.
        keep: Policy of the snapshots to keep, such as `KeepLatest(3) | KeepBest("loss", 2)`, or a number of the latest.
            None keeps all.
        every: When `should_take` returns True: after some steps (an int) or a time (`timedelta`, `"10m"`), or
            whenever no take is running (`"continuous"`).
        incremental: Share files whose tensors are unchanged with earlier steps, so that two physical copies remain.
        near: A folder of each host, or `Near(folder, ...)` with more choices. Takes are committed there, and the host's
            uploader copies them to `root`, the far root. See docs/guides/tiers.md.
        on_error: `"raise"`; or `"warn"`: a failed take is logged, and training continues, for up to two failures in a
            row. `Tolerate(failures)` says after how many failures in a row a take raises.
        on_exception: Called with the exception that leaves `with manager:`. It returns a step and an app state to
            save, or None.
        pg: Process group of the participating ranks.
        storage_options: Options for the storage plugin.
        signals: Signals that ask the job to stop. Only a manager created in the main thread can handle them.
        deadline: Time from such a signal until the job is killed, such as `"30s"`; a function that returns the time of
            the kill (seconds since the epoch), or None while it is unknown; or a list of these. By default
            `SNAPSHOT_DEADLINE`. What is saved then fits into the time that is left: the whole state, or near only, or
            no state of optimizers, or nothing. See docs/guides/preemption.md.
        allow_pickle: As for `Snapshot`.
        timeout: Seconds without a sign of life after which another rank, or the store of the group, counts as dead.
        take_options: Options of all takes: `TakeOptions(replicated=[...], durable=False)`. A value that is wrong
            everywhere is an error here; one that a machine lacks, such as a key file, when a take begins.
        restore_options: Options of `restore_latest`, such as `RestoreOptions(strict=False)`.
        exports: What is made of committed steps in the background, such as
            `[snapshot_export.KeptExport(map=..., when=KeepBest("loss"))]`. See docs/guides/manager.md.

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

    @with_options(TakeOptions, "take_options")
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Policy | int | None = None,
        every: Every | None = None,
        incremental: bool = False,
        near: Any = None,
        on_error: OnError = "raise",
        on_exception: OnException | None = None,
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        signals: Iterable[int] = STOP_SIGNALS,
        deadline: Duration | Source | Sequence[Duration | Source] | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        take_options: TakeOptions | None = None,
        restore_options: RestoreOptions | None = None,
        exports: Sequence[StepExport] = (),
    ) -> None:
        self.take_options = TAKE_OPTIONS if take_options is None else take_options
        """Options of all takes, unless a call has others: `replace(manager.take_options, read_back=True)`."""
        self.restore_options = RESTORE_OPTIONS if restore_options is None else restore_options
        """Options of `restore_latest`, unless a call has others."""
        expect_options(self.take_options, TakeOptions)
        expect_options(self.restore_options, RestoreOptions)
        self.take_options.check()
        self.restore_options.check()
        self._url = URL.parse(checked_root(root))
        self._keep = checked_policy(keep)
        self._cadence = Schedule(every)
        self._incremental = incremental
        self._pg = pg
        self._tolerance = Tolerance(checked_tolerance(on_error))
        self._on_exception = on_exception
        self._timeout = checked_timeout(timeout)
        exported = checked_exports(exports, near)
        self._measured = Measured()
        self._pendings = PendingTakes()
        given = RunOptions(Root(self._url, storage_options), self._keep, self._pendings, pg, allow_pickle)
        self._steps: Steps = PlainSteps(given) if near is None else find_kind("near").open_steps(near, given)
        self._steps.open_exports(exported)
        self._channels = Channels(pg, timeout)
        self._stopping = False
        self._stopped: float | None = None
        """Monotonic time at which the job was told to stop by a signal, as a rank without one of its own sees it."""
        self._ask_again, self._upload = -math.inf, 0.0
        self._leads = True
        self._deadline = Deadline(deadline)
        self._last = LastSave()
        self._report: RestoreReport | None = None
        self._pid = os.getpid()
        self._signals = Signals(checked_signals(signals))
        weakref.finalize(self, self._signals.close)  # the signals would have no effect any more
        weakref.finalize(self, self._deadline.close)
        open_managers.add(self)

    # Save

    @with_options(TakeOptions)
    def take(
        self,
        step: int,
        app_state: AppState,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        lifetime: Duration | None = None,
        replicated: Sequence[str] | None = None,
        base: BaseArgument = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        options: TakeOptions | None = None,
    ) -> Snapshot:
        """Save a step, and return when it is committed.

        Steps that the policy does not keep are deleted later, in the background. If `async_take` of this manager has
        just saved the same step, this call waits for it and returns its snapshot, provided that no other step was taken
        or restored since, and that the loop is still at that step. A step that `restore_latest` found damaged is
        replaced.

        Args:
            step: Number of the step, equal on all ranks.
            app_state: As for `Snapshot.take`.
            metrics: Numbers by name, used by `best` and `KeepBest`. Those of rank 0 are stored.
            metadata: As for `Snapshot.take`.
            overwrite: Replace an existing snapshot of this step.
            lifetime: Time for which the step is kept, also by a manager without `keep`: seconds, a `timedelta`, or a
                text such as `"7d"`. Then it is removed, unless it is the newest good step, pinned, or a base. That of
                rank 0 is stored.
            replicated: As for `Snapshot.take`.
            base: As for `Snapshot.take`. With `incremental`, a manager chooses it.
            progress: As for `Snapshot.take`.
            timeout: As for `Snapshot.take`.
            options: The options of this take, instead of `take_options` of the manager. To change one of these, pass
                `dataclasses.replace(manager.take_options, ...)`.

        Raises:
            SnapshotExistsError: There is a snapshot of this step. Nothing was written.
            RunForkedError: With `near`: two jobs have continued the run without seeing each other.
            OtherWriterError: Without `near`: another job writes to the root.
            SnapshotError: The ranks passed different steps. Or another job has continued the run.
        """
        given = {"replicated": replicated, "base": base, "progress": progress, "timeout": timeout}
        noting = partial(add_note, metrics=metrics, metadata=metadata, lifetime=lifetime)
        begun = self._begin("take", step, app_state, options, noting=noting, given=given, overwrite=overwrite)
        number = begun.step
        if begun.pending is not None:
            self._flush_if_stopping(begun)
            return self._steps.snapshot(number)
        if begun.saved == "none":
            return self._unsaved(begun)
        began = time.monotonic()
        with self._pendings.blocking(number, relies=begun.options.only is not None):
            try:
                snapshot = self._steps.take(begun, app_state)
            except BaseException as error:
                self._failed(begun, error)
                if not self._tolerance.survives(error):
                    raise
                return self._steps.snapshot(number)
            self._took(number, began)
            self._ended(begun, began, snapshot.report)
        self._flush_if_stopping(begun)
        _note_saved(snapshot, begun, far=self._steps.flushed)
        return snapshot

    def _flush_if_stopping(self, begun: Begun) -> None:
        if self._stopping and begun.place.near:
            self._steps.flush()

    def _unsaved(self, begun: Begun) -> Snapshot:
        """Return the snapshot of a step for which there was no time."""
        snapshot = self._steps.snapshot(begun.step)
        snapshot.report = TakeReport(0, saved="none")
        return snapshot

    @with_options(TakeOptions)
    def async_take(
        self,
        step: int,
        app_state: AppState,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        lifetime: Duration | None = None,
        replicated: Sequence[str] | None = None,
        base: BaseArgument = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        options: TakeOptions | None = None,
    ) -> PendingSnapshot:
        """Save a step as it is now, and write it while the application continues.

        Arguments are those of `take`. The options `staging`, `worker` and `when_busy` choose how.
        """
        given = {"replicated": replicated, "base": base, "progress": progress, "timeout": timeout}
        noting = partial(add_note, metrics=metrics, metadata=metadata, lifetime=lifetime)
        begun = self._begin("async_take", step, app_state, options, noting=noting, given=given, overwrite=overwrite)
        number, path = begun.step, begun.place.path
        if begun.pending is not None:
            return begun.pending
        if begun.saved == "none":
            return settled_take(path, self._unsaved(begun))
        began = time.monotonic()
        try:
            with self._pendings.blocking(number, relies=begun.options.only is not None):
                pending = self._steps.async_take(begun, app_state)
                self._pendings.add(number, pending)
        except SnapshotError as error:
            self._failed(begun, error)
            if not self._tolerance.survives(error):
                raise
            return settled_take(path, self._steps.snapshot(number), error)
        _note_saved(pending, begun)
        self._took(number, began)
        pending.work.add_done_callback(partial(self._done, begun, began, pending))
        return pending

    def _begin(
        self,
        verb: str,
        step: int,
        app_state: AppState,
        options: TakeOptions | None,
        *,
        noting: Callable[[int], dict[str, Any]],
        given: Mapping[str, Any],
        overwrite: bool,
    ) -> Begun:
        """Agree on the step, and on where it is written. `given`: the arguments of the call that go before options.

        `noting`: returns the metadata of the take.
        """
        steps = self._steps
        options = with_given(self.take_options if options is None else options, TakeOptions, given)
        stops = self._stopping
        left = self._left() if stops else None
        with self._recording_failure(step), self._exchange(verb, getattr(options, "timeout", None), left) as exchange:
            expect_options(options, TakeOptions)
            options.check()
            number = checked_step(step)
            noted = noting(number)
            if noted_expiry(noted) is not None:
                steps.expect_expiry()
            before = self._pendings.of(number)
            replaces = overwrite or number in steps.damaged
            saved = may_be_committed(before, left) and self._pendings.is_latest(number) and not replaces
            noted, fault = steps.prepare(exchange, number, noted, replaces=replaces)
            answer = agree_on(
                exchange,
                steps,
                before,
                StepBegin(number, saved, fault, self._tolerance.failures, self._left() if stops else None),
                new=not replaces,
                incremental=self._incremental,
                expect_few=self._tolerance.expect_few,
                choose=lambda left, near: self._choose(left, app_state, near=near),
            )
            exchange.close()
        self._measured.at_step(number)
        if not answer.known:
            self._pendings.moved_on()
        place = steps.place_of(number, "" if answer.known else answer.near_fault, verb)
        base = options.base
        if self._incremental and base is None:
            base = steps.choose_base(answer.bases)
        timeout = limited_by(answer.left, self._timeout if options.timeout is None else options.timeout)
        pending = before if answer.known else None
        if self._stopping and pending is None:
            self._last.chose(answer.saved, place.path, number, answer.left, answer.needed)
            self._steps.until = math.inf if answer.left is None else time.monotonic() + answer.left - RESERVE
        if answer.saved == "parameters":
            options = without_optimizers(options, app_state)
            noted |= partial_note(answer.left)
        return Begun(
            number, place, pending, options, noted, overwrite=replaces, base=base, timeout=timeout, saved=answer.saved
        )

    def _left(self) -> float | None:
        """Return the seconds until the job is killed, None if unknown."""
        return self._deadline.left(self._stopped if self._signals.at is None else self._signals.at)

    def _choose(self, left: float, app_state: AppState, *, near: bool) -> tuple[Saved, float]:
        """Return what is saved in the time that is left, and the time for all. A running save shares the storage.

        `near`: False if a host cannot write near.
        """
        slowest = self._measured.slowest() * (2 if self._pendings.busy() else 1)
        costs = SaveCosts(slowest, self._steps.upload_seconds(RESERVE / 2), near and self._steps.outlives_host())
        return choose_save(left, costs, lambda: parameter_share(app_state)), costs.whole

    @contextmanager
    def _recording_failure(self, step: object) -> Iterator[None]:
        """Record a failure of what is saved last."""
        try:
            yield
        except BaseException as error:
            self._last.failed(step, error)
            raise

    def _failed(self, begun: Begun, error: BaseException) -> None:
        self._tolerance.failed(begun.place.path, error)
        self._last.failed(begun.step, error)

    def _took(self, step: int, began: float) -> None:
        self._cadence.began(step)
        self._measured.took(began, time.monotonic() - began)

    def _done(self, begun: Begun, began: float, pending: PendingSnapshot, work: LoopFuture[None]) -> None:
        """Handle the end of an async take. Called on the loop, so nothing here may block."""
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            self._ended(begun, began, pending.report)
        else:
            self._failed(begun, error)

    def _ended(self, begun: Begun, began: float, report: TakeReport | None) -> None:
        """Record a committed take, and start the removal of snapshots that the policies drop."""
        self._steps.damaged.discard(begun.step)
        self._tolerance.succeeded()
        self._cadence.committed(begun.step)
        suspect = report is not None and any(getattr(each, "acts", False) for each in report.findings)
        if begun.saved in ("whole", "near") and not suspect:
            self._last.good = begun.step
        self._measured.durable(began)
        self._steps.committed(begun, began, report)

    # Restore

    @with_options(RestoreOptions)
    def restore_latest(
        self,
        app_state: AppState,
        *,
        offline: bool = False,
        good: bool = True,
        key: Key | None = None,
        options: RestoreOptions | None = None,
    ) -> int | None:
        """Restore the newest undamaged step, the same one on all ranks. Return its number, or None if there is no step.

        A step with missing or short files, or with a wrong checksum, is passed over, with a log line and an event. A
        checksum can fail after live tensors were written to; the older step then overwrites them. A step that does not
        fit the application is an error, and so is a failing storage: neither means that a snapshot is damaged.

        Args:
            app_state: As for `Snapshot.restore`.
            offline: With `near`: if the far root cannot be read, restore the newest step that the hosts have. Without
                it, raise StorageError, since the far root may have a newer step, or say that near steps are abandoned.
            good: Pass over suspect steps, with a log line. With False, restore the newest undamaged step in any case.
            key: The public key that must have signed the step, as for `Snapshot`.
            options: The options of this restore, instead of `restore_options` of the manager. With `atomic=True`, a
                damaged step changes no live tensor.

        Raises:
            RestoreError: A step does not fit the application. Or a live tensor that a damaged step wrote to is missing
                from the step that is restored instead.
            CorruptSnapshotError: All steps are damaged. The error names each step and its fault, and in `touched` the
                live tensors that were written to.
            RunForkedError: With `near`: two jobs have continued the run without seeing each other.
        """
        began = time.monotonic()
        options = self.restore_options if options is None else options
        timeout = getattr(options, "timeout", None)
        if isinstance(options, RestoreOptions) and timeout is None:
            options = replace(options, timeout=self._timeout)
        self._pendings.moved_on()
        begin = partial(self._exchange, "restore_latest", timeout)
        found = self._steps.candidates(begin, offline=offline, good=good)
        fallback = Fallback(found, begin, self._steps.using, good=good)
        try:
            step, damaged = fallback.restore(app_state, options, key)
        finally:
            self._report = found.close(fallback.report)
        self._steps.damaged = set(damaged)
        if step is not None:
            self._cadence.began(step)
            self._last.good = step
            self._measured.restore = time.monotonic() - began
            self._steps.restored(step)
            self._steps.export(step, leads=ranks_of(self._pg).rank == 0)
        return step

    @property
    def report(self) -> RestoreReport | None:
        """Report of the last `restore_latest` on this rank."""
        return self._report

    # Steps

    def steps(self) -> list[int]:
        """Return the committed steps that this process sees now, ascending."""
        return self._steps.numbers()

    def latest(self, verify: bool = False) -> int | None:
        """Return the newest committed step, or None if there is none.

        With `verify`, read every byte, and pass over (and log) snapshots that fail verification.
        """
        for step in reversed(self.steps()):
            if not verify:
                return step
            try:
                report = self._steps.snapshot(step).verify()
                fault = "" if report else str(report)
            except (CorruptSnapshotError, SnapshotNotFoundError) as error:
                fault = str(error)
            if not fault:
                return step
            log.warning("%s: passed over: verification failed: %s", self._steps.root.step_url(step), fault)
        return None

    def last_good(self) -> int | None:
        """Return the newest committed step that is not suspect, or None if there is none."""
        for step in reversed(self.steps()):
            with suppress(CorruptSnapshotError, SnapshotNotFoundError):  # damaged, or removed meanwhile
                if not self.suspect(step):
                    return step
        return None

    def suspect(self, step: int) -> tuple[str, ...]:
        """Return what the guards found in a suspect step. It is empty for all other steps."""
        return suspicions(self._steps.snapshot(checked_step(step)).metadata.metadata)

    def best(self, metric: str | None = None, mode: str = "min") -> int | None:
        """Return the best step by a metric, or by the first `KeepBest` of the policy.

        Return None if no step has the metric.
        """
        if metric is not None:
            policy = KeepBest(metric, 1, mode)
        else:
            found = [each for each in every_policy(self._keep) if isinstance(each, KeepBest)]
            if not found:
                raise ValueError(
                    "best: `keep` has no KeepBest; pass a metric, such as best('loss') or best('f1', 'max')"
                )
            policy = found[0]
        committed = run(self._steps.root.folders()).committed
        on = set(run(self._steps.root.on_line(committed)))
        heads = {step: head for step, head in run(self._steps.root.heads(committed)).items() if step in on}
        for step, head in heads.items():
            if not isinstance(head, ManifestHead):
                log.warning("%s: passed over: %s", self._steps.root.step_url(step), head)
        ranked = policy.ranked([taken_of(step, head) for step, head in heads.items() if isinstance(head, ManifestHead)])
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step."""
        return noted_metrics(self._steps.snapshot(checked_step(step)).metadata.metadata)

    def snapshot(self, step: int) -> Snapshot:
        """Return the snapshot of a step. The step need not exist."""
        number = checked_step(step)
        if not self._pendings.is_latest(number) and threading.current_thread().name != CLEANER:  # not in a policy
            self._pendings.moved_on()  # after a restore the state is that of this step
        return self._steps.snapshot(number)

    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is, for a manager with `near`, as far as the uploaders of the hosts answer.

        `near` is `whole`, `partial` or `absent`, over all hosts. `replicas` is the number of further hosts that have
        each near file. `far` is `whole`, `absent`, or the state of the upload: `uploading 41 %`, `queued`,
        `waiting` (for files of other hosts), `kept near`, `dropped`, `outdated` or `damaged`. It is `unknown` if no
        uploader tells of the step and the far root cannot be reached.
        """
        return self._steps.where(checked_step(step))

    def pin(self, step: int) -> None:
        """Keep a step regardless of policies, also in other and later processes, until `unpin`."""
        self._steps.pin(checked_step(step))

    def unpin(self, step: int) -> None:
        """Let the policy decide about a step again."""
        self._steps.unpin(checked_step(step))

    def pinned(self) -> list[int]:
        """Return the pinned steps, ascending."""
        return sorted(self._steps.pinned())

    # Decisions

    def should_take(self, step: int) -> bool:
        """Return True if `every` says that this step should be saved.

        All ranks must call this in every step, and all get the same result. No rank waits for another. If `every` is a
        time, all ranks save at the same step, soon after it has passed on rank 0's clock.
        """
        number = checked_step(step)
        self._measured.at_step(number)
        self._pendings.at_call()
        cadence = self._cadence
        if not cadence.given:
            raise ValueError("should_take: the manager was created without `every`")
        late = cadence.overdue(number, busy=self._pendings.busy())
        if late:
            root = self._steps.root.url
            emit("overdue", "take", str(root), step=number, text=late)
            log.warning("%s: %s", root, late)
        if cadence.steps is not None:
            return cadence.due_at(number)
        wish = number != cadence.last and cadence.due_now(busy=self._pendings.busy())
        return self._channels.ask("take", wish, leader_alone=True)

    def should_stop(self) -> bool:
        """Return True if a signal has asked any rank to stop. All ranks return True from the same call on.

        All ranks must call this once in every step. No rank waits for another, and most calls only count: the ranks
        look into the store of their group about every half second, or at each call if calls are further apart. A rank
        that calls this more often than the others stops earlier than they do.

        Raises:
            RankError: The store of the group cannot be reached.
        """
        self._measured.at_call()
        self._pendings.at_call()
        return self._ask_to_stop("stop")

    def poll(self) -> bool:
        """Return what `should_stop` does, in a loop that takes no steps, such as an evaluation.

        All ranks must call this equally often as well, between the same two steps. It counts no step, so the measured
        time of steps stays right. After it has returned True, `should_stop` does.
        """
        return self._ask_to_stop("poll")

    def _ask_to_stop(self, question: str) -> bool:
        if not self._stopping:
            told, ahead = self._deadline.told(), self._ahead()
            near = told is not None and told <= ahead
            self._stopping = self._channels.ask(question, self._signals.number is not None or near)
            if self._stopping:
                number = self._signals.number
                own = signal.Signals(number).name if number else "the deadline" if near else "another rank's signal"
                self._leads = ranks_of(self._pg).rank == 0
                if told is None or told > 2 * ahead:  # else perhaps nobody sent a signal, since a source tells the time
                    self._stopped = time.monotonic()
                left = self._left()
                emit("stopping", "should_stop", str(self._url), reason=own, left=left)
                rest = "" if left is None else f"; {duration_text(max(0.0, left))} are left"
                log.info("should_stop %s: stopping because of %s%s", self._url, own, rest)
        return self._stopping

    def _upload_seconds(self) -> float:
        """Return what an upload needs, as it was known some seconds ago: this is called in each step."""
        now = time.monotonic()
        if now >= self._ask_again:
            self._ask_again, self._upload = now + ASKED_AGAIN, self._steps.upload_seconds(0.0)
        return self._upload

    def _ahead(self) -> float:
        """Return the seconds before the time that a source tells in which the job stops."""
        return max(AHEAD, 2 * (self._measured.slowest() + self._upload_seconds())) if self._deadline.sources else AHEAD

    def _is_near(self) -> bool:
        """Return True if a source tells that the job will soon be killed."""
        told = self._deadline.told()
        return told is not None and told <= self._ahead()

    def advice(self, mtbf: Duration) -> Advice:
        """Return the interval between takes that loses least time, from the takes and steps of this rank so far.

        With `near`, the interval is that of near takes, and `upload_steps` that of uploads.

        `mtbf` is the mean time between failures: seconds, a `timedelta`, or a text such as `"12h"`.

        Raises SnapshotError if takes or steps were not measured yet.
        """
        return replace(self._measured.advice(mtbf), upload=self._steps.upload_seconds())

    # Close

    def close(self) -> None:
        """Wait for running takes, exports and removals, and restore the signal handlers. Failures are logged.

        Exports are not waited for if `should_stop` has returned True, or as soon as a signal to stop arrives, or the
        deadline is near. After such a signal, `should_stop` returns True.
        """
        self._close(patient=not self._stopping)

    def _close(self, *, patient: bool) -> None:
        if self._pid != os.getpid():
            return
        try:
            left = self._left() if self._stopping and self in open_managers else None
            if left is not None:
                running = self._pendings.settle(time.monotonic() + left - RESERVE)
                if running is not None:  # a rank may be dead, and this process may be killed while it waits
                    self._last.log(self._url, running)
            self._pendings.close()
            for each in self._steps.exporters:
                each.close(patient=lambda: patient and self._signals.number is None and not self._is_near())
            self._steps.close()
        finally:
            self._signals.close()
            self._deadline.close()
            if self._stopping and self in open_managers and (self._leads or self._last.failure):
                self._last.log(self._url, far=self._steps.flushed)
        open_managers.discard(self)

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and self._on_exception is not None:
                save_after(error, self._on_exception, self.take)
        finally:
            self._close(patient=error is None and not self._stopping)

    def _exchange(self, verb: str, timeout: float | None, left: float | None = None) -> Exchange:
        chosen = timeout if timeout is not None else self._timeout
        return Exchange(ranks_of(self._pg), verb, limited_by(left, chosen))

    def __repr__(self) -> str:
        return f"<SnapshotManager {self._url}: keep {self._keep or 'all'}>"


def _note_saved(taken: Snapshot | PendingSnapshot, begun: Begun, *, far: bool = True) -> None:
    """Say in the report of a take what was saved. `far`: False if a job that stops has not waited for its upload."""
    saved = begun.saved if far or begun.saved != "whole" else "near"
    if saved != "whole" and taken.report is not None:
        taken.report = replace(taken.report, saved=saved)


open_managers: weakref.WeakSet[SnapshotManager] = weakref.WeakSet()
"""Managers that the exit hook of the interpreter closes."""


def _close_all() -> None:
    for manager in list(open_managers):
        manager.close()


# before the event loop's own exit hook, since closing a manager needs the loop
before_exit(_close_all)
