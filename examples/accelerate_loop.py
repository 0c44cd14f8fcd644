"""Train with Hugging Face's accelerate on any number of processes, be interrupted, and go on to the very same bits.

    python examples/accelerate_loop.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py FOLDER

Nothing is to be registered, and there are no folders of several files: what `prepare` gives goes into the app state.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from snapshot import ModelState, RNGState, Snapshot, StateDict

SAVE_EVERY = 5


def newest_snapshot(folder: Path) -> Snapshot | None:
    """The last one that was committed. What was cut off in the middle of a save does not exist, for `exists`."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def train(folder: Path, steps: int) -> tuple[list[float], nn.Module]:
    # so that an epoch's order of batches follows from its number
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    inputs = torch.randn(32, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(-1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = StateDict(step=0, epoch=0, done=0, losses=[])
    torch.manual_seed(1 + accelerator.process_index)  # from here on, dropout is each process's own

    app_state = {
        "train": ModelState(model, optimizer.optimizer),  # under names that no wrapping changes
        "scheduler": scheduler,
        "progress": progress,
    }
    rng = {"rng": RNGState()}
    snapshot = newest_snapshot(folder)
    if snapshot:
        snapshot.restore(app_state)

    while progress["step"] < steps:
        loader.set_epoch(progress["epoch"])
        for batch, wanted in accelerator.skip_first_batches(loader, progress["done"]):
            if snapshot:  # only now: the loader drew random numbers to begin its epoch
                snapshot.restore(rng)
                snapshot = None
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            progress["done"] += 1
            progress["losses"].append(loss.item())
            if progress["step"] % SAVE_EVERY == 0:
                Snapshot.take(folder / f"step-{progress['step']}", {**app_state, **rng}, replicated=["train"])
            if progress["step"] == steps:
                break
        else:
            progress.update(epoch=progress["epoch"] + 1, done=0)
    return progress["losses"], accelerator.unwrap_model(model)


def main(folder: Path) -> None:
    losses, model = train(folder / "whole", 20)
    train(folder / "broken", 13)  # the last snapshot is of step 10, in the second epoch
    resumed, other = train(folder / "broken", 20)
    assert resumed == losses, "the losses differ"
    weights, others = model.state_dict(), other.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights), "the weights differ"
    print("Losses and weights of the run that was interrupted are bit for bit those of the other.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny: a second thread would only be waited for
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
