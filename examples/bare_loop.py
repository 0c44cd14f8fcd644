"""A plain training loop that saves asynchronously every few steps and resumes in the middle of an epoch.

    python examples/bare_loop.py

The loop stores its position: the epoch, and the number of finished batches. The epoch determines the order of batches.
So this is all that a data loader needs to resume exactly.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from snapshot import RNGState, Snapshot, StateDict

BATCH, SAVE_EVERY = 4, 5


def newest_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest committed snapshot. An interrupted save is not committed."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def batches(data: TensorDataset, epoch: int, done: int) -> DataLoader:
    """Return the remaining batches of an epoch. With its own generator, the loader draws no global random numbers."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
    left = [order[i : i + BATCH] for i in range(done * BATCH, len(order), BATCH)]
    return DataLoader(data, batch_sampler=left, generator=torch.Generator())


def train(folder: Path, steps: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    inputs = torch.randn(32, 16)
    data = TensorDataset(inputs, inputs.sum(-1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    progress = StateDict(step=0, epoch=0, done=0, losses=[])

    app_state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
        "rng": RNGState(),
    }
    snapshot = newest_snapshot(folder)
    if snapshot:
        snapshot.restore(app_state)

    pending = None
    while progress["step"] < steps:
        for batch, wanted in batches(data, progress["epoch"], progress["done"]):
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            progress["done"] += 1
            progress["losses"].append(loss.item())
            if progress["step"] % SAVE_EVERY == 0:
                if pending:
                    pending.wait()  # the previous one; raises if it failed
                pending = Snapshot.async_take(folder / f"step-{progress['step']}", app_state)
            if progress["step"] == steps:
                break
        else:
            progress.update(epoch=progress["epoch"] + 1, done=0)
    if pending:
        pending.wait()
    return progress["losses"], model


def main(folder: Path) -> None:
    losses, model = train(folder / "whole", 20)
    train(folder / "broken", 13)  # the last snapshot is of step 10, in the second epoch
    resumed, other = train(folder / "broken", 20)
    assert resumed == losses, "the losses differ"
    weights, others = model.state_dict(), other.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights), "the weights differ"
    print("Losses and weights of the interrupted run equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
