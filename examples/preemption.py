"""A job that receives SIGTERM saves, exits, and resumes later to the same bits.

    python examples/preemption.py

Schedulers, Kubernetes and spot instances send SIGTERM some time before they kill a job. This script trains in another
process, sends that signal, and starts it again. Then it compares the result with an undisturbed run.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from snapshot import KeepLatest, RNGState, SnapshotManager, StateDict

STEPS, SAVE_EVERY, TOLD_AT = 60, 20, 33
# A fork saves the time of the imports. A real job starts its processes as usual.
context = multiprocessing.get_context("fork")


def train(folder: Path, at_step: Callable[[int], object] = lambda step: None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for a second thread
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = StateDict(step=0, losses=[])
    app_state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": RNGState()}

    with SnapshotManager(folder, keep=KeepLatest(2), every=SAVE_EVERY) as manager:
        resumed = manager.restore_latest(app_state)
        if resumed is not None:
            print(f"resumed from step {resumed}", flush=True)

        while progress["step"] < STEPS:
            inputs = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["step"] += 1
            progress["losses"].append(loss.item())
            at_step(progress["step"])

            if manager.should_stop():  # on all ranks at the same step
                manager.take(progress["step"], app_state)
                print(f"stopping: saved step {progress['step']}", flush=True)
                return
            if manager.should_take(progress["step"]):
                manager.async_take(progress["step"], app_state, metrics={"loss": loss})


def tell_to_stop(folder: Path) -> int:
    """Train in another process, send it SIGTERM in the middle, and return its exit status."""
    reached, sent = context.Event(), context.Event()

    def at_step(step: int) -> None:
        if step == TOLD_AT:
            reached.set()
            sent.wait()

    job = context.Process(target=train, args=(folder, at_step))
    job.start()
    reached.wait()
    assert job.pid is not None
    os.kill(job.pid, signal.SIGTERM)
    sent.set()
    job.join()
    return job.exitcode or 0


def start_again(folder: Path) -> int:
    job = context.Process(target=train, args=(folder,))
    job.start()
    job.join()
    return job.exitcode or 0


def main(folder: Path) -> None:
    assert tell_to_stop(folder / "told") == 0
    assert start_again(folder / "told") == 0
    train(folder / "whole")

    ends = [SnapshotManager(folder / name, signals=()).snapshot(STEPS) for name in ("told", "whole")]
    losses, others = (snapshot.read_object("0/progress/losses") for snapshot in ends)
    assert losses == others, "the losses differ"
    weights, other = (snapshot.get_state_dict_for_key("model") for snapshot in ends)
    assert all(torch.equal(weights[name], other[name]) for name in weights), "the weights differ"
    print(f"Losses and weights of the run that stopped at step {TOLD_AT} equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
