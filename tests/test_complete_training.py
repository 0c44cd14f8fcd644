"""The example that the docs show as a complete script goes on exactly after a kill, a signal, and in another layout."""

import re
import signal
from pathlib import Path

import pytest

from snapshot import Snapshot
from tests.helpers.torchrun import rank_environments
from tests.helpers.warm_interpreter import Failed, Warm

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[1] / "examples" / "complete_training.py"
STEPS, SAVE_EVERY = 32, 8  # an epoch has 16 steps, so that step 16 is saved at its end
KILLED_AT, TOLD_AT = 20, 13

SENDING = f"""
import os, runpy, signal, sys
import torch

update, calls = torch.amp.GradScaler.update, iter(range(1, {STEPS} + 1))

def update_and_send(self):
    update(self)
    if next(calls) == int(os.environ["AT_STEP"]) and os.environ["RANK"] in os.environ["TO_RANKS"]:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))

torch.amp.GradScaler.update = update_and_send
sys.argv[0] = {str(EXAMPLE)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The example in a process that sends itself a signal in the middle of a step."""


def run(warm: Warm, world: int, folder: Path, *flags: str, script: str = str(EXAMPLE), **variables: object) -> str:
    """Return what the example prints on so many ranks. If some fail, raise the error of one of them."""
    arguments = [folder, "--steps", STEPS, "--save-every", SAVE_EVERY, *flags]
    extra = {name: str(value) for name, value in variables.items()}
    with rank_environments(world) as environments:
        started = [warm.start(script, *arguments, **each, LOCAL_RANK=each["RANK"], **extra) for each in environments]
        ended = [finish(warm, each) for each in started]
    failures = [each for each in ended if isinstance(each, Failed)]
    if failures:
        raise failures[0]
    return "".join(map(str, ended))


def finish(warm: Warm, started: tuple[int, str]) -> str | Failed:
    try:
        return warm.finish(started)
    except Failed as error:
        return error


@pytest.fixture(scope="module")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on two ranks that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(warm, 2, folder)
    return folder


def last_step(folder: Path) -> Snapshot:
    return Snapshot(folder / f"step-{STEPS}")


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs at the end of two runs, but for Python's generator, which is not seeded and not used."""
    return list(map(str, Snapshot.diff(last_step(first), last_step(second), exclude=["rng/python"])))


def test_complete_training_goes_on_to_the_same_bits_after_a_kill(tmp_path: Path, warm: Warm, undisturbed: Path) -> None:
    with pytest.raises(Failed, match=f"exit status {-signal.SIGKILL}"):
        run(warm, 2, tmp_path, script=SENDING, SIGNAL=int(signal.SIGKILL), AT_STEP=KILLED_AT, TO_RANKS="01")
    assert not last_step(tmp_path).exists()
    assert re.match(r"resumed from step (8|16)\n", run(warm, 2, tmp_path))
    assert differences(undisturbed, tmp_path) == []


def test_complete_training_that_one_rank_was_told_to_stop_goes_on_to_the_same_bits(
    tmp_path: Path, warm: Warm, undisturbed: Path
) -> None:
    stopped = run(warm, 2, tmp_path, script=SENDING, SIGNAL=int(signal.SIGTERM), AT_STEP=TOLD_AT, TO_RANKS="1")
    stopped_at = int(stopped.splitlines()[-1].split()[1].rstrip(":"))
    assert TOLD_AT <= stopped_at < STEPS
    assert run(warm, 2, tmp_path).startswith(f"resumed from step {stopped_at}\n")
    assert differences(undisturbed, tmp_path) == []


def test_complete_training_moves_between_fsdp2_ddp_and_one_process(tmp_path: Path, warm: Warm) -> None:
    run(warm, 2, tmp_path, "--shard", script=SENDING, SIGNAL=int(signal.SIGTERM), AT_STEP=9, TO_RANKS="0")
    run(warm, 3, tmp_path, script=SENDING, SIGNAL=int(signal.SIGTERM), AT_STEP=3, TO_RANKS="2")
    shown = run(warm, 1, tmp_path)
    assert shown.startswith("resumed from step ")
    assert f"step {STEPS}: " in shown
    assert last_step(tmp_path).metadata.world_size == 1
