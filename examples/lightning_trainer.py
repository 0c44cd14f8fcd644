"""Train with Lightning, interrupt it in the middle of an epoch, and resume to the same bits.

    python examples/lightning_trainer.py

The callback saves every few steps during training, with the random numbers. The plugin reads the snapshots.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn

from snapshot_trainers.lightning import SnapshotCallback, SnapshotCheckpointIO


class RandomBatches(torch.utils.data.Dataset):
    """Each item is a new random batch, so the position in an epoch does not matter."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, 16)


class Model(pl.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.layers(batch) - batch.sum(-1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(RandomBatches(), batch_size=None)


def train(folder: Path, steps: int, **options: object) -> Model:
    """Train up to `steps`, from the newest snapshot if there is one. The Trainer gets the `options`."""
    torch.manual_seed(0)
    model = Model()
    callback = SnapshotCallback(folder, every_n_steps=5, keep=2)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[callback],
        plugins=[SnapshotCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, ckpt_path=callback.latest())
    return model


def main(folder: Path) -> None:
    whole = train(folder / "whole", 20)
    train(folder / "broken", 12)  # the last snapshot is of step 10, in the second epoch
    resumed = train(folder / "broken", 20)
    assert resumed.losses == whole.losses[-10:], "the losses differ"
    weights, others = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights), "the weights differ"
    print("Losses and weights of the interrupted run equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
