"""Examples are the first code that a newcomer runs: they run here too."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from snapshot import Snapshot, StateDict
from tests.helpers.torchrun import rank_environments
from tests.helpers.trees import PYTHONPATH
from tests.helpers.warm_interpreter import Warm

pytestmark = pytest.mark.examples

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


def test_quickstart_example_resumes_exactly(tmp_path: Path, warm: Warm) -> None:
    shown = warm.run(QUICKSTART, PYTHONPATH=PYTHONPATH, TMPDIR=str(tmp_path))
    assert "resumed from step-30" in shown
    assert "bit for bit the same" in shown
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]  # torch's own cache
    assert left == []


def test_quickstart_example_comparison_finds_one_bit(quickstart: ModuleType, tmp_path: Path) -> None:
    weight = torch.zeros(3)
    for name, last in (("a", 0.0), ("same", 0.0), ("b", -0.5)):
        weight[2] = last
        state = {"model": StateDict(weight=weight), "progress": StateDict(losses=[1.0])}
        Snapshot.take(tmp_path / name / f"step-{quickstart.STEPS}", state)
    assert quickstart.differences(tmp_path / "a", tmp_path / "same") == []
    assert quickstart.differences(tmp_path / "a", tmp_path / "b") == ["weight"]


def test_quickstart_example_without_rng_state_differs(quickstart: ModuleType, tmp_path: Path) -> None:
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


def torchrun(world: int, example: str, *arguments: object) -> list[str]:
    """What an example prints on so many ranks, in lines. The port is any that is free."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launch, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def ranks(warm: Warm, world: int, example: str, *arguments: object) -> list[str]:
    """The same with what torchrun does for its ranks, but in forks, which need not import torch."""
    script = ROOT / "examples" / example
    with rank_environments(world) as environments:
        started = [warm.start(script, *arguments, **environment) for environment in environments]
        return [line for each in started for line in warm.finish(each).splitlines()]


def test_ddp_example_resumes_exactly(tmp_path: Path, warm: Warm) -> None:
    whole = torchrun(2, "ddp.py", tmp_path, "--steps", 6)
    shutil.rmtree(tmp_path / "step-6")
    resumed = ranks(warm, 2, "ddp.py", tmp_path, "--steps", 6)
    assert resumed[0] == "resumed from step-3"
    assert [line.partition(":")[0] for line in whole] == [f"step {step}" for step in range(1, 7)]
    assert resumed[1:] == whole[3:]  # to the last of nine digits
    snapshot = Snapshot(tmp_path / "step-6")
    assert snapshot.metadata.world_size == 2
    own = {path.split("/")[1] for path in snapshot.get_manifest() if path.startswith("1/")}
    assert own == {"rng"}  # all else is the same on both, and stands once


def test_fsdp2_example_resumes_on_another_number_of_ranks(tmp_path: Path, warm: Warm) -> None:
    assert ranks(warm, 2, "fsdp2.py", tmp_path, "--steps", 5)[-1].endswith(", saved")
    resumed = ranks(warm, 1, "fsdp2.py", tmp_path, "--steps", 10)
    assert resumed[0].startswith("resumed at step 5; ")
    assert "0 tensors" not in resumed[0]
    assert resumed[1].startswith("step 10: ")
    assert Snapshot(tmp_path / "latest").metadata.world_size == 1


def test_reshard_example_of_three_ranks_restores_on_two_and_in_one_process(tmp_path: Path, warm: Warm) -> None:
    assert ranks(warm, 3, "reshard.py", tmp_path) == ["saved by 3 ranks"]
    restored = ranks(warm, 2, "reshard.py", tmp_path)
    assert restored[0] == "saved by 3 ranks, restored by 2:"
    assert restored[-1].split() == ["resharded", "state/weight:", "from", "shards", "of", "another", "layout"]
    read = warm.run(ROOT / "examples" / "reshard.py", tmp_path).splitlines()
    assert read == ["read (10000, 64), and row 4321 of it: 276544 to 276607"]


def test_roles_example_trains_on_each_prompt_once(tmp_path: Path, warm: Warm) -> None:
    first = ranks(warm, 3, "roles.py", tmp_path, "--prompts", 3)
    assert first == ["begins after step 0", "trained on 3 of 3 prompts, 3 different"]
    resumed = ranks(warm, 3, "roles.py", tmp_path, "--prompts", 8)
    assert resumed == ["begins after step 5", "trained on 8 of 8 prompts, 8 different"]
    assert Snapshot(tmp_path / "step-13").read_object("0/trained/prompts") == list(range(8))


def test_bare_loop_example_resumes_in_the_middle_of_an_epoch(tmp_path: Path, warm: Warm) -> None:
    shown = warm.run(ROOT / "examples" / "bare_loop.py", tmp_path, PYTHONPATH=PYTHONPATH)
    assert "bit for bit" in shown
    assert Snapshot(tmp_path / "broken" / "step-20").verify()
    assert Snapshot(tmp_path / "broken" / "step-20").read_object("0/progress/epoch") == 2
