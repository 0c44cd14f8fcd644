"""Train with Hugging Face's accelerate on any number of processes, interrupt it, and resume to the same bits.

    python examples/accelerate_loop.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py FOLDER

No object needs to be registered: add the objects that `prepare` returns to the app state.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from snapshot import ModelState, RNGState, Snapshot, StateDict
from snapshot_trainers.torchdata import LoaderState

SAVE_EVERY = 5


def newest_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest committed snapshot. An interrupted save is not committed."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def train(folder: Path, steps: int) -> tuple[list[float], nn.Module]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(32, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(-1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = StateDict(step=0, losses=[])
    torch.manual_seed(1 + accelerator.process_index)  # from here on, each process has its own dropout

    app_state = {
        "train": ModelState(model, optimizer.optimizer),  # names do not depend on wrappers
        "scheduler": scheduler,
        "progress": progress,
        "loader": LoaderState(loader),  # the loop goes on after the samples that were seen
        "rng": RNGState(),
    }
    snapshot = newest_snapshot(folder)
    if snapshot:
        snapshot.restore(app_state)

    while progress["step"] < steps:
        for batch, wanted in loader:
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            progress["losses"].append(loss.item())
            if progress["step"] % SAVE_EVERY == 0:
                Snapshot.take(folder / f"step-{progress['step']}", app_state, replicated=["train"])
            if progress["step"] == steps:
                break
    return progress["losses"], accelerator.unwrap_model(model)


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
