"""Test the contract of the plugin, and save and restore a snapshot: `pip install -e ../.. . pytest && pytest`."""

import pytest
import torch
from snapshot_sqlite import SqliteStorage

from snapshot import Snapshot, StateDict
from snapshot.testing import StorageTests, faulty


class TestSqlite(StorageTests):
    capabilities = SqliteStorage.capabilities

    @pytest.fixture
    def url(self, tmp_path):
        return f"sqlite://{tmp_path}/test.db/run/step-1"


def test_a_snapshot_in_a_database(tmp_path):
    url = f"sqlite://{tmp_path}/test.db/run/step-1"
    Snapshot.take(url, {"state": StateDict(x=torch.arange(1_000_000), step=3)})
    state = StateDict(x=torch.zeros(1_000_000, dtype=torch.long), step=0)
    Snapshot(url).restore({"state": state})
    assert state["step"] == 3
    assert torch.equal(state["x"], torch.arange(1_000_000))


def test_a_disk_that_fails_leaves_no_snapshot(tmp_path):
    url = f"sqlite://{tmp_path}/test.db/run/step-1"
    with faulty(on="write", error=OSError(28, "No space left on device")), pytest.raises(OSError, match="No space"):
        Snapshot.take(f"faulty+{url}", {"state": StateDict(x=torch.arange(1_000_000))})
    assert not Snapshot(url).exists()
