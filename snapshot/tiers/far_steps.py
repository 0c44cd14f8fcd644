"""The steps of a job in the far root: where they are, and waiting for their upload within the time of the caller."""

from __future__ import annotations

import contextlib
import time

from snapshot.errors import RunDeletedError, RunForkedError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.peers import STATUS
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.storage import Context
from snapshot.io.url import URL
from snapshot.save.transaction import committed_save_id
from snapshot.tiers.control import Request, Status, StepStatus, UploaderError, decode_status
from snapshot.tiers.facts import limited
from snapshot.tiers.join import Membership, TierOptions
from snapshot.tiers.near_steps import NearFolder
from snapshot.tiers.upload_queue import UploadState
from snapshot.tiers.uploader_link import ANSWERS, UploaderLink

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


class FarSteps:
    """The far steps of a job. Base of `TierSet`."""

    options: TierOptions
    member: Membership
    folder: NearFolder
    link: UploaderLink
    patience: float
    """Seconds to wait for the far root."""

    def wait_far(self, step: int, save_id: str, timeout: float | None) -> None:
        """Wait until a step is committed in the far root. Raise TimeoutError, or FarError if it will never be."""
        began, pause, verb, known = time.monotonic(), 0.02, "want", "its uploader does not answer"
        end = float("inf") if timeout is None else began + timeout
        while True:
            try:
                status = self.link.ask(Request(verb, step=step), max(0.01, min(ANSWERS, end - time.monotonic())))
                left, wait = max(0.01, end - time.monotonic()), time.monotonic() - began < APPEARS
                found = self._far_state(status, step, save_id, wait=wait, patience=min(self.patience, left))
                if found is None:
                    return
                known = f"{_far_text(found)}{f' ({status.error})' if status.error else ''}"
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
        session = Session(self.options.far.join(f"step-{step}"), self.options.options)
        try:
            found = run(limited(committed_save_id(session.storage), patience))
            return found is not None and save_id in ("", found)
        finally:
            run(session.close())

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
            sent, total = sum(each.sent for each in states), sum(each.total for each in states)
            found["far"] = _far_text(
                next((each for each in states if each.far == UploadState.UPLOADING), states[0]), sent, total
            )
        else:
            save_id = near.save_id if near is not None else ""
            found["far"] = "whole" if self._is_far(step, save_id, self.patience) else "absent"
        return found

    def _statuses(self) -> list[Status]:
        """Return the states of all uploaders that answer, this host's first."""
        found = []
        if not self.member.fault:
            try:
                found.append(self.link.ask(Request("status")))
            except UploaderError as error:
                log.warning("%s", error)
        others = [each for at, each in enumerate(self.member.hosts) if at != self.member.index and each.address]

        async def ask(address: str) -> Status | None:
            options = {"secret": self.member.secret, "timeout": ANSWERS}
            storage = open_storage(URL.parse(f"peer://{address}"), options, Context())
            try:
                with contextlib.suppress(SnapshotError):
                    return decode_status(await storage.get(STATUS))
            finally:
                await storage.close()
            return None

        async def ask_all() -> list[Status | None]:
            return await gather_limited([each.address for each in others], ask)

        return found + [each for each in run(ask_all()) if each is not None]


def _far_text(state: StepStatus, sent: int = -1, total: int = -1) -> str:
    """Return the state of an upload as text.

    >>> _far_text(StepStatus("", UploadState.UPLOADING, 41, 100))
    'uploading 41 %'
    """
    if state.far != UploadState.UPLOADING:
        return state.far.value
    done, whole = (sent, total) if total > 0 else (state.sent, state.total)
    return f"uploading {min(100, 100 * done // max(1, whole))} %"
