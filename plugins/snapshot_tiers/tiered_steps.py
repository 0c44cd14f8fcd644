"""The steps of a run with near folders: all hosts' folders and the far root.

In the first collective call, the ranks join the job's hosts. A take is written near, or far if a host cannot use its
folder. A restore chooses from the steps on all tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from snapshot.decoding import decode_msgpack
from snapshot.distributed.exchange import OTHER_VERSION, Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import (
    RankError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.io.aio import gather_limited
from snapshot.io.loop import can_start_threads, run, start_in_thread
from snapshot.io.session import Seal
from snapshot.io.storage import FileStat
from snapshot.io.url import URL
from snapshot.manager.policies import Policy, RetentionPlan, Taken, checked_policy, needs_sizes, plan_retention
from snapshot.manager.restore_latest import Candidates
from snapshot.manager.retention import IN_USE, PINNED, Cleaner, Spared, choose_within, find_needed
from snapshot.manager.root import Root, StepFolders, taken_of, why_suspect
from snapshot.manager.steps import Begun, RunOptions, Steps, TakePlace
from snapshot.manifest.document import ManifestHead
from snapshot.reports import RestoreReport, TakeReport
from snapshot.runs.facts import is_buried
from snapshot.runs.timeline import NO_ORIGIN, Facts, Origin, Parent, RunLine, Standing, origin_of
from snapshot.save.findings import suspicions
from snapshot.save.take import AppState
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot_tiers.control import ANSWERS, ControlRequest, Status, StepStatus, UploadState
from snapshot_tiers.facts import limited
from snapshot_tiers.far_upload import FarStorage
from snapshot_tiers.join import FAR_PATIENCE, Keepers, join
from snapshot_tiers.join import JoinedAttempt as BegunAttempt
from snapshot_tiers.near import Near
from snapshot_tiers.near_steps import CensusStep, HostView, NearFolder, NearStep
from snapshot_tiers.peers import FAR, MOST_KEEPERS, NEAR, PEER, PeerPlace, StepSources, place_of
from snapshot_tiers.tier_set import TierSet
from snapshot_tiers.uploader_process import find_runs, leave_metrics

MOST_HELD = 4
"""Steps before the newest that wait for their replicas before older ones are removed."""
LAST_SECONDS = 1.0
"""Seconds that `close` waits for the uploader's answers after the grace."""
_STORAGE_ERRORS = {
    "StorageError",
    "BucketNotFoundError",
    "StorageNotFoundError",
    "StorageConflictError",
    "TransientError",
    "OSError",
}


class TieredSteps(Steps):
    """The steps in the near folders of a job's hosts, and in the far root."""

    near_cleaner: NearCleaner | None = None

    def __init__(self, near: Near, given: RunOptions) -> None:
        super().__init__(given)
        self.options = near.below(given.root.url, given.root.options)
        self._keep_near = checked_policy(near.keep)
        self._grace = near.grace
        self._survives, self._replicas = near.survives, near.replicas
        self._set: TierSet | None = None
        self._patience = FAR_PATIENCE
        """Seconds to wait for the far root in a take."""
        self._asking: Future[float] | None = None
        self._upload_seconds = 0.0
        """The mean duration of uploads, as the uploader told it last. One that hangs must not hold up the last save."""
        self._far_steps: set[int] | None = None
        """The far steps at the first take; known to the leader only."""

    def expect_expiry(self) -> None:
        super().expect_expiry()
        if self.near_cleaner is not None and ranks_of(self.pg).rank == 0:
            self.near_cleaner.far = self.cleaner

    # Join

    @property
    def joined(self) -> TierSet:
        """The tiers of this rank."""
        if self._set is None:
            raise SnapshotError("near: the ranks join in the first take or restore_latest; call one of them first")
        return self._set

    def _join(self, exchange: Exchange, *, needs_far: bool = False) -> None:
        """Join the job's hosts, in the first collective call.

        If the far root could not be read then, and nothing was taken since, join again. `needs_far`: raise StorageError
        if it cannot be read.
        """
        if self._set is not None and (self._set.member.attempt is not None or not self._set.member.far_fault):
            return
        if self._set is not None:
            self._set.close()
        self._patience = min(FAR_PATIENCE, exchange.timeout)
        member = join(exchange, self.options, self._patience, needs_far=needs_far)
        self._set = made = TierSet(self.options, member, self._patience)
        if not made.member.fault:
            leave_metrics(made.member.folder, exchange.rank)
        self.local = Root(URL("near", made.member.folder), None)
        far = self.cleaner if exchange.rank == 0 else None
        self.near_cleaner = NearCleaner(self.local, self._keep_near, self.is_spared, made, far)

    def _begin_attempt(self, exchange: Exchange) -> None:
        """Begin an attempt, unless there is one: the job has restored nothing, so it continues the line at its end."""
        tiers = self.joined
        if tiers.member.attempt is not None:
            return

        def parent_of(facts: Facts) -> Parent | None:
            return Parent(facts.last.name, None) if facts.last is not None else None

        def lead(_: list[bool]) -> BegunAttempt:
            while (begun := tiers.begin(parent_of, far=not tiers.member.far_fault)) is None:
                pass  # another job was faster, and this one has no takes yet
            return begun

        tiers.began(exchange.agree(True, lead, bool, BegunAttempt), {})

    # Take

    def prepare(
        self, exchange: Exchange, step: int, metadata: dict[str, Any], *, replaces: bool
    ) -> tuple[dict[str, Any], str]:
        """Join the hosts, begin an attempt, and look at the near folder. Give up uploads if it is full.

        Raise SnapshotExistsError if another attempt has taken the step on this host, unless the take replaces it.
        """
        self._leads = exchange.rank == 0
        self._join(exchange)
        self.joined.reopen()
        self._begin_attempt(exchange)
        return {**metadata, **self.joined.note(replaces=replaces)}, self._near_fault(step, replaces=replaces)

    def _near_fault(self, step: int, *, replaces: bool) -> str:
        tiers = self.joined
        if tiers.member.leads:
            tiers.look_for_later_attempt(step)
        if tiers.superseded is not None:
            raise tiers.superseded
        if not tiers.member.leads:  # its host's lowest rank looks
            return tiers.member.fault
        if not tiers.member.fault:
            tiers.remove_unusable(step)
            if not replaces:
                tiers.expect_own(step)
        fault = tiers.near_fault()
        while fault and tiers.is_full and self._make_room():
            fault = tiers.near_fault()
        return fault

    def _make_room(self) -> bool:
        """Remove old steps, then give up the oldest upload. Return False if that frees no space."""
        tiers, cleaner = self.joined, self.near_cleaner
        if cleaner is None:
            return False
        try:
            free, newest = tiers.free_bytes(), max(tiers.folder.steps(), default=-1)
            cleaner.clean_now(newest)
            if tiers.free_bytes() <= free and cleaner.make_room():
                cleaner.clean_now(newest)
            return tiers.free_bytes() > free
        except (SnapshotError, OSError) as error:
            log.warning("%s", error)
            return False

    def check(self, step: int, fault: str, *, new: bool) -> None:
        """Raise SnapshotExistsError for a new step that the far root has. Publish the attempt before a far take."""
        if new:
            self._expect_new(step)
        if fault:
            self.joined.publish_attempt()

    def _expect_new(self, step: int) -> None:
        """Raise SnapshotExistsError if the far root has had the step from the beginning."""
        if self._far_steps is None:
            try:
                self._far_steps = set(run(limited(self.root.folders(), self._patience)).committed)
            except StorageError as error:
                log.info("%s: its steps are unknown: %s", self.root.url, error)
                self._far_steps = set()
        if step not in self._far_steps:
            return
        found = run(limited(self.root.folders(), self._patience)).committed.get(step)
        if found is not None and not self._is_off(step, found):
            raise SnapshotExistsError(
                f"{self.root.step_url(step)}: a snapshot exists already; take another step, or pass overwrite=True"
            )

    def _is_off(self, step: int, found: FileStat) -> bool:
        """Return True if the far snapshot of a step, which was found there, is off the line of the run."""
        head = run(self.root.heads({step: found})).get(step)
        if not isinstance(head, ManifestHead):
            return False
        line = RunLine(self.joined.member.facts)
        return line.standing(step, head.save_id, origin_of(head.metadata)) == Standing.OFF

    def place_of(self, step: int, fault: str, verb: str) -> TakePlace:
        """Return the near folder, or the far root if a host cannot use its near folder. Each rank looks there."""
        if not fault:
            return TakePlace(self.joined.url_of(step), None, near=True)
        url = self.root.step_url(step)
        log.warning("step-%s: is written directly to %s: %s", step, self.options.far, fault)
        emit("degraded", verb, str(url), step=step, error=fault)
        replaces = False
        with suppress(StorageError):  # the take reports it
            found = run(limited(self.root.folders(), self._patience)).committed.get(step)
            replaces = found is not None and self._is_off(step, found)
        return TakePlace(url.reveal(), self.options.options, replaces=replaces)

    def take(self, begun: Begun, app_state: AppState) -> Snapshot:
        """Take a step near, or far. A storage error of a near take leads to one more try, far."""
        if not begun.place.near:
            return super().take(begun, app_state)
        try:
            snapshot = super().take(begun, app_state)
        except SnapshotError as error:
            if not self._can_degrade(error):
                raise
            with suppress(StorageError):  # it is raised on one rank, and the next take raises it on all
                self.joined.publish_attempt()
            far = replace(begun, place=self.place_of(begun.step, str(error), "take"))
            snapshot = super().take(far, app_state)
        self._took(snapshot)
        return snapshot

    def async_take(self, begun: Begun, app_state: AppState) -> PendingSnapshot:
        """Take a step near, or far, in the background. A pending near take can be waited for until it is far."""
        if not begun.place.near:
            return super().async_take(begun, app_state)
        pending = super().async_take(begun, app_state)
        pending.uploaded = partial(self.joined.wait_far, begun.step)
        self._took(pending)
        pending.work.add_done_callback(self._ended_near)
        return pending

    def _ended_near(self, work: Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._can_degrade(error)

    def _can_degrade(self, error: BaseException) -> bool:
        """Record a failed near take. Return True if a storage failed, on any rank, so that far may succeed."""
        self.joined.failed_near()
        return isinstance(error, StorageError) or (isinstance(error, RankError) and error.kind in _STORAGE_ERRORS)

    def _took(self, snapshot: Snapshot | PendingSnapshot) -> None:
        """Record the size of a take, for the space that the next one needs."""
        report = snapshot.report
        member = self.joined.member
        if report is not None:
            self.joined.last_bytes = report.written_bytes * len(member.hosts[member.index].ranks)

    def committed(self, begun: Begun, began: float, report: TakeReport | None) -> None:
        """Start the removal of near steps after a near take, each host its own. Else that of far steps."""
        if not begun.place.near:
            super().committed(begun, began, report)
        elif self.near_cleaner is not None and self.joined.member.leads:
            self.near_cleaner.committed(begun.step, began, report.base if report else "")

    def flush(self) -> None:
        """Wait until the newest good near step is far, then the newest, both at most for the grace.

        A suspect one alone would leave nothing to resume from if the host is lost. After a failure the uploader
        continues.
        """
        tiers = self._set
        if tiers is None or tiers.member.fault or not can_start_threads():  # then none was taken since the last time
            return
        line, end = tiers.member.line, min(time.monotonic() + self._grace, self.until)
        steps = list(tiers.folder.steps_of(tiers.member.run).values())
        on = (each for each in steps if line.standing(each.step, each.save_id, each.origin) == Standing.ON)
        good = [each for each in on if not each.suspect]
        last = [max(these, key=lambda each: line.age(each.origin)) for these in (good, steps) if these]
        self.flushed = True
        for each in last[-1:] if last[:1] == last[1:] else last:
            if tiers.is_older_than_restored(each):
                continue
            try:
                tiers.wait_far(each.step, each.save_id, max(0.0, end - time.monotonic()))
            except (SnapshotError, TimeoutError) as error:
                log.warning("%s; the uploader continues, if this host does", error)
                self.flushed = False

    # Restore

    def candidates(self, begin: Callable[[], Exchange], *, offline: bool, good: bool) -> Candidates:
        """Join the hosts, and return the steps on all tiers."""
        self._pendings.settle()  # they belong to the attempt that ends here
        with begin() as exchange:
            self._join(exchange, needs_far=not offline)
            patience = min(FAR_PATIENCE, exchange.timeout)
            exchange.close()
        return TieredCandidates(
            self, TieredRoot(self.root.url, self.options.options, self.joined, patience, offline=offline, good=good)
        )

    # Query

    def snapshot(self, step: int) -> Snapshot:
        """Return a step: from this host, if its folder has all files, or else from the far root."""
        folder, _, _ = self._near_view() or (None, "", None)
        near = folder.steps().get(step) if folder is not None else None
        if folder is not None and near is not None and folder.is_whole(near):
            url = Root(URL("near", folder.path), None).step_url(step)
            return Snapshot(url.reveal(), self.pg, allow_pickle=self.allow_pickle)
        return Snapshot(self.path(step), self.pg, self.root.options, allow_pickle=self.allow_pickle)

    def _near_view(self) -> tuple[NearFolder, str, RunLine] | None:
        """Return the near folder of this run on this host, the run and its line.

        Before the ranks join, this is the run that the host used last, as its copy of the facts describes it.
        """
        if self._set is not None:
            return self._set.folder, self._set.member.run, self._set.member.line
        try:
            found = find_runs(self.options.near, str(self.options.far))
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: the near steps are left out: %s", self.options.near, error)
            return None
        if not found:
            return None
        path, copy = max(found.items(), key=lambda item: item[1].used)
        return NearFolder(path), copy.run, RunLine(copy.facts, copy.facts.last)

    def _near_steps(self) -> set[int]:
        """Return the near steps on the line of this run, as this host sees them."""
        view = self._near_view()
        if view is None:
            return set()
        folder, run_name, line = view
        steps = folder.steps_of(run_name).items()
        return {step for step, each in steps if line.standing(step, each.save_id, each.origin) == Standing.ON}

    def numbers(self) -> list[int]:
        """Return the near steps of this host, and those in the far root if that can be read."""
        near = self._near_steps()
        try:
            return sorted(near.union(super().numbers()))
        except StorageError as error:
            if not near:
                raise
            log.warning("%s: cannot be reached, so these are the near steps: %s", self.root.url, error)
            return sorted(near)

    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is: near, on how many further hosts, and far."""
        return self.joined.where(step)

    def pin(self, step: int) -> None:
        """Keep a step near and far. The uploader pins a near step that is not far yet."""
        near = step in self._near_steps()
        if near:
            run(self.local.pin(step))
        try:
            super().pin(step)
        except SnapshotNotFoundError:
            if not near:
                raise

    def unpin(self, step: int) -> None:
        """Remove the pin of a step, near and far."""
        if self._set is not None:
            run(self.local.unpin(step))
        super().unpin(step)

    def pinned(self) -> set[int]:
        near = run(self.local.pinned(self._near_steps())) if self._set is not None else set[int]()
        return near | super().pinned()

    def outlives_host(self) -> bool:
        """Return True if other hosts have copies of near steps, or the folder is declared to outlive the job."""
        tiers = self._set
        peers = tiers is not None and not tiers.member.fault and len(tiers.member.hosts) > 1 and self._replicas > 0
        return self._survives or peers

    def upload_seconds(self, patience: float | None = None) -> float:
        """Return the mean duration of the uploads of near steps, 0 if there was none."""
        tiers = self._set
        if tiers is None or tiers.member.fault:
            return 0.0
        if patience is None:
            return self._ask_upload_seconds(tiers)
        if self._asking is None or self._asking.done():
            self._asking = start_in_thread(partial(self._ask_upload_seconds, tiers), "snapshot-upload-pace")
        with suppress(SnapshotError, TimeoutError):
            self._asking.result(patience)
        return self._upload_seconds

    def _ask_upload_seconds(self, tiers: TierSet) -> float:
        states = tiers.ask(ControlRequest("status")).steps.values()
        found = [each.seconds for each in states if each.far == UploadState.WHOLE]
        self._upload_seconds = sum(found) / len(found) if found else self._upload_seconds
        return self._upload_seconds

    def close(self) -> None:
        """Flush, remove old steps, and leave the uploader alone."""
        if self._set is not None:
            self._set.link.limit(min(self._grace + LAST_SECONDS, self.until - time.monotonic()))
            self.flush()
            if self.near_cleaner is not None:
                newest = max(self._set.folder.steps(), default=-1)
                if newest >= 0 and self._set.member.leads:
                    self.near_cleaner.look_again(newest)
                self.near_cleaner.close()
            self._set.close()
        super().close()


STALLS = 300.0
"""Seconds without any progress after which uploads are reported as stalled."""


class UploadWatch:
    """Notices uploads that do not advance."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        """The most bytes that each waiting step had sent. An upload that begins again and again does not advance."""
        self._since = 0.0

    def look(self, states: Mapping[int, StepStatus], now: float) -> list[int]:
        """Return the waiting steps if none has advanced for a while, and again after as long a while."""
        waiting = {step: each.sent for step, each in states.items() if each.far.is_open or each.far.is_stuck}
        arrived = any(states[step].far == UploadState.WHOLE for step in self._sent.keys() & states.keys())
        advanced = arrived or any(sent > self._sent[step] for step, sent in waiting.items() if step in self._sent)
        if advanced or not self._sent:
            self._since = now
        self._sent = {step: max(sent, self._sent.get(step, 0)) for step, sent in waiting.items()}
        if not waiting or now - self._since < STALLS:
            return []
        self._since = now
        return sorted(waiting)


class NearCleaner(Cleaner):
    """Background removal of the near steps that a policy does not keep, and that are not wanted far.

    `far`: the cleaner of the far root, on the rank that has it. It removes far steps once newer ones were uploaded.
    """

    def __init__(self, root: Root, policy: Policy | None, spared: Spared, tiers: TierSet, far: Cleaner | None) -> None:
        super().__init__(root, policy, spared, set)
        self._tiers = tiers
        self.far = far
        self._uploaded: set[int] = set()
        self._watch = UploadWatch()

    def _clean(self, upto: int) -> None:
        tiers = self._tiers
        if not tiers.member.fault and tiers.member.leads:
            self._clean_near(upto, self._ask_status())
        if self.far is None or tiers.member.fault:
            return
        states = tiers.ask(ControlRequest("status"), ANSWERS).steps
        for step in sorted(
            step for step, each in states.items() if each.far == UploadState.WHOLE and step not in self._uploaded
        ):
            self._uploaded.add(step)
            self.far.committed(step, time.monotonic())

    def _ask_status(self) -> Status:
        """Return the states of this host's steps. Report uploads that do not advance."""
        tiers = self._tiers
        status = tiers.ask(ControlRequest("status"), ANSWERS)  # `close` waits for this
        stalled = self._watch.look(status.steps, time.monotonic())
        if stalled:
            root, why = tiers.options.far, f": {status.error}" if status.error else ""
            emit("stalled", "upload", str(root), steps=stalled, error=status.error)
            names = ", ".join(f"step-{step}" for step in stalled)
            log.warning("%s: the uploads of %s have not advanced for %d s%s", root, names, STALLS, why)
        return status

    def _clean_near(self, upto: int, status: Status) -> None:
        """Remove near steps before `upto`, which was just committed, that are neither kept nor wanted far."""
        tiers, folder = self._tiers, self._tiers.folder
        tiers.look_for_later_attempt(upto)
        if tiers.superseded:
            return
        line, near = tiers.member.line, {}
        for step, each in folder.steps_of(tiers.member.run).items():
            standing = line.standing(step, each.save_id, each.origin)
            if standing == Standing.ON:
                near[step] = each
            elif standing == Standing.OFF and each.suspect and step < upto:
                folder.remove(step, each.save_id)
        kept = self._plan([each for step, each in near.items() if step <= upto]).kept
        safe = len(tiers.member.hosts) == 1 or not tiers.options.replicas
        newest = max((step for step, each in status.steps.items() if safe or each.replicated), default=-1)
        if len(near) > len(kept) + MOST_HELD:  # a partner that is lost must not fill the folder
            newest = max(near, default=-1)
        end = min(upto, newest)

        def why_held(step: int) -> str:
            state = status.steps.get(step)
            if step >= end:
                return "newer than the step that replaces it"
            if state is None or state.far.is_open or state.far.is_stuck or state.far == UploadState.DAMAGED:
                return "wanted far"
            if self._is_spared(step, near[step].save_id):
                return IN_USE
            return PINNED if folder.is_pinned(step) else ""

        for step in self._plan(near.values(), upto, held={step: why_held(step) for step in near}).removed:
            if not self._is_spared(step, near[step].save_id) and not folder.is_pinned(step):  # meanwhile
                folder.remove(step, near[step].save_id)
        folder.remove_leftovers(upto, self._is_spared)
        damaged = [step for step in folder.damaged() if step < end and not self._is_spared(step)]
        if damaged:
            for step in set(damaged).intersection(self._plan(near.values(), damaged=damaged).removed):
                folder.remove_damaged(step, "the policy does not keep it")

    def _plan(
        self,
        steps: Collection[NearStep],
        upto: int | None = None,
        *,
        damaged: Collection[int] = (),
        held: Mapping[int, str] | None = None,
    ) -> RetentionPlan:
        """Decide about near steps. The policy counts those up to a step. By default, only steps in use are held.

        Other hosts may have the manifest of a damaged step, so the policy decides about it, too.
        """
        heads = {each.step: each.head for each in steps}
        taken = [taken_of(step, head) for step, head in heads.items() if upto is None or step <= upto]
        where = self._tiers.folder.path if held is not None else ""  # else it is not the last word
        if held is None:
            held = {step: IN_USE for step, head in heads.items() if self._is_spared(step, head.save_id)}

        def needed(removed: list[int]) -> dict[int, str]:
            leaving = [step for step in removed if step in heads]
            return find_needed(heads, heads.keys() - leaving, leaving)

        now = time.time()  # a lifetime keeps a step far: a near folder may be small
        taken = [replace(each, expires=None) if (each.expires or 0) > now else each for each in taken]
        taken += map(Taken, damaged)
        sizes: dict[int, dict[str, int]] = {}
        if needs_sizes(self._policy):
            sizes = {each.step: self._tiers.folder.physical_sizes(each) for each in steps}
            taken = [replace(each, sizes=sizes.get(each.step, {}), pinned=bool(held.get(each.step))) for each in taken]
            later = sizes.keys() - {each.step for each in taken}
            taken += [Taken(step, sizes=sizes[step], pinned=True, counts=False) for step in later]
        chosen = choose_within(where, self._policy, taken, now, sizes=sizes, find_needed=needed)
        return plan_retention(chosen, {*heads, *damaged}, held=held, find_needed=needed)

    def make_room(self) -> bool:
        """Give up the upload of the oldest step that waits for one, if the policy then lets the step go."""
        tiers = self._tiers
        status = tiers.ask(ControlRequest("status"), ANSWERS)
        kept = self._plan(tiers.folder.steps().values()).kept
        waiting = sorted(step for step, each in status.steps.items() if each.far.is_open)
        waiting = [step for step in waiting if step not in kept and step != max(status.steps)]
        if not waiting:
            return False
        log.warning("step-%s: its upload is given up, since %s is full", waiting[0], tiers.folder.path)
        tiers.ask(ControlRequest("drop", step=waiting[0]), ANSWERS)
        return True


class Ended(msgspec.Struct, array_like=True):
    """The end of a restore, as the leader tells all ranks."""

    begun: BegunAttempt
    manifests: dict[int, Keepers]
    """The hosts that have the manifest of each near step."""


class TieredCandidates(Candidates):
    """The steps on all tiers, as a restore chooses from them."""

    signable = False

    def __init__(self, steps: TieredSteps, root: TieredRoot) -> None:
        super().__init__(root, steps.snapshot, lambda step: None)
        self._steps = steps
        self._tiers = steps.joined
        self._all = root
        self._sources: StepSources | None = None
        """The places that the step was read from, which was restored last on this rank."""
        self._step = -1

    def view(self) -> bytes:
        """Return what this host has: only the lowest rank of a host looks."""
        return msgspec.msgpack.encode(self._tiers.view()) if self._tiers.member.leads else b""

    def see(self, views: Sequence[bytes]) -> None:
        """Read the facts, and take the census. Later rounds have no views."""
        if any(views):
            self._all.views = [
                decode_msgpack(view, HostView, OTHER_VERSION) if view else HostView("") for view in views
            ]
            self._all.read_facts()

    def place(self, step: int) -> bytes:
        """Return where the files of a near step are."""
        found = self._all.census.get(step)
        return b"" if found is None else msgspec.msgpack.encode(place_of(found, far=self._all.far_answers))

    def expect_all_known(self) -> None:
        """Raise StorageError if the far root was not read: it may have the files that no host has."""
        if not self._all.far_answers:
            census = self._all.census
            some = f"a whole one of the steps {', '.join(map(str, census))}" if census else "a near step"
            raise StorageError(f"{self.root.url}: cannot be read, and no host has {some}; try again later")

    def snapshot(self, step: int, place: bytes) -> Snapshot:
        """Return a step, from the nearest places of its files."""
        steps = self._steps
        self._release()
        if not place:
            return Snapshot(
                self.root.step_url(step).reveal(), steps.pg, self.root.options, allow_pickle=steps.allow_pickle
            )
        where = decode_msgpack(place, PeerPlace, OTHER_VERSION)
        self._sources, self._step = self._tiers.sources(step, where), step
        options = {"sources": self._sources}
        return Snapshot(self._tiers.url_of(step), steps.pg, options, allow_pickle=steps.allow_pickle)

    def end(self, step: int) -> bytes | None:
        """Begin the attempt that continues with a step. None if the line has changed: the steps are chosen again."""

        def parent_of(facts: Facts) -> Parent | None:
            origin, save_id = self._all.origins.get(step, (NO_ORIGIN, ""))
            if facts.find(origin.attempt) is not None:
                return Parent(origin.attempt, step, save_id)
            return Parent(facts.last.name, step) if facts.last is not None else None

        begun = self._tiers.begin(parent_of, far=self._all.far_answers)
        if begun is None:
            self._all.read_facts()
            return None
        census = self._all.census.items()
        manifests = {step: (each.save_id, sorted(each.keepers)[:MOST_KEEPERS]) for step, each in census}
        return msgspec.msgpack.encode(Ended(begun, manifests))

    def ended(self, step: int, end: bytes) -> None:
        """Go on with the attempt that the leader has begun."""
        told: Ended = decode_msgpack(end, Ended, OTHER_VERSION)
        self._tiers.began(told.begun, told.manifests)

    def close(self, report: RestoreReport | None) -> RestoreReport | None:
        """Add the bytes of each tier to a report, and close the places."""
        if report is not None:
            counts = {NEAR: 0, PEER: 0, FAR: report.bytes_read} if self._sources is None else self._sources.counts
            report = replace(report, sources=counts)
        self._release()
        return report

    def _release(self) -> None:
        """Close the places of a step, and replace its damaged near files."""
        sources, self._sources = self._sources, None
        if sources is not None:
            sources.close()
            try:
                self._tiers.heal(self._step, sorted(sources.damaged))
            except SnapshotError as error:
                log.warning("step-%s: is not healed: %s", self._step, error)


class TieredRoot(Root):
    """The far root and the near folders of all hosts, as one root."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any] | None,
        tiers: TierSet,
        patience: float,
        *,
        offline: bool,
        good: bool,
    ) -> None:
        """Prepare it.

        `patience`: seconds to wait for the far root. `offline`: go on without it, if it cannot be read. `good`: of two
        snapshots of a step, one that is not suspect is chosen first.
        """
        super().__init__(url, options)
        self._tiers = tiers
        self._patience = patience
        self._offline = offline
        self._good = good
        self.views: list[HostView] = []
        """The steps of each rank's host."""
        self.census: dict[int, CensusStep] = {}
        """The near steps on the line."""
        self.far_answers = True
        self._of_run = tiers.member.line
        self.origins: dict[int, tuple[Origin, str]] = {}
        """The origin and the save id of each candidate."""

    def read_facts(self) -> None:
        """Read the facts of the far root, and find the near steps on the line.

        Raises:
            StorageError: The far root cannot be read, and the restore is not `offline`: it may have a newer line.
        """
        stepped = {each.origin[2] for view in self.views for each in view.steps if each.save_id}
        try:
            self._tiers.read_far(stepped, self._patience)
            self.far_answers = True
        except StorageError as error:
            if not self._offline:
                error.add_note("restore_latest(..., offline=True) restores the newest near step that is known")
                raise
            log.warning("%s: cannot be reached, so only near steps are considered: %s", self.url, error)
            self._tiers.member.facts = self._tiers.member.facts.without_vain(stepped)
            self._tiers.member.facts.expect_no_fork()
            self.far_answers = False
        facts = self._tiers.member.facts
        self._of_run = RunLine(facts, facts.last)
        self.census = self._tiers.census(self.views, self._of_run, good=self._good)

    async def newest(self, before: int | None) -> StepFolders:
        """Return all steps at once: near and far ones are compared with each other."""
        return await self.folders() if before is None else StepFolders()

    async def folders(self) -> StepFolders:
        """Return the steps of the far root and the near ones: of each step the newer snapshot."""
        folders = StepFolders()
        if self.far_answers:
            try:
                folders = await limited(super().folders(), self._patience)
                await self._leave_out_removed(folders)
            except StorageError as error:
                if not self._offline:
                    raise
                log.warning("%s: cannot be reached, so only near steps are considered: %s", self.url, error)
                folders, self.far_answers = StepFolders(), False
        for step, found in list(self.census.items()):
            far = folders.committed.get(step)
            head = await self._head(step, far) if far is not None else None
            if isinstance(head, ManifestHead) and head.save_id != found.save_id and not self._is_before(found, head):
                del self.census[step]
            else:
                folders.committed[step] = FileStat(0, 0.0, f"near:{found.save_id}")
        folders.committed = dict(sorted(folders.committed.items()))
        return folders

    def _is_before(self, near: CensusStep, far: ManifestHead) -> bool:
        """Return True if the near snapshot of a step is chosen, and not the other one in the far root."""
        origin = origin_of(far.metadata)
        on = self._of_run.standing(near.step, far.save_id, origin) == Standing.ON
        if on and self._good and bool(near.suspect) != bool(suspicions(far.metadata)):
            return not near.suspect
        return self._of_run.is_newer(near.step, (near.save_id, near.origin), (far.save_id, origin))

    async def line(self) -> RunLine:
        """Return the line that this restore follows."""
        return self._of_run

    async def counts(self, step: int, stat: FileStat) -> bool:
        """Return True if a step is on the line of the run."""
        found = self.census.get(step)
        if found is not None:
            self.origins[step] = found.origin, found.save_id
            return True
        head = await self._head(step, stat)
        if not isinstance(head, ManifestHead):
            return True  # damage is reported by the attempt to restore it
        self.origins[step] = origin_of(head.metadata), head.save_id
        return self._of_run.counts(step, head.save_id, origin_of(head.metadata))

    async def _leave_out_removed(self, folders: StepFolders) -> None:
        """Leave out near steps that were removed from the far root on purpose."""
        async with self.opened() as session:
            for step, found in list(self.census.items()):
                with suppress(StorageError):  # a root that cannot be read says nothing
                    if step not in folders.committed and await is_buried(session.storage, found.save_id):
                        log.info("step-%s: passed over: it was removed from %s", step, self.url)
                        del self.census[step]

    async def fault(self, step: int, seal: Seal | None = None, *, good: bool = False) -> str | None:
        """Return why a step cannot be restored: for a near one, the files that no host has, nor the far root."""
        found = self.census.get(step)
        if found is None:
            return await super().fault(step, seal, good=good)
        if good and found.suspect:
            return why_suspect(found.suspect)
        missing = found.missing
        if not missing:
            return None
        left = sorted(missing) if not self.far_answers else await self._not_far(step, found, missing)
        far = "nor uploaded" if self.far_answers else f"and {self.url} cannot be read"
        return f"{', '.join(left[:3])}: on no host, {far} ({len(left)} files)" if left else None

    async def _not_far(self, step: int, found: CensusStep, names: Sequence[str]) -> list[str]:
        async with self.opened(step) as session:
            far = FarStorage(session.storage)

            async def good(name: str) -> bool:
                try:
                    return (await far.stat(name)).size == found.sizes[name]
                except StorageNotFoundError:
                    return False

            answers = await gather_limited(names, good)
        return [name for name, is_good in zip(names, answers, strict=True) if not is_good]

    async def token(self, step: int) -> str | None:
        found = self.census.get(step)
        return await super().token(step) if found is None else f"near:{found.save_id}"

    async def copies(self, step: int, seal: Seal | None = None) -> set[str]:
        """Return the physical files of a far step; near ones have replicas and the far root."""
        return set() if step in self.census else await super().copies(step, seal)

    async def is_replaceable(self, step: int) -> bool:
        """Return True if a step that cannot be restored may be replaced.

        A near step may not if the far root was not read: it may be whole with its files, and the run may continue it.
        """
        return self.far_answers if step in self.census else await super().is_replaceable(step)
