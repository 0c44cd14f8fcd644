"""What the ranks of test_roles do: the job of examples/roles.py, until one of them is killed at a moment of a take."""

import importlib.util
import os
import signal
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from snapshot import RestoreOptions, RNGState, SnapshotManager, StateDict
from snapshot.testing import Tap, tapped

EXAMPLE = Path(__file__).parents[2] / "examples" / "roles.py"


def load_example():
    spec = importlib.util.spec_from_file_location("roles", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Killer(Tap):
    """Kill a process before an operation of this rank's storages, once it is armed."""

    def __init__(self, operation, victim):
        self.operation, self.victim = operation, victim
        self.armed = False

    async def before(self, operation):
        if self.armed and operation.name == self.operation:
            os.kill(self.victim, signal.SIGKILL)


def train(folder, prompts, which, moment, victim):
    """Train, and kill `victim`, the process of rank `which`, at a moment of the second take."""
    mine, takes, take = dist.get_rank() == which, 0, SnapshotManager.take
    # Only rank 0 commits. It kills another rank there, which has written everything and waits.
    kills = {"writes": mine, "commit": dist.get_rank() == 0}.get(moment, False)
    killer = Killer({"writes": "write", "commit": "commit"}.get(moment), victim)

    def counted(self, *arguments, **options):
        nonlocal takes
        takes += 1
        killer.armed = kills and takes == 2
        if moment == "before" and mine and takes == 2:
            os.kill(victim, signal.SIGKILL)
        taken = take(self, *arguments, **options)
        if moment == "after" and mine and takes == 2:
            os.kill(victim, signal.SIGKILL)
        return taken

    with tapped("deadly", killer), mock.patch.object(SnapshotManager, "take", counted):
        load_example().train(f"deadly+file://{folder}", prompts)


def restore(folder, keys, unused="warn"):
    """Restore an object of each rank, by its key: the step, the object, and what the report calls unused."""
    key = keys[dist.get_rank()]
    live = {"trained": StateDict(prompts=[]), "answered": StateDict(count=0), "buffer": StateDict(next=0, waiting=[])}
    with SnapshotManager(folder, signals=(), timeout=30) as manager:
        numbers = {"rng": RNGState()} if key == "answered" else {}
        step = manager.restore_latest({key: live[key], **numbers}, options=RestoreOptions(unused=unused))
        return step, dict(live[key]), [each.path for each in manager.report.unused]
