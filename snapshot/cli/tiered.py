"""Steps of a run with near folders: where each of them is, as this host sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from snapshot.cli.screen import Column, ScreenTable, as_json, printable
from snapshot.cli.status import ExitStatus
from snapshot.errors import SnapshotNotFoundError
from snapshot.manager.root import Root
from snapshot.manifest.head import ManifestHead
from snapshot.runtime.loop import run
from snapshot.text import size_text
from snapshot.tiers.by_hand import find_runs
from snapshot.tiers.control import ControlClient, Request, StepStatus, UploaderError
from snapshot.tiers.near_steps import NearFolder, NearStep
from snapshot.tiers.run_record import RunRecord
from snapshot.url import URL


def list_tiers(far: str, near: str, options: Mapping[str, Any] | None, *, json: bool) -> ExitStatus:
    """Print a line for each step that is near or far."""
    url = URL.parse(far)
    runs = runs_in(near, url)
    root = Root(url, options)
    heads = run(root.heads(run(root.folders()).committed))
    rows = [row for folder, record in runs for row in tier_rows(NearFolder(folder), record.run, heads)]
    if json:
        print(as_json({"url": str(url), "near": near, "steps": rows}))
    else:
        columns = [Column("step", right=True), Column("size", right=True), Column("near"), Column("far")]
        table = ScreenTable(columns)
        for row in rows:
            table.add(f"{row['step']}", size_text(row["bytes"]) if row["bytes"] else "", row["near"], row["far"])
        print(printable(f"{url}, with near steps in {near}"))
        for line in table.lines():
            print(line)
    return ExitStatus.OK


def runs_in(near: str, far: URL) -> list[tuple[str, RunRecord]]:
    """Return the folders of the runs in a near folder that are uploaded to a far root, with their records."""
    runs = find_runs(os.path.abspath(os.path.expanduser(near)), str(far))
    if not runs:
        raise SnapshotNotFoundError(f"{near}: has no run that is uploaded to {far}")
    return runs


def tier_rows(folder: NearFolder, name: str, heads: Mapping[int, object]) -> Iterator[dict[str, Any]]:
    """Yield where each step of a run is, ascending. `heads` are the manifests in the far root, or their errors."""
    states = _states(folder.path)
    steps = folder.steps_of(name)
    for step in sorted(steps.keys() | heads.keys()):
        head = heads.get(step)
        far_id = head.save_id if isinstance(head, ManifestHead) else ""
        yield _row(folder, step, steps.get(step), states.get(step), far_id)


def _states(folder: str) -> dict[int, StepStatus]:
    """Return what the uploader of a folder says, if it runs."""
    try:
        client = ControlClient(folder)
    except UploaderError:
        return {}
    try:
        return client.ask(Request("status")).steps
    except UploaderError:
        return {}
    finally:
        client.close()


def _row(folder: NearFolder, step: int, near: NearStep | None, state: StepStatus | None, far_id: str) -> dict[str, Any]:
    text, nbytes = "absent", 0
    if near is not None:
        files, sizes = folder.files(step), near.head.sizes()
        held = sum(files.get(name) == size for name, size in sizes.items())
        text = "whole" if held == len(sizes) else f"{held} of {len(sizes)} files"
        nbytes = near.head.nbytes
    if far_id and (near is None or near.save_id == far_id):
        far = "whole"
    else:
        far = state.far if state is not None else "absent"
        if far == "uploading" and state is not None:
            far = f"uploading {min(100, 100 * state.sent // max(1, state.total))} %"
    return {"step": step, "bytes": nbytes, "near": text, "far": far}
