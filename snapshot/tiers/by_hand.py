"""An upload that is started by hand: what a host still has, after its trainer and its uploader have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.tiers.control import Registration
from snapshot.tiers.hosts import Host
from snapshot.tiers.run_record import RECORD, RunRecord, decode_record
from snapshot.tiers.uploader import Uploader
from snapshot.tiers.uploader_process import lock_folder

WAITING = 20.0
"""Seconds to wait for the files of other hosts, whose uploads may run at the same time."""


def find_runs(near: str, far: str | None) -> list[tuple[str, RunRecord]]:
    """Return the folders of runs in a near folder, or the folder itself if it is a run's, with their records.

    `far` chooses the runs that were uploaded there. A single run may have been uploaded to another place.
    """
    found: list[tuple[str, RunRecord]] = []
    for folder in (near, *sorted(entry.path for entry in os.scandir(near) if entry.is_dir())):
        with suppress(OSError, SnapshotError), open(f"{folder}/{RECORD}", "rb") as file:
            found.append((folder, decode_record(file.read(), folder)))
    chosen = [each for each in found if far is None or each[1].far == far]
    return chosen or (found if len(found) == 1 else [])


def upload_by_hand(
    folder: str, record: RunRecord, far: str, options: Mapping[str, Any] | None, *, everything: bool, rate: float | None
) -> dict[int, str]:
    """Upload the steps of a run. Return the state of each step that was wanted."""
    lock = lock_folder(folder)
    if lock is None:
        raise SnapshotError(f"{folder}: its uploader runs, and does the same")
    uploader = Uploader(folder)
    try:
        uploader.register(
            Registration(
                record=record,
                attempt="",
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
            pause = uploader.upload_turn()
            states = {step: each.far for step, each in uploader.status().steps.items()}
            waiting = {state for state in states.values() if state in ("queued", "uploading", "waiting")}
            if uploader.status().error:
                raise SnapshotError(uploader.status().error)
            if not waiting or (waiting == {"waiting"} and time.monotonic() - since > WAITING):
                return {step: state for step, state in states.items() if state != "kept near"}
            if "waiting" not in waiting:
                since = time.monotonic()
            time.sleep(pause)
    finally:
        uploader.close()
        os.close(lock)
