"""Restores that read once for all ranks, when one rank cannot read its share."""

import pytest
import torch
import torch.distributed as dist

from snapshot import RestoreOptions, Snapshot, SnapshotError, StateDict
from snapshot.errors import StorageError
from snapshot.testing import Fault, tapped

ELEMENTS = 12 << 20


def _save(path):
    Snapshot.take(path, {"s": StateDict(w=torch.arange(float(ELEMENTS)))}, replicated=["**"])


def _load(path, failing, nth):
    live = StateDict(w=torch.zeros(ELEMENTS))
    fault = Fault(on="read_into", path="*.safetensors", nth=nth, times=None, error=StorageError("the disk failed"))
    with tapped("failing", *([fault] if dist.get_rank() == failing else [])):
        try:
            Snapshot(f"failing+file://{path}").restore(
                {"s": live}, options=RestoreOptions(verify=False, read_once=True)
            )
        except SnapshotError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("failing", [0, 1])
def test_read_once_fails_on_all_ranks_if_one_cannot_read(two, folder, failing, nth):
    """It fails while the parts that it received before are still being copied."""
    two.run(_save, f"{folder}/s")
    for _ in range(3):
        assert all("the disk failed" in error for error in two.run(_load, f"{folder}/s", failing, nth))
