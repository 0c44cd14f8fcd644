"""Train with Ray Train on two workers, lose one, and continue with one worker.

    python examples/ray_training.py run

Ray restarts the workers after a failure. Each run, and each restart, resumes from the last committed snapshot.
"""

import argparse
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from snapshot import ModelState, StateDict, TakeOptions
from snapshot_trainers.ray import open_checkpoint, report, restore

GLOBAL_BATCH = 8


def train(config: dict) -> None:
    """Train on each worker."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    progress = StateDict(step=0, losses=[])
    app_state = {"train": ModelState(model, optimizer), "scheduler": scheduler, "progress": progress}
    restore(app_state)  # None in a new run

    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    while progress["step"] < config["steps"]:
        if progress["step"] == config.get("fails_at") and rank == 0 and not Path(config["failed"]).exists():
            Path(config["failed"]).touch()
            raise RuntimeError("a worker is lost")
        numbers = torch.Generator().manual_seed(progress["step"])
        batch = torch.randn(GLOBAL_BATCH, 16, generator=numbers)[rank::world]
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(total.div_(world))
        progress["step"] += 1
        progress["losses"] = [*progress["losses"], total.item()]
        if progress["step"] % 2 == 0:
            report({"loss": loss.item()}, app_state, asynchronous=True, options=TakeOptions(replicated=["**"]))


def run(folder: Path, name: str, workers: int, **config) -> list[float]:
    """Start or resume a run. Return its losses."""
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    return open_checkpoint(trainer.fit().checkpoint).read_object("progress/losses")


def main(folder: Path) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    whole = run(folder, "whole", 2, steps=8)
    broken = run(folder, "broken", 2, steps=6, fails_at=5, failed=str(folder / "failed"))
    assert broken == whole[:6], "the losses differ"
    print("Losses of the run that failed equal those of the other run, bit for bit.")
    alone = run(folder, "broken", 1, steps=8)
    assert torch.allclose(torch.tensor(alone), torch.tensor(whole), atol=1e-5), "the losses differ"
    print("One worker continued, with the same losses but for rounding.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    ray.init()
    main(arguments.folder)
