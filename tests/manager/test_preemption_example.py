"""The example of a job that is told to stop, run as its reader would."""

from pathlib import Path

from snapshot import SnapshotManager
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[2]


def test_preemption_example_resumes_exactly(tmp_path, warm):
    shown = warm.run(ROOT / "examples" / "preemption.py", tmp_path, PYTHONPATH=PYTHONPATH).splitlines()
    assert shown[:2] == ["stopping: saved step 33", "resumed from step 33"]
    assert "bit for bit" in shown[2]
    assert SnapshotManager(tmp_path / "told", signals=()).steps() == [40, 60]
    assert SnapshotManager(tmp_path / "whole", signals=()).steps() == [40, 60]
