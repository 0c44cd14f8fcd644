"""What two ranks promise, in short: the smoke tests of the room."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import Sharded, Snapshot, SnapshotError, StateDict
from snapshot.plugins.file import files
from snapshot.plugins.file.files import drop_cache, open_direct


def _state(value, own):
    return {"s": StateDict(shared=torch.full((100_000,), value), own=torch.full((1000,), float(own)), step=int(value))}


def _take_and_restore(path):
    rank = dist.get_rank()
    Snapshot.take(path, _state(7.0, rank), replicated=["s/shared", "s/step"])
    live = _state(0.0, -1)
    report = Snapshot(path).restore(live)
    state = live["s"]
    return bool((state["shared"] == 7).all()), state["own"][0].item(), state["step"], list(map(str, report))


def test_take_and_restore_of_shared_and_own_values_on_two_ranks(two, folder):
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


def test_take_failing_on_one_rank_names_it_and_keeps_the_old_snapshot(two, folder):
    path = f"{folder}/s"
    two.run(_take_and_restore, path)
    errors = two.outcomes(_take_of_a_rank_that_fails, path)
    assert all(isinstance(error, SnapshotError | ArithmeticError) for error in errors), errors
    assert "rank 1" in str(errors[0])
    assert Snapshot(path).read_object("0/s/step") == 7
    assert Snapshot(path).verify()


def _count_direct_reads(path, value):
    """Return how many files a cold restore opens with O_DIRECT for reading."""
    for file in Path(path, "data").iterdir():
        drop_cache(str(file))
    opened = []

    def count(full, flags, **kwargs):
        opened.append(full)
        return open_direct(full, flags, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open_direct", count)
        Snapshot(path).restore({"s": value})
    return len(opened)


def _value(sharded):
    if not sharded:
        return StateDict(x=torch.zeros(2 << 20))
    begin = dist.get_rank() << 20
    return StateDict(x=Sharded(torch.zeros(1 << 20), global_shape=(2 << 20,), offsets=(begin,)))


def _restore_cold(path, saved_sharded, restored_sharded):
    Snapshot.take(path, {"s": _value(saved_sharded)}, replicated=[] if saved_sharded else ["s/x"])
    return _count_direct_reads(path, _value(restored_sharded))


def test_restore_on_ranks_of_a_host_reads_shared_files_through_the_page_cache(two, folder):
    if sum(two.run(_restore_cold, f"{folder}/sharded", True, True)) == 0:
        pytest.skip("no file here is ever cold, or O_DIRECT is not used")
    assert two.run(_restore_cold, f"{folder}/shared", False, False) == [0, 0]
    assert two.run(_restore_cold, f"{folder}/gathered", True, False) == [0, 0], "both ranks read all shards"
    assert sum(two.run(_restore_cold, f"{folder}/scattered", False, True)) > 0, "each rank reads another half"
