"""Compressed snapshots of several ranks, and their restore on other ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from snapshot import Snapshot, StateDict, TakeOptions
from tests.helpers.versions import distribute

SHAPE = (1200, 700)


def _whole():
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()


def _save(path, way, base=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = StateDict(
        sharded=distribute(_whole(), mesh, [Shard(0)]),
        same=torch.arange(90_000.0),
        mine=torch.full((500,), float(dist.get_rank())),
    )
    app = {"s": state}
    if way == "take":
        Snapshot.take(path, app, replicated=["s/same"], base=base, options=TakeOptions(compression="zstd"))
    else:
        Snapshot.async_take(path, app, replicated=["s/same"], base=base, options=TakeOptions(compression="zstd")).wait()


def _load(path, dim):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = StateDict(
        sharded=zeros(SHAPE, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(dim)]),
        same=torch.zeros(90_000),
    )
    Snapshot(path).restore({"s": state})
    part = distribute(_whole(), mesh, [Shard(dim)])
    return bool(torch.equal(state["sharded"].to_local(), part.to_local())) and bool(
        torch.equal(state["same"], torch.arange(90_000.0))
    )


@pytest.mark.parametrize("way", ["take", "async_take"])
def test_compressed_snapshot_restores_on_another_world_size(four, two, folder, way):
    two.run(_save, f"{folder}/s", way)
    snapshot = Snapshot(f"{folder}/s")
    assert snapshot.metadata.format == "snapshot/2"
    assert snapshot.verify()
    assert all(four.run(_load, f"{folder}/s", 0))
    assert all(four.run(_load, f"{folder}/s", 1))
    assert all(two.run(_load, f"{folder}/s", 1))
    assert torch.equal(snapshot.read_object("0/s/sharded"), _whole())
    snapshot.copy(f"{folder}/copy")
    assert all(two.run(_load, f"{folder}/copy", 0))
    Snapshot(f"{folder}/copy").convert(f"{folder}/plain")
    assert not Snapshot.diff(f"{folder}/plain", f"{folder}/s")


def test_base_shares_compressed_files_of_ranks(two, folder):
    two.run(_save, f"{folder}/s", "take")
    two.run(_save, f"{folder}/t", "take", f"{folder}/s")
    assert all(
        file.origin for file in Snapshot(f"{folder}/t")._manifest.open().files.values() if file.packed is not None
    )
    Snapshot(f"{folder}/s").delete()
    assert Snapshot(f"{folder}/t").verify()
    assert all(two.run(_load, f"{folder}/t", 1))
