"""Resumes in DeepSpeed from universal checkpoints that this library wrote: `... DIR STAGE RANKS`.

Two ranks train with DeepSpeed and save. Any number of ranks resume from the universal checkpoint of DeepSpeed's own
tool, from a conversion of the same files, and from a conversion of a snapshot of a `ModelState`. The losses, weights
and moments after further steps must be equal. `python -m tests.plugins.snapshot_deepspeed.resume_in_deepspeed` needs
deepspeed (0.19.8), and neither a compiler nor an accelerator.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from snapshot import ModelState, RestoreOptions, Snapshot, Target
from tests.plugins.snapshot_deepspeed.write_deepspeed_files import TAG, Model, config, make_groups

STEPS = 3


def make_optimizer(model):
    return torch.optim.AdamW(make_groups(model), lr=1e-3)


def start(rank, world, port, more):
    """Return the engine of a rank."""
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=more)[0]


def train(engine, seed):
    """Return the losses of some steps. All ranks have the same data."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randint(0, 6, (4, 4))).float().square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(rank, folder, stage, port):
    engine = start(rank, 2, port, config(stage))
    train(engine, 5)
    engine.save_checkpoint(str(folder / "run"), tag=TAG)
    torch.distributed.destroy_process_group()


def resume(rank, folder, name, stage, world, port):
    engine = start(rank, world, port, config(stage, checkpoint={"load_universal": True}))
    path, _ = engine.load_checkpoint(str(folder / name))
    assert path is not None
    done = engine.global_steps, engine.lr_scheduler.state_dict()["last_epoch"], engine.get_lr()
    losses = train(engine, 6)
    engine.save_checkpoint(str(folder / f"{name}-resumed"), tag=TAG)
    if rank == 0:
        torch.save((done, losses), folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


def convert(folder):
    """Write universal checkpoints. Return their names."""
    from deepspeed.checkpoint import ds_to_universal

    target = folder / "deepspeed" / f"{TAG}_universal"
    arguments = ["--input_folder", folder / "run" / TAG, "--output_folder", target]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run([sys.executable, ds_to_universal.__file__, *map(str, arguments)], check=True)
    Snapshot(folder / "run").convert(Target(folder / "converted", "deepspeed-universal"))
    model = Model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"train": ModelState(model, optimizer), "lr_scheduler": scheduler}
    old = Snapshot(folder / "run")
    old.restore(
        {"model": model, "optim": optimizer, "lr_scheduler": scheduler},
        unused="ignore",
        options=RestoreOptions(cast="any"),
    )
    Snapshot.take(folder / "taken", state)
    Snapshot(folder / "taken").convert(Target(folder / "snapshot", "deepspeed-universal"))
    return "deepspeed", "converted", "snapshot"


def main():
    folder, stage, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ports = iter(range(29500 + 10 * stage, 29600))
    torch.multiprocessing.spawn(save, (folder, stage, next(ports)), nprocs=2)
    names = convert(folder)
    for name in names:
        torch.multiprocessing.spawn(resume, (folder, name, stage, world, next(ports)), nprocs=world)
    expected, *others = (
        (torch.load(folder / f"{n}.pt"), Snapshot(folder / f"{n}-resumed").read_object("0")) for n in names
    )
    for name, (trained, state) in zip(names[1:], others, strict=True):
        assert trained == expected[0], (name, trained, expected[0])
        for key, held in expected[1]["optim"]["state"].items():
            assert torch.equal(state["model"][key], expected[1]["model"][key]), (name, key)
            assert all(torch.equal(state["optim"]["state"][key][each], held[each]) for each in held), (name, key)
        print(f"ZeRO {stage}, {world} ranks, {name}: equal: {trained}")


if __name__ == "__main__":
    main()
