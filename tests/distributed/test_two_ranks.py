"""What two ranks promise, in short: the smoke tests of the room."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, SnapshotError, StateDict

pytestmark = pytest.mark.smoke


def _state(value, own):
    return {"s": StateDict(shared=torch.full((100_000,), value), own=torch.full((1000,), float(own)), step=int(value))}


def _take_and_restore(path):
    rank = dist.get_rank()
    Snapshot.take(path, _state(7.0, rank), replicated=["s/shared", "s/step"])
    live = _state(0.0, -1)
    report = Snapshot(path).restore(live)
    state = live["s"]
    return bool((state["shared"] == 7).all()), state["own"][0].item(), state["step"], list(map(str, report))


def test_two_ranks_restore_what_they_share_and_what_each_owns(two, folder):
    path = f"{folder}/s"
    assert two.run(_take_and_restore, path) == [(True, 0.0, 7, []), (True, 1.0, 7, [])]
    snapshot = Snapshot(path)
    assert snapshot.metadata.world_size == 2
    assert snapshot.verify()
    assert snapshot.read_object("1/s/own")[0] == 1.0
    stored = sum(file.stat().st_size for file in Path(path, "data").iterdir())
    assert 4 * 102_000 <= stored < 4 * 150_000, "the replica is stored once"


class _Broken(StateDict):
    def state_dict(self):
        raise ArithmeticError("of rank 1")


def _take_of_a_rank_that_fails(path):
    broken = {"s": _Broken()} if dist.get_rank() == 1 else _state(9.0, 0)
    Snapshot.async_take(path, broken, overwrite=True).wait()


def test_a_rank_that_fails_is_named_on_both_and_the_old_snapshot_stays(two, folder):
    path = f"{folder}/s"
    two.run(_take_and_restore, path)
    errors = two.outcomes(_take_of_a_rank_that_fails, path)
    assert all(isinstance(error, SnapshotError | ArithmeticError) for error in errors), errors
    assert "rank 1" in str(errors[0])
    assert Snapshot(path).read_object("0/s/step") == 7
    assert Snapshot(path).verify()
