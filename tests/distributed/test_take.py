"""Takes of several ranks: replicas once, each rank's own, and what comes back."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import RNGState, Snapshot, StateDict, TakeOptions


def stored(path):
    return sum(each.stat().st_size for each in Path(path, "data").iterdir())


def manifest(path):
    return json.loads(Path(path, ".snapshot_metadata").read_bytes())


def model(rank=0):
    torch.manual_seed(7)
    return {f"layer.{i}": torch.randn(64, 1024) for i in range(16)}


def _replicated(path):
    rank = dist.get_rank()
    state = StateDict(**model(), step=3, mine=rank, own=torch.full((5000,), float(rank)))
    Snapshot.take(path, {"s": state, "rng": RNGState()}, replicated=["s/layer.*"])
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["step"] = state["mine"] = -1
    Snapshot(path).restore({"s": state})
    for name, value in model().items():
        assert state[name].equal(value)
    return state["step"], state["mine"], float(state["own"].mean())


def test_take_of_ranks_writes_replicas_once_and_restores_rank_specific_values(four, folder):
    path = f"{folder}/s"
    assert four.run(_replicated, path) == [(3, rank, float(rank)) for rank in range(4)]
    one = 16 * 64 * 1024 * 4
    own = 4 * 5000 * 4
    assert one + own < stored(path) < one + own + 200_000
    assert not list(Path(path, "data").glob("*.json"))
    assert Snapshot(path).verify()


def _sharded(path, to):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    layouts = {
        "one": ((4,), [Shard(0)]),
        "cols": ((4,), [Shard(1)]),
        "rep": ((4,), [Replicate()]),
        "two": ((2, 2), [Shard(0), Shard(1)]),
        "hsdp": ((2, 2), [Replicate(), Shard(0)]),
        "same": ((2, 2), [Shard(0), Shard(0)]),
    }
    shape, place = layouts[path.rsplit("-", 1)[1]]
    full = torch.arange(7 * 10, dtype=torch.float32).view(7, 10)
    mesh = init_device_mesh("cpu", shape)
    saved = distribute_tensor(full, mesh, place)
    Snapshot.take(path, {"s": StateDict(w=saved, step=1)})
    shape, place = layouts[to]
    mesh = init_device_mesh("cpu", shape)
    live = distribute_tensor(torch.zeros(7, 10), mesh, place)
    report = Snapshot(path).restore({"s": (state := StateDict(w=live, step=0))})
    assert state["w"] is live
    assert live.full_tensor().equal(full)
    plain = StateDict(w=torch.zeros(7, 10), step=0)
    Snapshot(path).restore({"s": plain})
    assert plain["w"].equal(full)
    assert Snapshot(path).read_object("0/s/w").equal(full)
    return [str(line) for line in report]


@pytest.mark.parametrize("to", ["one", "cols", "rep", "two", "hsdp", "same"])
@pytest.mark.parametrize("was", ["one", "cols", "rep", "two", "hsdp", "same"])
def test_restore_of_any_sharding_layout_into_any_other(four, folder, was, to):
    path = f"{folder}/s-{was}"
    lines = four.run(_sharded, path, to)
    if was == to:
        assert lines == [[]] * 4
    assert Snapshot(path).verify()
    data = sum(each["size"] - each.get("header", 0) for each in manifest(path)["files"].values())
    assert data == 7 * 10 * 4


def _beside_collectives(path):
    state = StateDict(w=torch.ones(1 << 20), own=torch.full((1 << 18,), float(dist.get_rank())))
    pending = [Snapshot.async_take(f"{path}-{i}", {"s": state}, replicated=["s/w"]) for i in range(3)]
    total = torch.zeros(1)
    while True:  # as long as any rank wants to
        dist.all_reduce(total.add_(1), op=dist.ReduceOp.MAX)
        done = torch.tensor([float(all(each.done() for each in pending))])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done and total >= 20:
            break
    for each in pending:
        each.wait()
    return float(total) >= 20


def test_async_take_beside_running_collectives(two, folder):
    assert two.run(_beside_collectives, f"{folder}/s") == [True, True]
    assert all(Snapshot(f"{folder}/s-{i}").verify() for i in range(3))


def _read_back(path, damaged):
    from snapshot.testing import faulty

    rank = dist.get_rank()
    state = StateDict(own=torch.full((200_000,), float(rank)), shared=torch.arange(300_000))
    fault = faulty(on="write", path=f"*-{damaged}-0.safetensors", flip=9, must_happen=rank == damaged)
    with fault:
        Snapshot.take(
            f"faulty+file://{path}", {"s": state}, replicated=["s/shared"], options=TakeOptions(read_back=True)
        )


def test_read_back_mismatch_on_one_rank_commits_nothing(two, folder):
    for damaged in (0, 1):
        errors = two.outcomes(_read_back, f"{folder}/s", damaged)
        assert all("nothing was committed" in str(error) for error in errors), errors
        assert not Snapshot(f"{folder}/s").exists()
