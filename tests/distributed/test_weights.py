"""Checkpoints of several ranks: merged into one, and loaded by other ranks, each its own part."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import snapshot
import snapshot_merge
from snapshot import Snapshot, StateDict, Target
from tests.helpers.versions import distribute


def _whole(seed):
    return torch.randn(70, 30, generator=torch.Generator().manual_seed(seed))


def _save(path, seed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute(_whole(seed), mesh, [Shard(seed % 2)])
    own = torch.full((5,), float(10 * seed + dist.get_rank()))
    Snapshot.take(path, {"model": StateDict(w=sharded), "mine": StateDict(own=own)})


def _load(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    got = snapshot.load(path, select=["model/**"], parts=(mesh, {"w": Shard(0)}))
    return got["w"].to_local(), got["w"].full_tensor()


def test_merge_and_load_of_sharded_checkpoints_on_other_ranks(two, four, folder):
    for seed in range(3):
        two.run(_save, f"{folder}/{seed}", seed)
    sources = [f"{folder}/{seed}" for seed in range(3)]
    snapshot_merge.merge(sources, f"{folder}/out")
    expected = (_whole(0) + _whole(1) + _whole(2)) / 3
    merged = Snapshot(f"{folder}/out")
    assert torch.equal(merged.read_object("0/model/w"), expected)
    for rank in range(2):
        own = sum(torch.full((5,), float(10 * seed + rank)) for seed in range(3)) / 3
        assert torch.equal(merged.read_object(f"{rank}/mine/own"), own)
    for rank, (local, whole) in enumerate(four.run(_load, f"{folder}/out")):
        assert torch.equal(local, expected[rank * 18 : (rank + 1) * 18])
        assert torch.equal(whole, expected)
    snapshot_merge.merge(sources, Target(f"{folder}/out.safetensors", "safetensors"), select=["model/**"])
    assert torch.equal(snapshot.load(f"{folder}/out.safetensors")["w"], expected)
