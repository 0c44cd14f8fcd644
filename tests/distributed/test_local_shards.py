"""What each rank holds of a sharded tensor: prepared part by part, read into place, and stored as it is if it wraps."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from snapshot import RestoreError, Snapshot, StateDict
from tests.helpers.wrapper_tensors import Quantised, quantised

WHOLE = torch.arange(40.0).view(10, 4)


def dtensor(whole, *placements):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2) if len(placements) > 1 else (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, placements)


def sharded_tensor(whole):
    """A ShardedTensor whose ranks hold rows, the last ones more than the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [whole.shape[0] // world * each for each in range(world)] + [whole.shape[0]]
    part = whole[rows[rank] : rows[rank + 1]].clone()
    shard = LocalShard.from_tensor_and_offsets(part, [rows[rank], 0], rank)
    return init_from_local_shards([shard], *whole.shape)


def _prepare(path, what):
    seen = []

    def prepare(name, tensor, tracing):
        seen.append((name, type(tensor) is torch.Tensor, tuple(tensor.shape), tracing))
        return tensor.to(torch.bfloat16)

    # of a tensor of one row some ranks have nothing
    few = dtensor(torch.ones(1, 4), Shard(0))
    state = StateDict(d=dtensor(WHOLE, Shard(0)), s=sharded_tensor(WHOLE), few=few, p=torch.ones(3))
    state["tied"] = state["d"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(path, {"s": state}, _custom_tensor_prepare_func=prepare)
    return seen


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_prepare_function_receives_local_shards(ranks, request, folder):
    seen = request.getfixturevalue(ranks).run(_prepare, f"{folder}/s", None)
    for number, each in enumerate(seen):
        assert all(plain for _, plain, _, _ in each)
        shapes = {name: (shape, tracing) for name, _, shape, tracing in each}
        assert "s/tied" not in shapes
        assert shapes["s/few"] == (((1, 4), False) if number == 0 else ((0, 0), True))
        assert 0 < shapes["s/d"][0][0] < 10
        assert shapes["s/s"][0][1] == 4
    snapshot = Snapshot(f"{folder}/s")
    for name in ("d", "s", "tied", "few", "p"):
        read = snapshot.read_object(f"0/s/{name}")
        assert read.dtype == torch.bfloat16
        assert torch.equal(read.float(), {"few": torch.ones(1, 4), "p": torch.ones(3)}.get(name, WHOLE))
    assert snapshot.verify()


def _prepare_badly(path, kind):
    def prepare(name, tensor, tracing):
        if kind == "shape":
            return tensor.reshape(-1)
        if kind == "dtypes":
            return tensor.half() if dist.get_rank() else tensor
        return tensor.to_sparse()

    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one, is what is asked
        Snapshot.take(path, {"s": StateDict(d=dtensor(WHOLE, Shard(0)))}, _custom_tensor_prepare_func=prepare)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("shape", "not the shape"), ("dtypes", "s/d"), ("sparse", "must return a plain, dense tensor")],
)
def test_prepare_function_may_not_change_shape_or_kind_of_shards(two, folder, kind, text):
    assert any(text in each for each in two.run(_prepare_badly, f"{folder}/s", kind))
    assert not Snapshot(f"{folder}/s").exists()


def _read(path, world_of_mesh):
    snapshot = Snapshot(path)
    outs = [
        dtensor(torch.zeros(10, 4), Shard(1)),
        dtensor(torch.zeros(10, 4), Replicate()),
        sharded_tensor(torch.zeros(10, 4)),
    ]
    if dist.get_world_size() == 4:
        outs.append(dtensor(torch.zeros(10, 4), Shard(0), Shard(1)))
    for out in outs:
        local = out.local_shards()[0].tensor if not isinstance(out, DTensor) else out.to_local()
        address = local.data_ptr()
        for name in ("d", "plain"):
            local.zero_()
            assert snapshot.read_object(f"0/s/{name}", obj_out=out) is out
            if isinstance(out, DTensor):
                assert torch.equal(out.full_tensor(), WHOLE)
                assert out.to_local().data_ptr() == address
            else:
                begin = out.local_shards()[0].metadata.shard_offsets[0]
                assert torch.equal(local, WHOLE[begin : begin + local.shape[0]])
    for bad in (dtensor(torch.zeros(8, 4), Shard(0)), dtensor(torch.zeros(10, 4).half(), Shard(0))):
        with pytest.raises(RestoreError, match="obj_out"):
            snapshot.read_object("0/s/d", obj_out=bad)
        assert not bad.to_local().any()


def _take(path):
    Snapshot.take(path, {"s": StateDict(d=dtensor(WHOLE, Shard(0)), plain=WHOLE)}, replicated=["s/plain"])


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_read_object_into_local_shards(two, ranks, request, folder):
    two.run(_take, f"{folder}/s")
    request.getfixturevalue(ranks).run(_read, f"{folder}/s", None)


def _ranged(path):
    from snapshot.testing import recording

    whole = torch.arange(1 << 20).float().view(1024, 1024)
    Snapshot.take(path, {"s": StateDict(d=dtensor(whole, Shard(0)))})
    out = dtensor(torch.zeros(1024, 1024), Shard(1))
    with recording() as log:
        snapshot = Snapshot(f"recording+file://{path}")
        few = dtensor(torch.zeros(1024, 1024), Shard(0))
        snapshot.read_object("0/s/d", obj_out=few)
    assert torch.equal(few.to_local(), whole[dist.get_rank() * 512 :][:512])
    Snapshot(path).read_object("0/s/d", obj_out=out)
    assert torch.equal(out.full_tensor(), whole)
    return log.nbytes("read_into")


def test_read_object_reads_only_the_ranges_of_the_local_shards(two, folder):
    assert all(2 << 20 <= nbytes < (2 << 20) + 20_000 for nbytes in two.run(_ranged, f"{folder}/s"))


def _wrapped(path):
    mesh = DeviceMesh("cpu", [0, 1])
    rank = dist.get_rank()

    def make(seed, placement):
        return DTensor.from_local(quantised(seed + rank), mesh, [placement], run_check=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Snapshot.take(path, {"s": StateDict(w=make(1, Shard(0)))})
    live = make(5, Shard(0))
    codes = live._local_tensor.codes
    Snapshot(path).restore({"s": StateDict(w=live)})
    assert live._local_tensor.codes is codes
    assert torch.equal(codes, quantised(1 + rank).codes)
    assert type(live._local_tensor) is Quantised
    other = make(5, Replicate())
    with pytest.raises(RestoreError, match="s/w"):
        Snapshot(path).restore({"s": StateDict(w=other)})
    assert torch.equal(other._local_tensor.codes, quantised(5 + rank).codes)


def test_sharded_tensor_with_a_wrapped_local_tensor_is_stored_per_rank(two, folder):
    two.run(_wrapped, f"{folder}/s")


def _values(path):
    """Some values are the same on all ranks, some are not: each gets its own."""
    import datetime

    rank = dist.get_rank()

    def state(number):
        return {"same": datetime.date(2024, 1, 1), "own": datetime.date(2024, 1, 1 + rank), "w": quantised(3),
                "v": quantised(4 + rank), "generator": torch.Generator().manual_seed(number)}  # fmt: skip

    Snapshot.take(path, {"s": StateDict(state(rank))})
    live = StateDict(state(9), own=None)
    live["v"] = quantised(8)
    Snapshot(path).restore({"s": live})
    assert live["own"] == datetime.date(2024, 1, 1 + rank)
    assert torch.equal(live["v"].codes, quantised(4 + rank).codes)
    assert live["generator"].initial_seed() == rank


def test_replicated_and_rank_specific_wrapped_values_are_restored(two, folder):
    two.run(_values, f"{folder}/s")
    manifest = Snapshot(f"{folder}/s").get_manifest()
    assert "1/s/same" not in manifest
    assert "1/s/own" in manifest


@dataclasses.dataclass
class Config:
    lr: float
    weight: torch.Tensor
    rank: int = 0


def _on_more_ranks(path, take):
    rank = dist.get_rank()
    if take:
        state = StateDict(c=Config(0.5, torch.arange(3.0)), w=quantised(1))
        return Snapshot.take(path, {"s": state}, replicated=["s/**"]) and None
    live = StateDict(c=Config(0.0, torch.zeros(3), rank), w=quantised(2))
    weight, codes = live["c"].weight, live["w"].codes
    Snapshot(path).restore({"s": live})
    assert live["c"].lr == 0.5
    assert live["c"].weight is weight
    assert torch.equal(weight, torch.arange(3.0))
    assert live["w"].codes is codes
    assert torch.equal(codes, quantised(1).codes)
    return None


def test_replicated_wrapped_values_are_restored_on_new_ranks(two, four, folder):
    two.run(_on_more_ranks, f"{folder}/s", True)
    four.run(_on_more_ranks, f"{folder}/s", False)
    assert not any(path.startswith("1/s/c") for path in Snapshot(f"{folder}/s").get_manifest())
