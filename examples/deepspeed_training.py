"""Train with DeepSpeed's ZeRO, interrupt it, and resume to the same bits.

    torchrun --nproc-per-node 2 examples/deepspeed_training.py run
    python examples/deepspeed_training.py run        # one process

One line differs from other uses of DeepSpeed: `engine.checkpoint_engine = ...`.
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn

from snapshot_deepspeed.adapter import SnapshotCheckpointEngine

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
}


def start() -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG)
    engine.checkpoint_engine = SnapshotCheckpointEngine(asynchronous=True)  # the whole change
    return engine


def train(engine: deepspeed.DeepSpeedEngine, folder: Path, last: int) -> list[float]:
    """Train to a step, with a checkpoint at every second one. Return the losses."""
    losses = []
    for step in range(engine.global_steps, last):
        numbers = torch.Generator().manual_seed(step * 1000 + torch.distributed.get_rank())
        batch = torch.randn(8, 16, generator=numbers).to(engine.device, torch.bfloat16)
        loss = (engine(batch) - batch.sum(1, keepdim=True)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(folder)
    engine.checkpoint_engine.wait()  # for the last checkpoint
    return losses


def main(folder: Path) -> None:
    whole = train(start(), folder / "whole", 8)
    train(start(), folder / "broken", 5)  # the last checkpoint is that of step 4
    engine = start()
    path, _ = engine.load_checkpoint(folder / "broken")
    assert path is not None
    resumed = train(engine, folder / "broken", 8)
    assert resumed == whole[4:], "the losses differ"
    if torch.distributed.get_rank() == 0:
        print("Losses of the interrupted run equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    main(parser.parse_args().folder)
    torch.distributed.destroy_process_group()
