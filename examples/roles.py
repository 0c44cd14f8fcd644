"""A trainer, a rollout worker and a prompt buffer in one job, which always resume from the same step.

    torchrun --nproc-per-node 3 --max-restarts 3 examples/roles.py FOLDER

Kill any of them at any time: torchrun restarts the job, and in the end the trainer has had each prompt exactly once.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from snapshot import KeepLatest, RestoreOptions, RNGState, SnapshotManager, StateDict

TRAINER, ROLLOUT, BUFFER = range(3)
WAITING = 3  # answers that the buffer holds back, so that the trainer is behind the rollouts


def broadcast(value: Any, source: int) -> Any:
    """Return on every rank what the source passes."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def train(folder: str, prompts: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    policy = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(policy.parameters())
    trained = StateDict(prompts=[])
    answered = StateDict(count=0)
    buffer = StateDict(next=0, waiting=[])
    app_state = {
        TRAINER: {"policy": policy, "optimizer": optimizer, "trained": trained},
        ROLLOUT: {"answered": answered, "rng": RNGState()},
        BUFFER: {"buffer": buffer},
    }[rank]

    options = RestoreOptions(unused="error")  # no role may be left out
    with SnapshotManager(folder, keep=KeepLatest(2), restore_options=options, timeout=60) as manager:
        step = manager.restore_latest(app_state) or 0
        if rank == TRAINER:
            print(f"begins after step {step}", flush=True)
        while broadcast(len(trained["prompts"]), TRAINER) < prompts:
            step += 1
            # The buffer gives the next prompt to the rollout worker, and keeps its answer.
            prompt = broadcast(buffer["next"] if buffer["next"] < prompts else None, BUFFER)
            answer = None
            if rank == ROLLOUT and prompt is not None:
                answer = torch.randn(8)
                answered["count"] += 1
            answer = broadcast(answer, ROLLOUT)
            if rank == BUFFER and prompt is not None:
                buffer["waiting"].append([prompt, answer])
                buffer["next"] += 1
            # The trainer gets the answer that has waited longest.
            ready = buffer["waiting"] and (len(buffer["waiting"]) > WAITING or buffer["next"] == prompts)
            batch = broadcast(buffer["waiting"].pop(0) if ready else None, BUFFER)
            if rank == TRAINER and batch is not None:
                optimizer.zero_grad()
                (policy(batch[1]) - 1).square().mean().backward()
                optimizer.step()
                trained["prompts"].append(batch[0])
            # Nothing is on its way between two ranks here, so the states of all belong together.
            manager.take(step, app_state)

    if rank == TRAINER:
        print(f"trained on {len(trained['prompts'])} of {prompts} prompts, {len(set(trained['prompts']))} different")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.folder, arguments.prompts)
    dist.destroy_process_group()
