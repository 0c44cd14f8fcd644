"""Train with Composer, interrupt it in an epoch, and resume to the same bits.

    python examples/composer_training.py run

Two arguments differ from other uses of the Trainer: `callbacks` and `load_path`.
"""

import argparse
from pathlib import Path

import torch
from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from snapshot_trainers.composer import SnapshotSaver


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Losses(Callback):
    """Collects the losses, and fails at a batch."""

    def __init__(self, fail_at: int | None) -> None:
        self.values: list[float] = []
        self.fail_at = fail_at

    def batch_end(self, state, logger) -> None:
        self.values.append(state.loss.item())
        if state.timestamp.batch == self.fail_at:
            raise RuntimeError("a fault")


def train(folder: Path, fail_at: int | None = None) -> list[float]:
    """Train two epochs of six batches, from the newest snapshot on. Return the losses."""
    torch.manual_seed(0)
    model, data = Model(), TensorDataset(torch.randn(48, 16), torch.randn(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = Losses(fail_at)
    saver = SnapshotSaver(folder, save_interval="2ba", keep=3)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=True)),
        optimizers=optimizer,
        max_duration="2ep",
        seed=1,
        callbacks=[losses, saver],
        load_path=saver.latest(),
        progress_bar=False,
    )
    try:
        trainer.fit()
    except RuntimeError as error:
        print(f"interrupted by {error}")
    trainer.close()
    return losses.values


def main(folder: Path) -> None:
    whole = train(folder / "whole")
    train(folder / "broken", fail_at=9)  # the last snapshot is that of batch 8, in the second epoch
    resumed = train(folder / "broken")
    assert resumed == whole[8:], "the losses differ"
    print("Losses of the interrupted run equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
