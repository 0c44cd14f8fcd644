"""Steps of a run with near folders: where each of them is, as this host sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from snapshot.cli.screen import Column, ScreenTable, as_json, printable, wrapped
from snapshot.cli.status import ExitStatus
from snapshot.errors import SnapshotNotFoundError
from snapshot.manager.root import Root
from snapshot.manifest.head import ManifestHead
from snapshot.runtime.loop import run
from snapshot.text import size_text
from snapshot.tiers.by_hand import find_runs, folder_of
from snapshot.tiers.control import ControlClient, Request, StepStatus, UploaderError
from snapshot.tiers.near_steps import NearFolder, NearStep
from snapshot.tiers.timeline import Line, Standing, origin_of
from snapshot.tiers.upload_queue import MEANINGS, UploadState
from snapshot.tiers.uploader_link import ANSWERS
from snapshot.url import URL


def list_tiers(far: str, near: str, options: Mapping[str, Any] | None, *, json: bool) -> ExitStatus:
    """Print a line for each step that is near or far."""
    url = URL.parse(far)
    runs = runs_in(near, url)
    root = Root(url, options)
    heads = run(root.heads(run(root.folders()).committed))
    line = run(root.line())
    rows = [row for folder in runs for row in tier_rows(folder, heads, line)]
    if json:
        print(as_json({"url": str(url), "near": near, "steps": rows}))
    else:
        columns = [Column("step", right=True), Column("size", right=True), Column("near"), Column("far")]
        table = ScreenTable(columns)
        for row in rows:
            table.add(f"{row['step']}", size_text(row["bytes"]) if row["bytes"] else "", row["near"], row["far"])
        print(printable(f"{url}, with near steps in {near}"))
        for text in table.lines():
            print(text)
        words = {word for row in rows for word in str(row["far"]).split(", ")}
        for state, meaning in MEANINGS.items():
            if state.value in words:
                print(wrapped(f"{state}: {meaning}"))
    return ExitStatus.OK


def runs_in(near: str, far: URL) -> list[NearFolder]:
    """Return the folders of the runs in a near folder that are uploaded to a far root."""
    runs = find_runs(os.path.abspath(os.path.expanduser(near)), str(far))
    if not runs:
        raise SnapshotNotFoundError(f"{near}: has no run that is uploaded to {far}")
    return [NearFolder(folder_of(near, each)) for each in runs]


def tier_rows(folder: NearFolder, heads: Mapping[int, object], line: Line) -> Iterator[dict[str, Any]]:
    """Yield where each step of a run is, ascending. `heads` are the manifests in the far root, or their errors."""
    states = _states(folder.path)
    steps = folder.steps()
    for step in sorted(steps.keys() | heads.keys()):
        head = heads.get(step)
        far_id = head.save_id if isinstance(head, ManifestHead) else ""
        row = _row(folder, step, steps.get(step), states.get(step), far_id)
        shown = steps[step].head if step in steps else head
        if isinstance(shown, ManifestHead):
            standing = line.standing(step, shown.save_id, origin_of(shown.metadata))
            if standing in (Standing.OFF, Standing.UNDECIDED):
                row["far"] = f"{row['far']}, {'off the line' if standing == Standing.OFF else standing}"
        yield row


def _states(folder: str) -> dict[int, StepStatus]:
    """Return what the uploader of a folder says, if it runs."""
    try:
        client = ControlClient(folder, ANSWERS)
    except UploaderError:
        return {}
    try:
        return client.ask(Request("status"), ANSWERS).steps
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
        far = state.far.value if state is not None else "absent"
        if far == UploadState.UPLOADING and state is not None:
            far = f"uploading {min(100, 100 * state.sent // max(1, state.total))} %"
    return {"step": step, "bytes": nbytes, "near": text, "far": far}
