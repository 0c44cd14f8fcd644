"""A complete training script, which resumes exactly after a kill.

    python examples/complete_training.py FOLDER
    torchrun --nproc-per-node 2 examples/complete_training.py FOLDER
    torchrun --nproc-per-node 2 examples/complete_training.py FOLDER --shard

Run the same command again to resume. The number of processes may differ each time.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from snapshot import (
    KeepBest,
    KeepLatest,
    ModelState,
    RNGState,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot_trainers.torchdata import LoaderState

GLOBAL_BATCH = 24  # divided among the processes


def examples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(-1, keepdim=True))


def validate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    inputs, wanted = (each.to(device) for each in data.tensors)
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), wanted).item()


def train(folder: str, steps: int, save_every: int, shard: bool) -> None:
    alone = not dist.is_initialized()
    world, rank = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)  # all processes begin with the same weights
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    model = nn.Sequential(*layers).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    if shard:
        fully_shard(model)
        fully_shard(ema.module)
    elif world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    scaler = torch.amp.GradScaler(device.type)

    data, held_out = examples(384, seed=1), examples(64, seed=2)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    progress = StateDict(step=0, epoch=0)
    torch.manual_seed(1 + rank)  # from here on, each process has its own dropout

    app_state = {
        "train": ModelState(model, optimizer),  # names without those of wrappers
        "ema": ModelState(ema),
        "scheduler": scheduler,
        "scaler": scaler,
        "loader": LoaderState(loader),  # continues after the samples that were seen
        "progress": progress,
        "rng": RNGState(),
    }
    manager = SnapshotManager(
        folder,
        every=save_every,
        keep=KeepLatest(2) | KeepBest("val_loss"),
        take_options=TakeOptions(replicated=[] if shard else ["ema"]),  # written once
    )
    with manager:
        resumed = manager.restore_latest(app_state)
        if resumed is not None and rank == 0:
            print(f"resumed from step {resumed}", flush=True)

        while progress["step"] < steps:
            sampler.set_epoch(progress["epoch"])
            for inputs, wanted in loader:
                with torch.autocast(device.type, torch.float16):
                    predicted = model(inputs.to(device))
                    loss = nn.functional.mse_loss(predicted, wanted.to(device))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() >= scale:  # else it has skipped this step
                    scheduler.step()
                    ema.update_parameters(model)
                progress["step"] += 1

                step = progress["step"]
                stop = manager.should_stop()  # SIGTERM: the same step on all processes
                last = stop or step == steps
                if manager.should_take(step) or last:
                    val_loss = validate(ema, held_out, device)
                    manager.async_take(step, app_state, metrics={"val_loss": val_loss})
                    if rank == 0:
                        print(f"step {step}: val_loss {val_loss:.6f}", flush=True)
                if last:
                    return  # the end of the `with` block waits for the save
            progress["epoch"] += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="or a bucket, such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    if "RANK" in os.environ:  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    train(arguments.folder, arguments.steps, arguments.save_every, arguments.shard)
    if dist.is_initialized():
        dist.destroy_process_group()
