"""Runs with near folders, for the manager and `snapshot ls`: the entry point `near` of the group `snapshot.steps`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from snapshot.errors import SnapshotNotFoundError
from snapshot.io.url import URL
from snapshot.manager.steps import RunOptions, Steps
from snapshot.manifest.document import ManifestHead
from snapshot.runs.timeline import RunLine, Standing, origin_of
from snapshot_tiers.control import ANSWERS, MEANINGS, ControlClient, ControlRequest, StepStatus, UploaderError, far_text
from snapshot_tiers.near import Near
from snapshot_tiers.near_steps import NearFolder, NearStep
from snapshot_tiers.uploader_process import find_runs


class HeldNearStep:
    """A near step of this host."""

    def __init__(self, folder: NearFolder, step: NearStep) -> None:
        self._folder, self._step = folder, step
        self.head, self.save_id = step.head, step.save_id

    def is_pinned(self) -> bool:
        """Return True if the step is protected from removal."""
        return self._folder.is_pinned(self._step.step)

    def whole_path(self) -> str:
        """Return the path of the step if all of its files are here, else ''."""
        return self._folder.step_path(self._step.step) if self._folder.is_whole(self._step) else ""


class NearRuns:
    """Runs whose steps are in a folder of each host, and are uploaded to a root."""

    def open_steps(self, near: Near | str | os.PathLike[str], given: RunOptions) -> Steps:
        """Return the steps of a manager."""
        from snapshot_tiers.tiered_steps import TieredSteps  # a listing does not pay for it

        return TieredSteps(near if isinstance(near, Near) else Near(near), given)

    def list_steps(
        self, near: str, far: URL, heads: Mapping[int, object], line: RunLine
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return a row for each step that is near or far, and what the states in the rows mean."""
        rows = [row for folder in runs_in(near, far) for row in tier_rows(folder, heads, line)]
        return rows, {state.value: meaning for state, meaning in MEANINGS.items()}

    def held_steps(self, near: str, far: URL) -> dict[int, HeldNearStep]:
        """Return the near steps of this host."""
        return {
            step: HeldNearStep(folder, found) for folder in runs_in(near, far) for step, found in folder.steps().items()
        }


NEAR = NearRuns()


def runs_in(near: str, far: URL) -> list[NearFolder]:
    """Return the folders of the runs in a near folder that are uploaded to a far root."""
    runs = find_runs(near, str(far))
    if not runs:
        raise SnapshotNotFoundError(f"{near}: has no run that is uploaded to {far}")
    return [NearFolder(folder) for folder in runs]


def tier_rows(folder: NearFolder, heads: Mapping[int, object], line: RunLine) -> Iterator[dict[str, Any]]:
    """Yield where each step of a run is, ascending. `heads` are the manifests in the far root, or their errors."""
    states = _states(folder.path)
    steps = folder.steps()
    for step in sorted(steps.keys() | heads.keys()):
        head = heads.get(step)
        far_id = head.save_id if isinstance(head, ManifestHead) else ""
        row = _tiered_row(folder, step, steps.get(step), states.get(step), far_id)
        shown = steps[step].head if step in steps else head
        if isinstance(shown, ManifestHead):
            standing = line.standing(step, shown.save_id, origin_of(shown.metadata))
            if standing in (Standing.OFF, Standing.UNDECIDED):
                row["far"] = f"{row['far']}, {'off the line' if standing == Standing.OFF else standing}"
        yield row


def _states(folder: str) -> dict[int, StepStatus]:
    """Return what the uploader of a folder says, if it runs."""
    try:
        with closing(ControlClient(folder, ANSWERS)) as client:
            return client.ask(ControlRequest("status"), ANSWERS).steps
    except UploaderError:
        return {}


def _tiered_row(
    folder: NearFolder, step: int, near: NearStep | None, state: StepStatus | None, far_id: str
) -> dict[str, Any]:
    text, nbytes = "absent", 0
    if near is not None:
        files, sizes = folder.files(step), near.head.sizes()
        held = sum(files.get(name) == size for name, size in sizes.items())
        text = "whole" if held == len(sizes) else f"{held} of {len(sizes)} files"
        nbytes = near.head.nbytes
    if far_id and (near is None or near.save_id == far_id):
        far = "whole"
    else:
        far = far_text(state.far, state.sent, state.total) if state is not None else "absent"
    return {"step": step, "bytes": nbytes, "near": text, "far": far}
