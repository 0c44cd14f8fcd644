"""Train with DistributedDataParallel on any number of ranks, and resume where the last run stopped.

    torchrun --nproc-per-node 2 examples/ddp.py FOLDER

Kill it at any time, and run the same command again. All ranks call `take` and `restore`, like a collective. Every rank
has the model and the optimizer; they are written once, and the ranks share the work.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from snapshot import RNGState, Snapshot, StateDict

SAVE_EVERY = 3


def newest_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest committed snapshot. All ranks see the folder, so all find the same one."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def train(folder: Path, steps: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = StateDict(step=0)
    torch.manual_seed(1 + rank)  # from here on, each rank draws its own batches

    app_state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": RNGState()}

    snapshot = newest_snapshot(folder)
    if snapshot:
        snapshot.restore(app_state)
        if rank == 0:
            print(f"resumed from {Path(snapshot.path).name}", flush=True)

    while progress["step"] < steps:
        loss = (model(torch.randn(8, 32)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {progress['step']}: loss {total.item() / dist.get_world_size():.9f}", flush=True)
        if progress["step"] % SAVE_EVERY == 0:
            Snapshot.take(folder / f"step-{progress['step']}", app_state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    dist.init_process_group("gloo")
    train(arguments.folder, arguments.steps)
    dist.destroy_process_group()
