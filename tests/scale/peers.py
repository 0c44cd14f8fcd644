"""The same faults with other libraries: torch.distributed.checkpoint, and torch_checkpointing if it is installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from snapshot import Snapshot
from tests.scale import faults
from tests.scale.faults import ACTS, Fault, Outcome, attempt, break_at
from tests.scale.job import Job, Rank
from tests.scale.verbs import make_own, make_state

Act = Callable[[Rank, str, str, float], None]


@dataclass(frozen=True)
class System:
    """A library: how its ranks save and restore, and which functions are its phases."""

    name: str
    backend: str
    call: Act
    """Called with the rank, the verb, the path and the timeout."""
    phases: Mapping[str, Any]
    committed: Callable[[Path], bool]

    def faults(self) -> list[Fault]:
        """Return the faults of the phases that it has."""
        made = []
        for verb, phases in (("take", (*faults.SAVE, "commit")), ("restore", faults.LOAD)):
            found = [
                phase for phase in phases if phase in self.phases and (verb == "take" or "read data" in self.phases)
            ]
            made += [Fault(verb, phase, act, leader=phase == "commit") for phase in found for act in ACTS]
        return made


def _call_dcp(rank: Rank, verb: str, path: str, timeout: float) -> None:
    warnings.simplefilter("ignore")
    state = {"s": dict(make_state(rank, 2.0)), "own": {f"{rank.number}": dict(make_own(rank, 2.0))}}
    (dcp.load if verb == "restore" else dcp.save)(state, checkpoint_id=path)


def _call_torch_checkpointing(rank: Rank, verb: str, path: str, timeout: float) -> None:
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    logging.disable(logging.CRITICAL)
    # a whole number of seconds, as its documentation has it
    writer = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=int(timeout))
    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # some file systems refuse its writes
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(writer_config=writer), storage_config=storage)
    manager = config.build()
    manager.save(path, {"own": {"noise": torch.full((20,), 2.0), "number": rank.number}})


def _torch_checkpointing_phases() -> dict[str, Any]:
    from torch_checkpointing.checkpoint_writer import CheckpointWriter
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorage

    return {
        "before the call": None,
        "write": (CheckpointWriter, "_write_keys"),
        "finish a data file": (CheckpointWriter, "_write_key"),
        "commit": (LocalFileSystemStorage, "rename"),
    }


def systems() -> Iterator[System]:
    """Yield this library, and those of the others that are installed."""
    yield System("snapshot", faults.BACKEND, faults.call, faults.PHASES, lambda path: Snapshot(str(path)).exists())
    phases = {
        "before the call": None,
        "state_dict": (DefaultSavePlanner, "create_local_plan"),
        "write": (dcp.FileSystemWriter, "write_data"),
        "commit": (dcp.FileSystemWriter, "finish"),
        "read the manifest": (dcp.FileSystemReader, "read_metadata"),
        "read data": (dcp.FileSystemReader, "read_data"),
    }
    yield System("DCP", "gloo", _call_dcp, phases, lambda path: (path / ".metadata").exists())
    if find_spec("torch_checkpointing"):
        phases = _torch_checkpointing_phases()
        yield System("torch_checkpointing", "gloo", _call_torch_checkpointing, phases, Path.exists)


def _work_well(system: System, folder: str, rank: Rank) -> None:
    rank.join(system.backend, faults.PATIENCE)
    rank.measure("saved", partial(system.call, rank, "take", f"{folder}/new", faults.PATIENCE))


def _work(system: System, fault: Fault, folder: str, timeout: float, rank: Rank) -> None:
    rank.join(system.backend, timeout)
    if fault.verb == "restore":
        system.call(rank, "take", f"{folder}/kept", faults.PATIENCE)
    rank.report("ready")
    break_at(rank, fault, system.phases)
    path = f"{folder}/{'kept' if fault.verb == 'restore' else 'new'}"
    rank.measure("ended", partial(system.call, rank, fault.verb, path, timeout))


def compare(world: int, timeout: float, folder: Path) -> Iterator[tuple[System, Outcome, bool]]:
    """Yield what comes of each fault with each library, and whether its save was committed."""
    for system in systems():
        where = folder / f"{system.name}-well"
        where.mkdir()
        with Job(world, partial(_work_well, system, str(where)), where, gates=1) as job:
            job.open_gate()
            job.expect("saved", faults.PATIENCE)
        if not system.committed(where / "new"):
            raise RuntimeError(f"{system.name}: nothing was committed without a fault")
        for number, fault in enumerate(system.faults()):
            where = folder / f"{system.name}-{number}"
            where.mkdir()
            yield (
                system,
                attempt(world, fault, partial(_work, system, fault, str(where), timeout), where),
                (system.committed(where / "new")),
            )
