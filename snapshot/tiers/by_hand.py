"""An upload that is started by hand: what a host still has, after its trainer and its uploader have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.tiers.control import Registration
from snapshot.tiers.facts import copy_in, read_copies
from snapshot.tiers.hosts import Host
from snapshot.tiers.timeline import Copy, Facts
from snapshot.tiers.upload_queue import Act, UploadState
from snapshot.tiers.uploader import Uploader
from snapshot.tiers.uploader_process import expect_own_folder, lock_folder

WAITING = 20.0
"""Seconds to wait for the files of other hosts, whose uploads may run at the same time."""


def find_runs(near: str, far: str | None) -> list[Copy]:
    """Return the runs in a near folder, or the run itself if the folder is a run's, with their facts.

    `far` chooses the runs that were uploaded there. A single run may have been uploaded to another place. Raise
    PermissionError if another user can write to the folder.
    """
    expect_own_folder(near)
    own = copy_in(os.path.abspath(os.path.expanduser(near)))
    found = [own] if own.far else read_copies(near)
    chosen = [each for each in found if far is None or each.far == far]
    return chosen or (found if len(found) == 1 else [])


def folder_of(near: str, copy: Copy) -> str:
    """Return the folder of a run that `find_runs` has found."""
    near = os.path.abspath(os.path.expanduser(near))
    return near if os.path.basename(near) == copy.run else f"{near}/{copy.run}"


def upload_by_hand(
    folder: str, facts: Facts, far: str, options: Mapping[str, Any] | None, *, everything: bool, rate: float | None
) -> dict[int, UploadState]:
    """Upload the steps of a run. Return the state of each step that was wanted."""
    lock = lock_folder(folder)
    if lock is None:
        raise SnapshotError(f"{folder}: its uploader runs, and does the same")
    uploader = Uploader(folder)
    try:
        uploader.register(
            Registration(
                run=os.path.basename(folder),
                facts=facts,
                attempt="",
                by_hand=True,
                far=far,
                options=dict(options or {}),
                upload=1 if everything else "latest",
                replicas=0,
                hosts=[Host("", "", [0])],
                index=0,
                secret="",
                rate=rate,
            )
        )
        since = time.monotonic()
        while True:
            action = uploader.upload_turn()
            states = {step: each.far for step, each in uploader.status().steps.items()}
            open_ = {state for state in states.values() if state.is_open}
            if open_ and uploader.status().error:
                raise SnapshotError(uploader.status().error)
            if not open_ or (open_ == {UploadState.WAITING} and time.monotonic() - since > WAITING):
                return {step: state for step, state in states.items() if state != UploadState.KEPT}
            if UploadState.WAITING not in open_:
                since = time.monotonic()
            if action.act == Act.WAIT:
                time.sleep(action.seconds)
    finally:
        uploader.close()
        os.close(lock)
