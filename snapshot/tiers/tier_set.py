"""The tiers of one rank of a job: near steps of its host, replicas on other hosts, and the far root."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError
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
from snapshot.tiers.hosts import job_address
from snapshot.tiers.join import FAR_PATIENCE, Membership, TierOptions, limited
from snapshot.tiers.manifests import Keepers, fetch_manifests, read_manifest
from snapshot.tiers.near_steps import PINNED, NearFolder, NearStep
from snapshot.tiers.replicas import heal_step
from snapshot.tiers.run_record import KEY, Attempt, Origin, RunRecord, publish_record
from snapshot.tiers.sources import Place, StepSources
from snapshot.tiers.uploader_process import ensure_uploader
from snapshot.url import URL

FAULTS = {"outdated": "is not uploaded", "damaged": "is damaged", "dropped": "is not uploaded"}
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
        self.superseded = ""
        """Why this job must not go on: a later attempt has begun, as the uploader says."""
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
        self._order += 1
        attempt = self.member.attempt
        origin = Origin(self.member.record.run, attempt.number, attempt.name, self._order, replaces)
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

    def census(self, views: Sequence[HostView]) -> dict[int, CensusStep]:
        """Return the near steps of this run by their numbers. `views`: one of each rank."""
        firsts = [views[host.ranks[0]] for host in self.member.hosts]
        return {each.step: each for each in take_census(firsts, self.member.record, self._sizes_of)}

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

    def refresh_record(self, *, far: bool) -> None:
        """Add the attempts of other jobs that this host's uploader or, with `far`, the far root knows."""
        record = self.member.record
        with contextlib.suppress(SnapshotError):
            if not self.member.fault:
                record = record.with_attempts(self.ask(Request("status")).newest)
        if far:
            published = self.publish()
            if published is not None and published.run == record.run:
                record = published.with_attempts(record.attempts)
        self.member.record.attempts = record.attempts

    def began_attempt(self, attempt: Attempt, attempts: Sequence[Attempt], manifests: Mapping[int, Keepers]) -> None:
        """Begin an attempt with a restored step. Remove the steps that it abandons.

        `attempts`: those that the leader knows. `manifests`: the hosts that have each near step's manifest.
        """
        member = self.member
        member.record = member.record.with_attempts([*attempts, attempt])
        member.attempt, self._order, self.superseded = attempt, 0, ""
        if member.fault or not member.leads:
            return
        for step, near in self.folder.steps().items():
            if member.record.is_abandoned(step, near.origin):
                log.warning("step-%s: removed: the run continues from step-%s", step, attempt.restored)
                self.folder.remove(step, near.save_id)
        fetch_manifests(self.folder, member, manifests)
        self._register()

    def publish(self) -> RunRecord | None:
        """Add the attempts to the record in the far root, and return it. None if it cannot be reached.

        Uploaders do so, too, before they commit a step.
        """
        session = Session(self.options.far, self.options.options)
        record, live = self.member.record, self.member.attempt.name
        try:
            return run(limited(publish_record(session.storage, record, live), FAR_PATIENCE))
        except (StorageError, CorruptSnapshotError) as error:
            log.warning("%s: cannot be reached: %s", self.options.far, error)
            return None
        finally:
            run(session.close())

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
            if state.far == "whole":
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
            verb = "want" if state.far == "kept near" else "status"  # a new uploader does not know the wish
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
        if any(state.far == "whole" for state in states):
            found["far"] = "whole"
        elif states:
            sent, total = sum(each.sent for each in states), sum(each.total for each in states)
            found["far"] = _far_text(next((each for each in states if each.far == "uploading"), states[0]), sent, total)
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
        self._look_for_later_attempt(status, upto)
        steps = self.folder.steps_of(self.member.record.run)
        keep = kept([each for step, each in steps.items() if step <= upto])
        safe = len(self.member.hosts) == 1 or not self.options.replicas
        newest = max((step for step, each in status.steps.items() if safe or each.replicated), default=-1)
        if len(steps) > len(keep) + MOST_HELD:  # a partner that is lost must not fill the folder
            newest = max(steps, default=-1)
        for step, near in steps.items():
            state = status.steps.get(step)
            open_ = state is None or state.far in ("queued", "uploading", "waiting", "damaged")
            if step >= min(upto, newest) or step in keep or open_ or spared(step):
                continue
            if not os.path.exists(f"{self.folder.step_path(step)}/{PINNED}"):
                self.folder.remove(step, near.save_id)
        self.folder.remove_leftovers(upto, spared)

    def _look_for_later_attempt(self, status: Status, step: int) -> None:
        """Record that another job has restored an older step than this job has saved."""
        known = {each.name for each in self.member.record.attempts}
        for each in status.newest:
            if each.name not in known and each.restored is not None and each.restored < step:
                self.superseded = (
                    f"another job has continued this run from step {each.restored}, so later steps of this one are "
                    "removed"
                )

    def make_room(self, kept: Callable[[Sequence[NearStep]], set[int]]) -> bool:
        """Give up the upload of the oldest step that waits for one, if the policy then lets it go."""
        status = self.ask(Request("status"))
        keep = kept(list(self.folder.steps().values()))
        waiting = sorted(step for step, each in status.steps.items() if each.far in ("queued", "uploading", "waiting"))
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

    >>> _far_text(StepStatus("", "uploading", 41, 100))
    'uploading 41 %'
    """
    if state.far != "uploading":
        return state.far
    done, whole = (sent, total) if total > 0 else (state.sent, state.total)
    return f"uploading {min(100, 100 * done // max(1, whole))} %"
