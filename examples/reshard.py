"""Save a sharded tensor on some number of ranks, and restore it on another number.

torchrun --nproc-per-node 4 examples/reshard.py FOLDER     the first time, it saves: every rank its rows
torchrun --nproc-per-node 2 examples/reshard.py FOLDER     then it restores: every rank its columns
python examples/reshard.py FOLDER                          one process alone reads what it likes of it
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor, zeros

from snapshot import Snapshot, StateDict

WHOLE = torch.arange(10_000 * 64, dtype=torch.float32).view(10_000, 64)


def save(snapshot: Snapshot) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows: list[Placement] = [Shard(0)]
    app_state = {"state": StateDict(weight=distribute_tensor(WHOLE, mesh, rows), step=7)}
    Snapshot.take(snapshot.path, app_state)
    if dist.get_rank() == 0:
        print(f"saved by {snapshot.metadata.world_size} ranks")


def restore(snapshot: Snapshot) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = zeros(WHOLE.shape, device_mesh=mesh, placements=[Shard(1)])  # columns; it was saved in rows
    state = StateDict(weight=weight, step=0)
    report = snapshot.restore({"state": state})
    assert state["step"] == 7
    assert torch.equal(weight.full_tensor(), WHOLE)
    if dist.get_rank() == 0:
        print(f"saved by {snapshot.metadata.world_size} ranks, restored by {dist.get_world_size()}:\n{report}")


def look(snapshot: Snapshot) -> None:
    """Read the whole tensor, or any part of it, in one process without a process group."""
    weight = snapshot.read_object("0/state/weight")
    row = snapshot.read_object("0/state/weight", box=[4321])  # reads that row and little more
    assert torch.equal(weight, WHOLE)
    assert torch.equal(row, WHOLE[4321])
    print(f"read {tuple(weight.shape)}, and row 4321 of it: {row[0]:.0f} to {row[-1]:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    snapshot = Snapshot(parser.parse_args().folder)
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # not started by torchrun
        look(snapshot)
    else:
        dist.init_process_group("gloo")
        if snapshot.exists():
            restore(snapshot)
        else:
            save(snapshot)
        dist.destroy_process_group()
