"""The steps of a job in the far root: where they are, and waiting for their upload within the time of the caller."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapshot.errors import (
    RunDeletedError,
    RunForkedError,
    SnapshotError,
    SnapshotExistsError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.loop import can_start_threads, run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, decode_head
from snapshot.runs.facts import read_facts
from snapshot.runs.timeline import Facts, FactsCopy, Origin, Parent, RunLine, Standing, forked_error, note_of
from snapshot.save.transaction import committed_save_id
from snapshot_tiers.control import (
    ANSWERS,
    STARTS,
    ControlClient,
    ControlRequest,
    Status,
    StepStatus,
    UploaderError,
    UploaderLink,
    UploadState,
    decode_status,
    far_text,
    job_address,
)
from snapshot_tiers.facts import limited, publish_if_writable, read_copy, store_copy
from snapshot_tiers.join import (
    JoinedAttempt,
    Keepers,
    Membership,
    TierOptions,
    begin_attempt,
    fetch_manifests,
    read_manifest,
)
from snapshot_tiers.near_steps import CensusStep, HostView, NearFolder, NearStep, take_census, view_of
from snapshot_tiers.peers import PeerPlace, StepSources, heal_step
from snapshot_tiers.requests import STATUS
from snapshot_tiers.uploader_process import ensure_uploader

FAULTS = {
    UploadState.OUTDATED: "is not uploaded",
    UploadState.DAMAGED: "is damaged",
    UploadState.DROPPED: "is not uploaded",
    UploadState.UNDECIDED: "is not uploaded",
    UploadState.FORKED: "is not uploaded",
    UploadState.DELETED: "is not uploaded",
}
APPEARS = 10.0
"""Seconds that the manifest of a committed take may need to appear on a host."""


class FarError(SnapshotError):
    """A step cannot reach the far root."""


_ERRORS = {UploadState.FORKED: RunForkedError, UploadState.DELETED: RunDeletedError}


SPARE = 1.05
"""Free space that a near take needs, as a multiple of the last take's bytes."""


class TierSet:
    """The tiers, after the ranks have joined."""

    def __init__(self, options: TierOptions, member: Membership, patience: float) -> None:
        self.options = options
        self.patience = patience
        """Seconds to wait for the far root."""
        self.member = member
        self.folder = NearFolder(member.folder)
        self.link = self._open_link()
        self._order = 0
        self._probing = False
        """True if the last near take failed, so that the next one tries the folder first."""
        self.is_full = False
        self.superseded: SnapshotError | None = None
        """Why this job must not go on: another one has continued the run."""
        self.last_bytes = 0
        """Bytes of this host's share of the last take."""

    # Uploader

    def _open_link(self) -> UploaderLink:
        link = UploaderLink(self.member.folder, self._connect, lambda: self.member.registration(self.options))
        if not self.member.fault and can_start_threads():
            link.register()
            if self.member.leads:
                link.watch()
        return link

    def reopen(self) -> None:
        """Report to the uploader that this trainer continues after `close`, as in a handler at the exit."""
        if self.link.is_closed:
            self.link = self._open_link()

    def ask(self, request: ControlRequest, seconds: float = STARTS) -> Status:
        """Send a request to this host's uploader. If it died, start it again."""
        return self.link.ask(request, seconds)

    def _connect(self, seconds: float) -> ControlClient:
        member = self.member
        known = member.hosts[member.index].address.rpartition(":")[0]  # also if the network is down now
        address = (known or job_address()) if len(member.hosts) > 1 else None
        client, member.hosts[member.index].address = ensure_uploader(member.folder, address, seconds)
        return client

    # Takes

    def url_of(self, step: int) -> str:
        return URL("near", self.folder.step_path(step)).reveal()

    def note(self, *, replaces: bool) -> dict[str, Any]:
        """Return the metadata of the next take: its run, its attempt, and its number in it."""
        attempt = self.member.attempt
        assert attempt is not None, "a take begins an attempt"
        self._order += 1
        return note_of(attempt, self._order, replaces=replaces)

    def free_bytes(self) -> int:
        """Return the free space of the near folder."""
        return shutil.disk_usage(self.member.folder).free

    def near_fault(self) -> str:
        """Return why the next take cannot be written near, or ''. `is_full` tells if that is for lack of space."""
        self.is_full = False
        if self.member.fault:
            return self.member.fault
        if not can_start_threads():
            return f"{self.member.folder}: the interpreter exits, and cannot start an uploader"
        try:
            free = self.free_bytes()
            if free < self.last_bytes * SPARE:
                self.is_full = True
                return f"{self.member.folder}: {free:,} bytes are free, and the last take had {self.last_bytes:,}"
            if self._probing:
                self._probe()
        except OSError as error:
            return f"{self.member.folder}: {error.strerror}"
        self._probing = False
        return ""

    def _probe(self) -> None:
        path = f"{self.member.folder}/.probe-{os.getpid()}"
        try:
            with open(path, "wb") as file:
                file.write(os.urandom(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def failed_near(self) -> None:
        self._probing = True

    # Upload

    def wait_far(self, step: int, save_id: str, timeout: float | None) -> None:
        """Wait until a step is committed in the far root. Raise TimeoutError, or FarError if it will never be."""
        began, pause, verb, known = time.monotonic(), 0.02, "want", "its uploader does not answer"
        end = float("inf") if timeout is None else began + timeout
        while True:
            try:
                status = self.link.ask(ControlRequest(verb, step=step), max(0.01, min(ANSWERS, end - time.monotonic())))
                left, wait = max(0.01, end - time.monotonic()), time.monotonic() - began < APPEARS
                found = self._far_state(status, step, save_id, wait=wait, patience=min(self.patience, left))
                if found is None:
                    return
                known = f"{far_text(found.far, found.sent, found.total)}{f' ({status.error})' if status.error else ''}"
                verb = "want" if found.far == UploadState.KEPT else "status"  # a new uploader does not know the wish
            except UploaderError as error:
                known, verb = str(error), "want"
            except StorageError as error:
                known = str(error)
                if time.monotonic() < end:
                    raise
            if time.monotonic() >= end:
                raise TimeoutError(f"step-{step}: not in {self.options.far} after {timeout} s: {known}")
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(1.0, pause * 1.5)

    def _far_state(self, status: Status, step: int, save_id: str, *, wait: bool, patience: float) -> StepStatus | None:
        """Return the state of a step on its way, or None if it is far. Raise FarError if it will never be.

        `wait`: True while another rank of this host may store the manifest. `patience`: seconds to wait for the root.
        """
        state = status.steps.get(step)
        if state is None or state.save_id != save_id:
            if self._is_far(step, save_id, patience):
                return None
            if wait:
                return StepStatus(save_id)
            raise FarError(f"step-{step}: was removed or replaced before it was uploaded")
        if state.far in FAULTS:
            kind = _ERRORS.get(state.far, FarError)
            raise kind(f"step-{step}: {FAULTS[state.far]}: {state.error or 'a newer step was uploaded instead'}")
        return None if state.far == UploadState.WHOLE else state

    def _is_far(self, step: int, save_id: str, patience: float) -> bool:
        """Return True if a step is committed far: this snapshot, or any if no save id is given."""
        with Session(self.options.far.join(f"step-{step}"), self.options.options) as session:
            found = run(limited(committed_save_id(session.storage), patience))
        return found is not None and save_id in ("", found)

    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is: near, on how many further hosts, and far."""
        statuses = self._statuses()
        near = self.folder.steps().get(step)
        views = [self.folder.files(step)] if not self.member.fault else []
        for status in statuses:
            state = status.steps.get(step)
            if status.address != self.member.hosts[self.member.index].address:
                views.append(state.files if state is not None else {})
        sizes = near.head.sizes() if near is not None else {}
        held = [sum(files.get(name) == size for files in views) for name, size in sizes.items()]
        whole = bool(held) and min(held) > 0
        found: dict[str, str | int] = {
            "near": "whole" if whole else "partial" if any(views) else "absent",
            "replicas": min(held, default=0) - 1 if whole else 0,
        }
        states = [state for status in statuses if (state := status.steps.get(step)) is not None]
        if any(state.far == UploadState.WHOLE for state in states):
            found["far"] = "whole"
        elif states:
            shown = next((each for each in states if each.far == UploadState.UPLOADING), states[0])
            found["far"] = far_text(shown.far, sum(each.sent for each in states), sum(each.total for each in states))
        else:
            save_id = near.save_id if near is not None else ""
            found["far"] = self._ask_far(step, save_id)
        return found

    def _ask_far(self, step: int, save_id: str) -> str:
        """Return where the far root has a step of which no uploader tells."""
        try:
            return "whole" if self._is_far(step, save_id, self.patience) else "absent"
        except StorageError as error:
            log.warning("%s: cannot be reached, so step-%d may be there or not: %s", self.options.far, step, error)
            return "unknown"

    def _statuses(self) -> list[Status]:
        """Return the states of all uploaders that answer, this host's first."""
        found = []
        if not self.member.fault:
            try:
                found.append(self.link.ask(ControlRequest("status")))
            except UploaderError as error:
                log.warning("%s", error)
        others = [each for at, each in enumerate(self.member.hosts) if at != self.member.index and each.address]

        async def ask(address: str) -> Status | None:
            options = {"secret": self.member.secret, "timeout": ANSWERS}
            async with Session(URL.parse(f"peer://{address}"), options) as session:
                with contextlib.suppress(SnapshotError):
                    return decode_status(await session.storage.get(STATUS))
            return None

        answers = run(gather_limited([each.address for each in others], ask))
        return found + [each for each in answers if each is not None]

    # Restore

    def view(self) -> HostView:
        """Return what this host has, once its uploader offers that to the others.

        Other hosts would pass over steps that only a dead or a hung uploader offers. So it is started again first.
        """
        member = self.member
        if len(member.hosts) > 1 and not member.fault:
            try:
                self.ask(ControlRequest("ping"))
            except UploaderError as error:
                log.warning("%s", error)
        else:
            self.link.await_registration()
        return view_of(self.folder, member.hosts[member.index].key)

    def census(self, views: Sequence[HostView], line: RunLine, *, good: bool) -> dict[int, CensusStep]:
        """Return the near steps on a line of this run by their numbers. `views`: one of each rank.

        `good`: of two snapshots of a step, one that is not suspect is chosen first.
        """
        firsts = [views[host.ranks[0]] for host in self.member.hosts]
        return {each.step: each for each in take_census(firsts, line, self._sizes_of, good=good)}

    def _sizes_of(self, step: CensusStep) -> dict[str, int]:
        """Return the files of a snapshot by its manifest, from the nearest host that has it undamaged.

        Raise StorageError if a host that has it does not answer: the step is not damaged then.
        """
        member, silent = self.member, None
        near = self.folder.steps().get(step.step)
        if near is not None and near.save_id == step.save_id:
            return near.head.sizes()
        for host in sorted(step.keepers - {member.index}):
            try:
                data = read_manifest(member, step.step, host)
                if data is not None and (head := decode_head(data, METADATA)).save_id == step.save_id:
                    return head.sizes()
            except SnapshotError as error:
                log.info("step-%s: %s", step.step, error)
                if isinstance(error, StorageError) and not isinstance(error, StorageNotFoundError):
                    silent = error
        if silent is not None:
            raise silent
        return {}

    def sources(self, step: int, place: PeerPlace) -> StepSources:
        """Return the places of a step's files for this rank."""
        member = self.member
        return StepSources(
            step,
            place,
            self.folder.step_path(step),
            member.hosts,
            member.index,
            secret=member.secret,
            far=self.options.far.join(f"step-{step}"),
            options=self.options.options,
        )

    # Attempts

    def learn(self, facts: Facts) -> None:
        """Add facts to those that this rank knows."""
        self.member.facts = self.member.facts.unite(facts)

    def read_far(self, attempts: set[str], patience: float) -> None:
        """Read the facts of the far root, and publish pending attempts that have steps. Called on the leader.

        Raises:
            StorageError: The root cannot be read.
            RunForkedError: An attempt with steps was not published, but another one; or the root was rolled back.
            RunDeletedError: The root does not have the run any more.
        """
        known = self.member.facts  # before the root is read, which may have more
        with Session(self.options.far, self.options.options) as session:
            root = run(limited(read_facts(session.storage), patience))
            seen = (
                [known] if self.member.fault else [known, read_copy(self.member.folder)]
            )  # by later jobs on this host
            root.expect_no_rollback([FactsCopy(self.member.run, each) for each in seen], self.options.far)
            if root.lacks(known):
                raise RunDeletedError(
                    f"{self.options.far}: the run was deleted there; begin a new one in a new process"
                )
            united = root.with_pending(known.pending)
            found = run(limited(publish_if_writable(session.storage, united, attempts), patience))
        self.member.facts = Facts(found.number, found.published).with_pending(found.with_ancestors(attempts))

    def begin(self, parent_of: Callable[[Facts], Parent | None], *, far: bool = True) -> JoinedAttempt | None:
        """Begin an attempt of this job, on the leader. None if another one was published since the facts were read."""
        return begin_attempt(self.options, self.member, parent_of, self.patience, far=far)

    def publish_attempt(self) -> None:
        """Publish this job's attempt before a take that is written far, else all restores would pass over the step.

        Raise `StorageError` on the leader if that cannot be done.
        """
        member, attempt = self.member, self.member.attempt
        if member.leads and member.index == 0 and attempt is not None and not member.facts.has(attempt.name):
            self.read_far({attempt.name}, self.patience)
            if not self.member.facts.has(attempt.name):
                raise StorageError(
                    f"{self.options.far}: this job's attempt cannot be published there, so restores would pass over a "
                    "step that is written directly to it; allow writes below .run/, or use a near folder"
                )

    def began(self, begun: JoinedAttempt, manifests: Mapping[int, Keepers]) -> None:
        """Go on with an attempt that the leader has begun. Remove the steps that are off its line.

        `manifests`: the hosts that have each near step's manifest.
        """
        member = self.member
        self.learn(begun.facts)
        member.attempt, self._order, self.superseded = begun.attempt, 0, None
        if member.fault or not member.leads:
            return
        line = RunLine(member.facts)  # a step is off the line only if a publication says so
        for step, near in self.folder.steps().items():
            if line.standing(step, near.save_id, near.origin) == Standing.OFF:
                if near.suspect:
                    log.warning(
                        "step-%s: the run continues without it; it stays near until a later step is taken", step
                    )
                    continue
                log.warning("step-%s: removed: the run continues without it", step)
                self.folder.remove(step, near.save_id)
        store_copy(self.folder.path, member.facts)
        fetch_manifests(self.folder, member, manifests)
        self.link.register()

    def remove_unusable(self, step: int) -> None:
        """Remove a near snapshot of a step that is damaged or off the line, so that the step can be taken."""
        self.folder.remove_damaged(step, "the step is taken again")
        near = self.folder.steps().get(step)
        if near is not None and RunLine(self.member.facts).standing(step, near.save_id, near.origin) == Standing.OFF:
            log.warning("step-%s: removed: the run continues without it", step)
            self.folder.remove(step, near.save_id)

    def expect_own(self, step: int) -> None:
        """Raise SnapshotExistsError if another attempt has taken a step on this host.

        The leader of a take looks in its own folder only, and the manifest replaces what another host has.
        """
        near, attempt = self.folder.steps().get(step), self.member.attempt
        if near is not None and near.origin.attempt not in ("", attempt.name if attempt is not None else ""):
            raise SnapshotExistsError(
                f"{self.folder.step_path(step)}: another attempt has taken the step; take another step, or pass "
                "overwrite=True"
            )

    def is_older_than_restored(self, near: NearStep) -> bool:
        """Return True if a near step is older than the one that this job restored, which this host does not have."""
        attempt = self.member.attempt
        parent = attempt.parent if attempt is not None else None
        if attempt is None or parent is None or parent.step is None or near.origin.attempt == attempt.name:
            return False
        return near.step < parent.step

    def look_for_later_attempt(self, step: int) -> None:
        """Record that the line of the run has left this job's attempt before a step, or that the run has forked.

        The uploader of this host, and other jobs on it, leave copies of the facts.
        """
        attempt = self.member.attempt
        if not self.member.fault:
            self.learn(read_copy(self.folder.path))
        if attempt is None:
            return
        facts = self.member.facts
        if facts.has(attempt.name):
            origin = Origin(self.member.run, attempt.number, attempt.name, 0)
            if RunLine(facts).standing(step, "", origin) == Standing.OFF and facts.tip is not None:
                left = RunLine(facts).cuts.get(attempt.name)
                began = f"from step {left.step}" if left is not None else "from an earlier step"
                self.superseded = SnapshotError(
                    f"{self.options.far}: another job has continued this run {began} (attempt {facts.tip.name} of "
                    f"{facts.tip.host}), so later steps of this one are removed; nothing was saved"
                )
        elif attempt.number <= facts.number:
            self.superseded = forked_error(attempt, facts.tip)

    def heal(self, step: int, files: Sequence[str]) -> None:
        """Replace damaged near files of a step by copies from other hosts or the far root."""
        near = self.folder.steps().get(step)
        if not files or near is None:
            return
        heal_step(self.folder, near, files, self.member.registration(self.options))

    def close(self) -> None:
        """Report to the uploader that this trainer has ended: it may end after the last upload."""
        self.link.close()
