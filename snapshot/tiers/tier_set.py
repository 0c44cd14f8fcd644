"""The tiers of one rank of a job: near steps of its host, replicas on other hosts, and the far root."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapshot.errors import SnapshotError, StorageError
from snapshot.events import log
from snapshot.manifest.document import METADATA
from snapshot.manifest.head import decode_head
from snapshot.peer_requests import STATUS
from snapshot.registry import open_storage
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.cleanup import committed_save_id
from snapshot.storage import Context
from snapshot.tiers.census import CensusStep, HostView, take_census, view_of
from snapshot.tiers.control import ControlClient, Request, Status, StepStatus, UploaderError, decode_status
from snapshot.tiers.facts import limited, publish_pending, read_copy, read_facts, store_copy
from snapshot.tiers.hosts import job_address
from snapshot.tiers.join import FAR_PATIENCE, Begun, Membership, TierOptions, begin_attempt
from snapshot.tiers.manifests import Keepers, fetch_manifests, read_manifest
from snapshot.tiers.near_steps import PINNED, NearFolder, NearStep
from snapshot.tiers.replicas import heal_step
from snapshot.tiers.sources import Place, StepSources
from snapshot.tiers.timeline import KEY, Facts, Line, Origin, Parent, RunDeletedError, Standing, forked_error
from snapshot.tiers.upload_queue import UploadState
from snapshot.tiers.uploader_process import ensure_uploader
from snapshot.url import URL

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
MOST_HELD = 4
"""Steps before the newest that wait for their replicas before older ones are removed."""
SPARE = 1.05
"""Free space that a near take needs, as a multiple of the last take's bytes."""


class FarError(SnapshotError):
    """A step cannot reach the far root."""


class TierSet:
    """The tiers, after the ranks have joined."""

    def __init__(self, options: TierOptions, member: Membership) -> None:
        self.options = options
        self.member = member
        self.folder = NearFolder(member.folder)
        self._client: ControlClient | None = None
        self._asking = threading.Lock()
        self._registering: threading.Thread | None = None
        self._order = 0
        self._probing = False
        """True if the last near take failed, so that the next one tries the folder first."""
        self.is_full = False
        self.superseded: SnapshotError | None = None
        """Why this job must not go on: another one has continued the run."""
        self.last_bytes = 0
        """Bytes of this host's share of the last take."""
        if not member.fault:
            self._register()

    # Uploader

    def ask(self, request: Request) -> Status:
        """Send a request to this host's uploader. If it died, start it again."""
        if self._registering is not None:
            self._registering.join()
        return self._ask(request)

    def _ask(self, request: Request) -> Status:
        with self._asking:
            for again in (False, True):
                try:
                    if self._client is None:
                        self._connect()
                    assert self._client is not None
                    return self._client.ask(request)
                except (UploaderError, OSError) as error:
                    if self._client is not None:
                        self._client.close()
                    self._client = None
                    if again:
                        raise UploaderError(str(error)) from error
        raise AssertionError

    def _connect(self) -> None:
        member = self.member
        address = job_address() if len(member.hosts) > 1 else None
        self._client, offered = ensure_uploader(member.folder, address)
        member.hosts[member.index].address = offered
        self._client.ask(Request("register", member.registration(self.options)))

    def _register(self) -> None:
        """Tell the uploader about the job, in a thread: a new one needs a second to start."""

        def register() -> None:
            try:
                self._ask(Request("register", self.member.registration(self.options)))
            except SnapshotError as error:
                log.warning("%s", error)

        self._registering = threading.Thread(target=register, name="snapshot-register", daemon=True)
        self._registering.start()

    # Takes

    def url_of(self, step: int) -> str:
        """Return the URL of a near step."""
        return URL("near", self.folder.step_path(step)).reveal()

    def note(self, *, replaces: bool) -> dict[str, Any]:
        """Return the metadata of the next take: its run, its attempt, and its number in it."""
        attempt = self.member.attempt
        assert attempt is not None, "a take begins an attempt"
        self._order += 1
        origin = Origin(self.member.run, attempt.number, attempt.name, self._order, replaces)
        return {KEY: origin._asdict()}

    def free_bytes(self) -> int:
        """Return the free space of the near folder."""
        return shutil.disk_usage(self.member.folder).free

    def near_fault(self) -> str:
        """Return why the next take cannot be written near, or ''. `is_full` tells if that is for lack of space."""
        self.is_full = False
        if self.member.fault:
            return self.member.fault
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
        """Record that a near take failed."""
        self._probing = True

    # Restore

    def view(self) -> HostView:
        """Return what this host has, once its uploader offers that to the others."""
        member = self.member
        if self._registering is not None:
            self._registering.join()
        return view_of(self.folder, member.hosts[member.index].key)

    def census(self, views: Sequence[HostView], line: Line) -> dict[int, CensusStep]:
        """Return the near steps on a line of this run by their numbers. `views`: one of each rank."""
        firsts = [views[host.ranks[0]] for host in self.member.hosts]
        return {each.step: each for each in take_census(firsts, line, self._sizes_of)}

    def _sizes_of(self, step: CensusStep) -> dict[str, int]:
        """Return the files of a snapshot by its manifest, from the nearest host that has it undamaged."""
        member = self.member
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
        return {}

    def sources(self, step: int, place: Place) -> StepSources:
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
            RunForkedError: An attempt with steps was not published, but another one.
            RunDeletedError: The root does not have the run any more.
        """
        session = Session(self.options.far, self.options.options)
        try:
            root = run(limited(read_facts(session.storage), patience))
            if root.lacks(self.member.facts):
                raise RunDeletedError(
                    f"{self.options.far}: the run was deleted there; begin a new one in a new process"
                )
            united = root.with_pending(self.member.facts.pending)
            found = run(limited(publish_pending(session.storage, united, attempts), patience))
            self.member.facts = Facts(found.number, found.published)
        finally:
            run(session.close())

    def begin(self, parent_of: Callable[[Facts], Parent | None], *, far: bool = True) -> Begun | None:
        """Begin an attempt of this job, on the leader. None if another one was published since the facts were read."""
        return begin_attempt(self.options, self.member, parent_of, FAR_PATIENCE, far=far)

    def publish_attempt(self) -> None:
        """Publish this job's attempt before a take that is written far, else no reader there would know it."""
        member, attempt = self.member, self.member.attempt
        if member.leads and member.index == 0 and attempt is not None and not member.facts.has(attempt.name):
            with contextlib.suppress(StorageError):  # the take reports it
                self.read_far({attempt.name}, FAR_PATIENCE)

    def began(self, begun: Begun, manifests: Mapping[int, Keepers]) -> None:
        """Go on with an attempt that the leader has begun. Remove the steps that are off its line.

        `manifests`: the hosts that have each near step's manifest.
        """
        member = self.member
        self.learn(begun.facts)
        member.attempt, self._order, self.superseded = begun.attempt, 0, None
        if member.fault or not member.leads:
            return
        line = Line(member.facts)  # a step is off the line only if a publication says so
        for step, near in self.folder.steps().items():
            if line.standing(step, near.save_id, near.origin) == Standing.OFF:
                log.warning("step-%s: removed: the run continues without it", step)
                self.folder.remove(step, near.save_id)
        store_copy(self.folder.path, member.facts)
        fetch_manifests(self.folder, member, manifests)
        self._register()

    def remove_off(self, step: int) -> None:
        """Remove a near snapshot of a step that is off the line, so that the step can be taken."""
        near = self.folder.steps().get(step)
        if near is not None and Line(self.member.facts).standing(step, near.save_id, near.origin) == Standing.OFF:
            log.warning("step-%s: removed: the run continues without it", step)
            self.folder.remove(step, near.save_id)

    # Far

    def wait_far(self, step: int, save_id: str, timeout: float | None) -> None:
        """Wait until a step is committed in the far root. Raise TimeoutError, or FarError if it will never be."""
        deadline = None if timeout is None else time.monotonic() + timeout
        status, pause, began = self.ask(Request("want", step=step)), 0.02, time.monotonic()
        while True:
            state = status.steps.get(step)
            if state is None or state.save_id != save_id:
                if self._is_far(step, save_id):
                    return
                if time.monotonic() - began < APPEARS:  # another rank of this host stores the manifest
                    time.sleep(0.1)
                    status = self.ask(Request("want", step=step))
                    continue
                raise FarError(f"step-{step}: was removed or replaced before it was uploaded")
            if state.far == UploadState.WHOLE:
                return
            if state.far in FAULTS:
                raise FarError(
                    f"step-{step}: {FAULTS[state.far]}: {state.error or 'a newer step was uploaded instead'}"
                )
            if deadline is not None and time.monotonic() > deadline:
                why = f" ({status.error})" if status.error else ""
                raise TimeoutError(f"step-{step}: not in {self.options.far} after {timeout} s: {_far_text(state)}{why}")
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
            verb = "want" if state.far == UploadState.KEPT else "status"  # a new uploader does not know the wish
            status = self.ask(Request(verb, step=step))

    def _is_far(self, step: int, save_id: str) -> bool:
        """Return True if a step is committed far: this snapshot, or any if no save id is given."""
        session = Session(self.options.far.join(f"step-{step}"), self.options.options)
        try:
            found = run(committed_save_id(session.storage))
            return found is not None and save_id in ("", found)
        finally:
            run(session.close())

    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is: near, on how many further hosts, and far."""
        statuses = self._statuses()
        near = self.folder.steps().get(step)
        views = []
        for status in statuses:
            state = status.steps.get(step)
            views.append((state.save_id, state.files) if state is not None else ("", {}))
        sizes = near.head.sizes() if near is not None else {}
        held = [sum(files.get(name) == size for _, files in views) for name, size in sizes.items()]
        whole = bool(held) and min(held) > 0
        found: dict[str, str | int] = {
            "near": "whole" if whole else "partial" if any(files for _, files in views) else "absent",
            "replicas": min(held, default=0) - 1 if whole else 0,
        }
        states = [state for status in statuses if (state := status.steps.get(step)) is not None]
        if any(state.far == UploadState.WHOLE for state in states):
            found["far"] = "whole"
        elif states:
            sent, total = sum(each.sent for each in states), sum(each.total for each in states)
            found["far"] = _far_text(
                next((each for each in states if each.far == UploadState.UPLOADING), states[0]), sent, total
            )
        else:
            found["far"] = "whole" if self._is_far(step, near.save_id if near is not None else "") else "absent"
        return found

    def _statuses(self) -> list[Status]:
        """Return the states of all uploaders that answer, this host's first."""
        found = [] if self.member.fault else [self.ask(Request("status"))]
        for at, host in enumerate(self.member.hosts):
            if at != self.member.index and host.address:
                storage = open_storage(URL.parse(f"peer://{host.address}"), {"secret": self.member.secret}, Context())
                with contextlib.suppress(SnapshotError):
                    found.append(decode_status(run(storage.get(STATUS))))
                run(storage.close())
        return found

    # Retention

    def prune(self, upto: int, kept: Callable[[Sequence[NearStep]], set[int]], spared: Callable[[int], bool]) -> None:
        """Remove near steps before `upto`, which was just committed, that are neither kept nor wanted far.

        `kept`: the steps that the policy keeps, of those that are near. `spared`: steps that are in use.
        """
        if self.member.fault or not self.member.leads:
            return
        status = self.ask(Request("status"))
        self.look_for_later_attempt(upto)
        if self.superseded:
            return
        line = self.member.line
        steps = {
            step: near
            for step, near in self.folder.steps_of(self.member.run).items()
            if line.standing(step, near.save_id, near.origin) == Standing.ON
        }
        keep = kept([each for step, each in steps.items() if step <= upto])
        safe = len(self.member.hosts) == 1 or not self.options.replicas
        newest = max((step for step, each in status.steps.items() if safe or each.replicated), default=-1)
        if len(steps) > len(keep) + MOST_HELD:  # a partner that is lost must not fill the folder
            newest = max(steps, default=-1)
        for step, near in steps.items():
            state = status.steps.get(step)
            open_ = state is None or state.far.is_open or state.far.is_stuck or state.far == UploadState.DAMAGED
            if step >= min(upto, newest) or step in keep or open_ or spared(step):
                continue
            if not os.path.exists(f"{self.folder.step_path(step)}/{PINNED}"):
                self.folder.remove(step, near.save_id)
        self.folder.remove_leftovers(upto, spared)
        self.folder.remove_damaged(min(keep, default=upto), spared)

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
            if Line(facts).standing(step, "", origin) == Standing.OFF and facts.tip is not None:
                left = Line(facts).cuts.get(attempt.name)
                began = f"from step {left.step}" if left is not None else "from an earlier step"
                self.superseded = SnapshotError(
                    f"{self.options.far}: another job has continued this run {began} (attempt {facts.tip.name} of "
                    f"{facts.tip.host}), so later steps of this one are removed; nothing was saved"
                )
        elif attempt.number <= facts.number:
            self.superseded = forked_error(attempt, facts.tip)

    def make_room(self, kept: Callable[[Sequence[NearStep]], set[int]]) -> bool:
        """Give up the upload of the oldest step that waits for one, if the policy then lets it go."""
        status = self.ask(Request("status"))
        keep = kept(list(self.folder.steps().values()))
        waiting = sorted(step for step, each in status.steps.items() if each.far.is_open)
        waiting = [step for step in waiting if step not in keep and step != max(status.steps)]
        if not waiting:
            return False
        log.warning("step-%s: its upload is given up, since %s is full", waiting[0], self.folder.path)
        self.ask(Request("drop", step=waiting[0]))
        return True

    def heal(self, step: int, files: Sequence[str]) -> None:
        """Replace damaged near files of a step by copies from other hosts or the far root."""
        near = self.folder.steps().get(step)
        if not files or near is None:
            return
        heal_step(self.folder, near, files, self.member.registration(self.options))

    def close(self) -> None:
        """Tell the uploader that this trainer has ended: it may end after the last upload."""
        if self._registering is not None:
            self._registering.join()
        if self._client is not None:
            with contextlib.suppress(UploaderError):
                self._client.ask(Request("close"))
            self._client.close()
            self._client = None


def _far_text(state: StepStatus, sent: int = -1, total: int = -1) -> str:
    """Return the state of an upload as text.

    >>> _far_text(StepStatus("", UploadState.UPLOADING, 41, 100))
    'uploading 41 %'
    """
    if state.far != UploadState.UPLOADING:
        return state.far.value
    done, whole = (sent, total) if total > 0 else (state.sent, state.total)
    return f"uploading {min(100, 100 * done // max(1, whole))} %"
