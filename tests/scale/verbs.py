"""Saves and restores of many ranks without a fault: seconds, CPU and memory of each verb, and the exact values."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from snapshot import RestoreOptions, RNGState, Snapshot, StateDict
from snapshot.text import size_text
from snapshot_bench.rounds import available_memory
from tests.scale.job import Job, Rank, Report

ROWS, COLUMNS = 1000, 33
"""The shape of each sharded tensor. Few worlds divide it evenly."""
PATIENCE = 300.0
"""Seconds that a phase may take."""
BACKEND = "fake"
RANK_BYTES = 28 << 20
"""Memory that a rank needs beside the pages that all share."""


def whole(value: float) -> torch.Tensor:
    """Return the sharded tensor as a whole."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + value


def local_part(number: int, world: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of one rank."""
    rows = -(-ROWS // world)
    return tensor[number * rows : (number + 1) * rows]


def make_state(rank: Rank, value: float) -> StateDict:
    """Return a weight and a moment that are sharded over all ranks, and replicas."""
    mesh = DeviceMesh("cpu", list(range(rank.world)))
    shape, offset = compute_local_shape_and_global_offset((ROWS, COLUMNS), mesh, [Shard(0)])
    sharded = {}
    for name, add in (("weight", 0.0), ("moment", 0.5)):
        local = whole(value + add)[offset[0] : offset[0] + shape[0]].clone()
        sharded[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
        )
    return StateDict(**sharded, shared=torch.full((100,), value), step=int(value))


def make_own(rank: Rank, value: float) -> StateDict:
    """Return what only one rank has."""
    return StateDict(number=rank.number, noise=torch.full((20,), value + rank.number))


def expect_values(rank: Rank, state: StateDict, own: StateDict | None, value: float) -> None:
    """Raise if a restored value is not the saved one."""
    for name, add in (("weight", 0.0), ("moment", 0.5)):
        wanted = local_part(rank.number, rank.world, whole(value + add))
        assert torch.equal(state[name].to_local(), wanted), f"rank {rank.number}: {name} has other values"
    assert torch.equal(state["shared"], torch.full((100,), value))
    assert state["step"] == int(value)
    if own is not None:
        assert own["number"] == rank.number
        assert torch.equal(own["noise"], torch.full((20,), value + rank.number))


def save(rank: Rank, path: str, verb: str, value: float) -> None:
    """Take a snapshot of all ranks."""
    app = {"s": make_state(rank, value), "own": make_own(rank, value), "rng": RNGState()}
    made = getattr(Snapshot, verb)(path, app, replicated=["s/shared", "s/step"])
    if verb == "async_take":
        made.wait()


def load(rank: Rank, path: str, value: float, *, own: bool) -> None:
    """Restore into other values, and compare."""
    app = {"s": make_state(rank, -1.0)}
    if own:
        app |= {"own": make_own(rank, -1.0), "rng": RNGState()}
    Snapshot(path).restore(app, options=RestoreOptions(read_once=False))
    expect_values(rank, app["s"], app.get("own"), value)


PHASES = {
    "take": lambda rank, path: save(rank, f"{path}/step-1", "take", 1.0),
    "take, same structure": lambda rank, path: save(rank, f"{path}/step-2", "take", 2.0),
    "async_take and wait": lambda rank, path: save(rank, f"{path}/step-3", "async_take", 3.0),
    "restore": lambda rank, path: load(rank, f"{path}/step-3", 3.0, own=True),
}
RESHARD = {"restore on {world} ranks": lambda rank, path: load(rank, f"{path}/step-3", 3.0, own=False)}


def preload(folder: Path) -> None:
    """Import all that two ranks import in these phases. What a parent has imported, its forks share."""
    listed = folder / "modules"

    def work(rank: Rank) -> None:
        before = set(sys.modules)
        _work(PHASES, str(folder / "warm"), rank)
        if rank.number == 0:
            listed.write_text("\n".join(sorted(set(sys.modules) - before)))
            rank.report("imported")

    with Job(2, work, folder, gates=len(PHASES)) as job:
        for name in ("ready", *PHASES):
            if name != "ready":
                job.open_gate()
            job.expect(name, PATIENCE)
        job.reports("imported", [0], PATIENCE)
    for name in listed.read_text().split():
        with contextlib.suppress(ImportError):  # some modules are put there by others
            importlib.import_module(name)


def _work(phases: dict, path: str, rank: Rank) -> None:
    rank.join(BACKEND, PATIENCE)
    rank.report("ready")
    for name, call in phases.items():
        if not rank.measure(name, partial(call, rank, path)):
            return


def expect_memory(ranks: int) -> None:
    """Raise if the ranks do not fit into the memory of this machine."""
    needed = ranks * RANK_BYTES
    if available_memory() < needed:
        raise ValueError(f"{ranks} ranks need {size_text(needed)} of memory; run with fewer ranks")


def measure(world: int, folder: Path) -> Iterator[tuple[str, int, list[Report], float]]:
    """Yield each phase: its name, the number of ranks, their reports, and the seconds until the last of them ended."""
    expect_memory(world)
    others = [other for other in (world * 3 // 4, world * 5 // 4) if other * RANK_BYTES <= available_memory()]
    jobs = [(world, PHASES), *((other, RESHARD) for other in others)]
    for ranks, phases in jobs:
        with Job(ranks, partial(_work, phases, str(folder / "run")), folder, gates=len(phases)) as job:
            job.expect("ready", PATIENCE)
            for name in phases:
                began = job.open_gate()
                reports = job.expect(name, PATIENCE)
                yield name.format(world=ranks), ranks, reports, max(each.at for each in reports) - began
