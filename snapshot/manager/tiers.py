"""The tiers of a manager: the join in its first collective call, and the place of each take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RankError, SnapshotError, SnapshotExistsError, StorageError
from snapshot.events import emit, log
from snapshot.io.loop import run
from snapshot.io.storage import FileStat
from snapshot.io.url import URL
from snapshot.manager.near_cleaner import NearCleaner
from snapshot.manager.policies import Policy
from snapshot.manager.retention import Cleaner
from snapshot.manager.root import Root
from snapshot.manager.tiered_root import TieredRoot
from snapshot.manifest.document import ManifestHead
from snapshot.save.take_options import BaseArgument, TakeOptions, TakeRequest
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.tiers.control import Request
from snapshot.tiers.facts import limited
from snapshot.tiers.join import FAR_PATIENCE, TierOptions, join
from snapshot.tiers.join import Begun as BegunAttempt
from snapshot.tiers.metrics_server import leave_metrics
from snapshot.tiers.tier_set import TierSet
from snapshot.tiers.timeline import Facts, Line, Parent, Standing, origin_of
from snapshot.tiers.upload_queue import UploadState

LAST_SECONDS = 1.0
"""Seconds that `close` waits for the uploader's answers after the grace."""


class TakePlace(NamedTuple):
    """The place of a take."""

    path: str
    options: Mapping[str, Any] | None
    near: bool


@dataclass(frozen=True)
class Begun:
    """A take that all ranks have agreed on."""

    step: int
    place: TakePlace
    pending: PendingSnapshot | None
    """The asynchronous take that saved this state already."""
    options: TakeOptions
    metadata: Mapping[str, Any]
    overwrite: bool
    base: BaseArgument
    timeout: float | None

    def request(self) -> TakeRequest:
        """Return the options of this take; raise for wrong ones."""
        return self.options.at(
            self.place.options,
            overwrite=self.overwrite,
            metadata=self.metadata,
            base=self.base,
            timeout=self.timeout,
        )


class ManagerTiers:
    """The work of a manager with its near folder, its partners and the far root."""

    def __init__(
        self, options: TierOptions, keep: Policy | None, grace: float, far: Root, spared: Callable[[int], bool]
    ) -> None:
        self.options = options
        self.grace = grace
        self._keep = keep
        self._far = far
        self._spared = spared
        self._set: TierSet | None = None
        self._cleaner: NearCleaner | None = None
        self._patience = FAR_PATIENCE
        """Seconds to wait for the far root in a take."""
        self._far_steps: set[int] | None = None
        """The far steps at the first take; known to the leader only."""

    # Join

    @property
    def joined(self) -> TierSet:
        """The tiers of this rank."""
        if self._set is None:
            raise SnapshotError("near: the ranks join in the first take or restore_latest; call one of them first")
        return self._set

    def is_joined(self) -> bool:
        """Return True if the ranks have joined."""
        return self._set is not None

    def join(self, exchange: Exchange, cleaner: Cleaner | None, *, needs_far: bool = False) -> None:
        """Join the job's hosts, in the first collective call. `cleaner` removes far steps.

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
        near = Root(URL("near", made.member.folder), None)
        far = cleaner if exchange.rank == 0 else None
        self._cleaner = NearCleaner(near, self._keep, self._spared, made, far)
        self.near = near

    near: Root
    """The near steps of this host, after the ranks have joined."""

    def begin_attempt(self, exchange: Exchange) -> None:
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

    def root(self, patience: float, *, offline: bool) -> TieredRoot:
        """Return the steps on all tiers."""
        return TieredRoot(self.options.far, self.options.options, self.joined, patience, offline=offline)

    # Take

    def near_fault(self, step: int, *, replaces: bool) -> str:
        """Return why a take cannot be written near, or ''. Give up uploads if the folder is full.

        Raise SnapshotExistsError if another attempt has taken the step on this host, unless the take replaces it.
        """
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
        tiers, cleaner = self.joined, self._cleaner
        if cleaner is None:
            return False
        try:
            free, newest = tiers.free_bytes(), max(tiers.folder.steps(), default=-1)
            cleaner.clean_now(newest)
            if tiers.free_bytes() <= free and tiers.make_room(cleaner.kept):
                cleaner.clean_now(newest)
            return tiers.free_bytes() > free
        except (SnapshotError, OSError) as error:
            log.warning("%s", error)
            return False

    def expect_new(self, step: int) -> None:
        """Raise SnapshotExistsError if the far root has had the step from the beginning. Called on the leader."""
        if self._far_steps is None:
            try:
                self._far_steps = set(run(limited(self._far.folders(), self._patience)).committed)
            except StorageError as error:
                log.info("%s: its steps are unknown: %s", self._far.url, error)
                self._far_steps = set()
        if step not in self._far_steps:
            return
        found = run(limited(self._far.folders(), self._patience)).committed.get(step)
        if found is not None and not self._is_off(step, found):
            raise SnapshotExistsError(
                f"{self._far.step_url(step)}: a snapshot exists already; take another step, or pass overwrite=True"
            )

    def _is_off(self, step: int, found: FileStat) -> bool:
        """Return True if the far snapshot of a step, which was found there, is off the line of the run."""
        head = run(self._far.heads({step: found})).get(step)
        if not isinstance(head, ManifestHead):
            return False
        line = Line(self.joined.member.facts)
        return line.standing(step, head.save_id, origin_of(head.metadata)) == Standing.OFF

    def may_replace(self, step: int, place: TakePlace) -> bool:
        """Return True if a take that is written far replaces a snapshot that is off the line. Each rank looks."""
        if place.near:
            return False
        try:
            found = run(limited(self._far.folders(), self._patience)).committed.get(step)
            return found is not None and self._is_off(step, found)
        except StorageError:  # the take reports it
            return False

    def place_of(self, step: int, fault: str, verb: str) -> TakePlace:
        """Return where to write a take: near, or far if a host cannot use its near folder."""
        if not fault:
            return TakePlace(self.joined.url_of(step), None, near=True)
        log.warning("step-%s: is written directly to %s: %s", step, self.options.far, fault)
        emit("degraded", verb, str(self._far.step_url(step)), step=step, error=fault)
        return TakePlace(self._far.step_url(step).reveal(), self.options.options, near=False)

    def can_degrade(self, error: BaseException) -> bool:
        """Record a failed near take. Return True if a storage failed, on any rank, so that far may succeed."""
        self.joined.failed_near()
        return isinstance(error, StorageError) or (isinstance(error, RankError) and error.kind in _STORAGE_ERRORS)

    def took(self, snapshot: Snapshot | PendingSnapshot) -> None:
        """Record the size of a take, for the space that the next one needs."""
        report = snapshot.report
        member = self.joined.member
        if report is not None:
            self.joined.last_bytes = report.written_bytes * len(member.hosts[member.index].ranks)

    def committed(self, step: int, began: float, base: str) -> None:
        """Start the removal of near steps after a commit. Called on the loop, so nothing here may block."""
        if self._cleaner is not None and self.joined.member.leads:
            self._cleaner.committed(step, began, base)

    def attach(self, step: int, pending: PendingSnapshot) -> None:
        """Let a pending take wait for the upload."""
        pending.wait_far = lambda timeout: self.joined.wait_far(step, pending.save_id, timeout)

    # Near steps of this host

    def near_steps(self) -> set[int]:
        """Return the near steps on the line of this run, as this host sees them."""
        if self._set is None:
            return set()
        line = self._set.member.line
        steps = self._set.folder.steps_of(self._set.member.run).items()
        return {step for step, each in steps if line.standing(step, each.save_id, each.origin) == Standing.ON}

    def is_whole_here(self, step: int) -> bool:
        """Return True if this host has all files of a near step."""
        if self._set is None:
            return False
        found = self._set.folder.steps().get(step)
        files = self._set.folder.files(step)
        return found is not None and all(files.get(name) == size for name, size in found.head.sizes().items())

    def pin(self, step: int) -> bool:
        """Pin a near step. Return False if this host does not have it."""
        if step not in self.near_steps():
            return False
        run(self.near.pin(step))
        return True

    def unpin(self, step: int) -> None:
        """Remove the pin of a near step."""
        if self._set is not None:
            run(self.near.unpin(step))

    def pinned(self) -> set[int]:
        """Return the near steps that are pinned."""
        return run(self.near.pinned(self.near_steps())) if self._set is not None else set()

    # Far

    def flush(self) -> None:
        """Wait until the newest near step is far, at most for the grace. After a failure the uploader continues."""
        if self._set is None or self._set.member.fault:
            return
        line = self._set.member.line
        steps = self._set.folder.steps_of(self._set.member.run).values()
        if not steps:
            return
        newest = max(steps, key=lambda each: line.age(each.origin))
        if self._set.is_older_than_restored(newest):
            return
        try:
            self._set.wait_far(newest.step, newest.save_id, self.grace)
        except (SnapshotError, TimeoutError) as error:
            log.warning("%s; the uploader continues, if this host does", error)

    def upload_seconds(self) -> float:
        """Return the mean duration of the uploads of near steps, 0 if there was none."""
        if self._set is None or self._set.member.fault:
            return 0.0
        found = [
            each.seconds for each in self._set.ask(Request("status")).steps.values() if each.far == UploadState.WHOLE
        ]
        return sum(found) / len(found) if found else 0.0

    def close(self) -> None:
        """Flush, remove old steps, and leave the uploader alone."""
        if self._set is None:
            return
        self._set.link.limit(self.grace + LAST_SECONDS)
        self.flush()
        if self._cleaner is not None:
            newest = max(self._set.folder.steps(), default=-1)
            if newest >= 0 and self._set.member.leads:
                self._cleaner.look_again(newest)
            self._cleaner.close()
        self._set.close()


_STORAGE_ERRORS = {
    "StorageError",
    "BucketNotFoundError",
    "StorageNotFoundError",
    "StorageConflictError",
    "TransientError",
    "OSError",
}
