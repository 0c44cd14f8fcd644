"""`snapshot bench --dcp`: `torch.distributed.checkpoint` with torch's storage and with ours, and with one that does
nothing: what that takes is planning, which is torch's own whatever the storage is."""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from snapshot.bench.rounds import Workspace
from snapshot.bench.workloads import CASES, Payload
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter
from snapshot.text import size_text

MEASURED = ("small", "large")


class Nothing(StorageWriter):
    """Writes nothing."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


WRITERS: dict[str, Callable[[str, bool], StorageWriter]] = {
    "nothing": lambda where, durable: Nothing(),
    "torch": lambda where, durable: FileSystemWriter(where, sync_files=durable),
    "snapshot": lambda where, durable: SnapshotWriter(where, durable=durable),
}
READERS: dict[str, Callable[[str], StorageReader]] = {"torch": FileSystemReader, "snapshot": SnapshotReader}


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """The lines of the tables; each system takes its turn in every round."""
    if not where.local:
        raise ValueError("--dcp measures beside torch's own storage, which needs a folder of a file system")
    for name in MEASURED:
        case = CASES[name]
        where.check_room(3 * case.nbytes(scale), f"{name}: dcp.save")
        payload = case.make(scale)
        yield f"\n{name}: {case.about}, {size_text(payload.nbytes())}"
        for durable in (True, False):
            seconds = _saves(where, payload, rounds, durable)
            yield f"  dcp.save{', durable' if durable else ''}"
            yield from _lines(seconds)
            theirs, ours, planning = (statistics.median(seconds[key]) for key in ("torch", "snapshot", "nothing"))
            above = (theirs - planning) / max(ours - planning, 1e-9)
            yield f"    torch takes {theirs / ours:.1f} x as long as snapshot; above what nothing takes {above:.1f} x"
        seconds = _loads(where, payload, rounds)
        yield "  dcp.load"
        yield from _lines(seconds)
        where.empty()


def _saves(where: Workspace, payload: Payload, rounds: int, durable: bool) -> dict[str, list[float]]:
    """Each into a fresh folder, which is gone before the next."""
    seconds: dict[str, list[float]] = {name: [] for name in WRITERS}
    for number in range(rounds + 1):
        for name, make in WRITERS.items():
            folder = str(Path(where.text()) / f"{name}-{number}")
            writer = make(folder, durable)
            with quiet():
                began = time.perf_counter()
                save(payload.nested(), storage_writer=writer, no_dist=True)
                taken = time.perf_counter() - began
            if number:  # the first is not counted
                seconds[name].append(taken)
            shutil.rmtree(folder, ignore_errors=True)
    return seconds


def _loads(where: Workspace, payload: Payload, rounds: int) -> dict[str, list[float]]:
    """Into the live tensors; and that they hold what was saved."""
    seconds: dict[str, list[float]] = {name: [] for name in READERS}
    expected = payload.digest()
    for name in READERS:
        with quiet():
            writer = WRITERS[name](str(Path(where.text()) / name), False)
            save(payload.nested(), storage_writer=writer, no_dist=True)
    for number in range(rounds + 1):
        for name, reader in READERS.items():
            payload.wipe()
            with quiet():
                began = time.perf_counter()
                load(payload.nested(), storage_reader=reader(str(Path(where.text()) / name)), no_dist=True)
                taken = time.perf_counter() - began
            if payload.digest() != expected:
                raise ValueError(f"dcp.load through {name}'s storage did not bring back what was saved")
            if number:
                seconds[name].append(taken)
    return seconds


def _lines(seconds: dict[str, list[float]]) -> Iterator[str]:
    for name, taken in seconds.items():
        low, middle, high = min(taken), statistics.median(taken), max(taken)
        yield f"    {name:<10} {middle:8.3f} s  ({low:.3f} to {high:.3f})"


@contextmanager
def quiet() -> Iterator[None]:
    """Torch says each time that there is one process only, which is what is measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
