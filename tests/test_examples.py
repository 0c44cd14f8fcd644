"""Examples are the first code that a newcomer runs: they run here too."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from snapshot import Snapshot, StateDict

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, QUICKSTART], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step-30" in done.stdout
    assert "bit for bit the same" in done.stdout
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]  # torch's own cache
    assert left == []


def test_the_comparison_sees_one_bit(quickstart: ModuleType, tmp_path: Path) -> None:
    weight = torch.zeros(3)
    for name, last in (("a", 0.0), ("same", 0.0), ("b", -0.5)):
        weight[2] = last
        state = {"model": StateDict(weight=weight), "progress": StateDict(losses=[1.0])}
        Snapshot.take(tmp_path / name / f"step-{quickstart.STEPS}", state)
    assert quickstart.differences(tmp_path / "a", tmp_path / "same") == []
    assert quickstart.differences(tmp_path / "a", tmp_path / "b") == ["weight"]


def test_the_example_forgets_nothing_that_matters(quickstart: ModuleType, tmp_path: Path) -> None:
    """Without the random numbers the resumed run must differ: else the example would show nothing."""
    quickstart.train(tmp_path / "whole", None)
    whole = Snapshot(tmp_path / "whole" / f"step-{quickstart.STEPS}").read_object("0/progress/losses")
    state = Snapshot(tmp_path / "whole" / "step-30").get_state_dict_for_key("progress")
    assert whole[:30] == state["losses"]

    class NoRandomNumbers:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {}

    original = quickstart.RNGState
    quickstart.RNGState = NoRandomNumbers
    try:
        quickstart.train(tmp_path / "broken", None)
        for step in (40, 50, 60):
            Snapshot(tmp_path / "broken" / f"step-{step}").delete()
        quickstart.train(tmp_path / "broken", None)
    finally:
        quickstart.RNGState = original
    resumed = Snapshot(tmp_path / "broken" / f"step-{quickstart.STEPS}").read_object("0/progress/losses")
    assert resumed[:30] == whole[:30]
    assert resumed[30:] != whole[30:]
