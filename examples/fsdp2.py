"""Train a model that FSDP2 shards over the ranks, and resume on any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER

Every rank writes its shards. Run it again with another number of ranks: each rank reads the shards that it holds now.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from snapshot import ModelState, Snapshot, StateDict

SAVE_EVERY = 5


def train(folder: Path, steps: int) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = StateDict(step=0)

    # With `ModelState`, parameters and their optimizer state have the names of the unwrapped model. So the snapshot
    # fits every other parallelism, too.
    app_state = {"train": ModelState(model, optimizer), "progress": progress}

    snapshot = Snapshot(folder / "latest")
    if snapshot.exists():
        report = snapshot.restore(app_state)
        if rank == 0:
            print(f"resumed at step {progress['step']}; {len(report.resharded)} tensors were cut in another way before")

    while progress["step"] < steps:
        torch.manual_seed(dist.get_world_size() * progress["step"] + rank)  # so no RNGState is needed
        loss = (model(torch.randn(8, 32)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        if progress["step"] % SAVE_EVERY == 0:
            Snapshot.take(snapshot.path, app_state, overwrite=True)  # the old one stays intact until the commit
            if rank == 0:
                print(f"step {progress['step']}: loss {loss.item():.4f}, saved", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    dist.init_process_group("gloo")
    train(arguments.folder, arguments.steps)
    dist.destroy_process_group()
