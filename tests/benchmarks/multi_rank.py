"""`snapshot bench --world N`: what N ranks on this machine save and restore together, beside one of them alone.

The ranks are processes of their own, on gloo. They hold the same model, as those of data parallelism do: it is to be
written once, all of them sharing the work, and with `read_once` read once.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snapshot import Snapshot, StateDict
from snapshot.bench.rounds import Workspace, available_memory
from snapshot.bench.workloads import CASES
from snapshot.cli.screen import say
from snapshot.errors import SnapshotError
from snapshot.io.system import hold_signals
from snapshot.io.url import options_from_environment
from snapshot.text import size_text

CASE = CASES["train"]
KEPT = "kept"
"""The snapshot that all restores read."""
_RANK = re.compile(r"data/[0-9a-z]+-([0-9]+)-")


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank says of one repetition; `None` stands for what it has nothing to say of."""

    seconds: float = 0.0
    read: int = 0
    """Bytes that it read from storage."""
    written: dict[int, int] | None = None
    """Bytes of the data files of each rank."""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is asked to do, once."""

    verb: str
    path: str
    alone: bool = False
    """Whether rank 0 does it, and no other takes part."""
    once: bool = False
    check: bool = False


VERBS = {
    "take, one rank alone": Job("take", "alone", alone=True),
    "take, {world} ranks": Job("take", "together"),
    "restore, one rank alone": Job("restore", KEPT, alone=True),
    "restore, {world} ranks, read_once=True": Job("restore", KEPT, once=True),
    "restore, {world} ranks, read_once=False": Job("restore", KEPT),
}


class _Rank:
    """One rank, in its own process, with its model."""

    def __init__(self, rank: int, world: int, where: str, scale: float, store: str) -> None:
        torch.set_num_threads(1)  # N ranks share the machine's cores
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        self.rank = rank
        self.where = where
        self.solo = dist.new_group([0])
        self.payload = CASE.make(scale)
        self.app_state = {
            key: StateDict(value) if isinstance(value, dict) else value for key, value in self.payload.app_state.items()
        }

    def do(self, job: Job) -> Told:
        """One repetition. All begin together, and what is not the verb is not timed."""
        takes_part = not (job.alone and self.rank)
        digest = self.payload.digest() if job.check else ""
        if job.check and job.verb == "restore" and takes_part:
            self.payload.wipe()
        dist.barrier()
        if not takes_part:
            return Told()
        path, group = f"{self.where}/{job.path}", self.solo if job.alone else None
        read, began = 0, time.perf_counter()
        if job.verb == "take":
            Snapshot.take(
                path,
                self.app_state,
                pg=group,
                replicated=["**"],
                storage_options=options_from_environment(),
                durable=False,
            )
        else:
            read = (
                Snapshot(path, group, options_from_environment()).restore(self.app_state, read_once=job.once).bytes_read
            )
        seconds = time.perf_counter() - began
        if job.check and self.payload.digest() != digest:
            raise SnapshotError("what was restored is not what was saved")
        return Told(seconds, read, _written(path) if job.verb == "take" and not self.rank else None)


def _written(path: str) -> dict[int, int]:
    """Bytes of the data files of each rank."""
    found: Counter[int] = Counter()
    for location, size in Snapshot(path, storage_options=options_from_environment()).metadata.files.items():
        of = _RANK.match(location)
        found[int(of[1]) if of else 0] += size
    return dict(found)


def _serve(rank: int, world: int, where: str, scale: float, store: str, pipe: Any) -> None:
    """A rank's process: it does what it is asked to, until nobody is there to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal reaches all: the parent ends us
    os.dup2(2, 1)  # what libraries print is no part of the table
    ranks: list[_Rank] = []

    def prepare() -> Told:
        ranks.append(_Rank(rank, world, where, scale, store))
        return Told(read=ranks[0].payload.nbytes())

    try:
        if not _safely(pipe, prepare):
            return
        while job := pipe.recv():
            _safely(pipe, lambda: ranks[0].do(job))
    except EOFError:  # the parent is gone
        pass


def _safely(pipe: Any, work: Any) -> bool:
    try:
        told: Told = work()
    except Exception as error:  # noqa: BLE001  (told to the parent, who raises it)
        told = Told(failed=f"{type(error).__name__}: {error}")
    pipe.send(told)
    return not told.failed


class _Ranks:
    """The processes, as the parent speaks to them."""

    def __init__(self, processes: list[Any], pipes: list[Any]) -> None:
        self.processes, self.pipes = processes, pipes

    def do(self, job: Job) -> list[Told]:
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(job)
            except BrokenPipeError:
                raise self._gone(rank) from None
        return self.hear()

    def hear(self) -> list[Told]:
        """What each says. Raises what the first that failed says, or that one is gone: others may wait for it."""
        told: dict[int, Told] = {}
        while len(told) < len(self.pipes):
            waiting = [rank for rank in range(len(self.pipes)) if rank not in told]
            connection.wait([each for rank in waiting for each in (self.pipes[rank], self.processes[rank].sentinel)])
            for rank in waiting:
                if self.pipes[rank].poll():
                    try:
                        told[rank] = self.pipes[rank].recv()
                    except EOFError:
                        raise self._gone(rank) from None
                    if told[rank].failed:
                        raise SnapshotError(f"rank {rank}: {told[rank].failed}")
                elif not self.processes[rank].is_alive():
                    raise self._gone(rank)
        return [told[rank] for rank in range(len(self.pipes))]

    def _gone(self, rank: int) -> SnapshotError:
        self.processes[rank].join()
        return SnapshotError(f"rank {rank} ended with exit status {self.processes[rank].exitcode}")


@contextmanager
def _started(world: int, where: Workspace, scale: float) -> Iterator[tuple[_Ranks, int]]:
    """Ranks that have a model each, and how many bytes it is. Whatever happens, no process is left."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Any] = []
    folder = tempfile.mkdtemp(prefix="snapshot-bench-store-")
    try:
        for rank in range(world):
            with hold_signals():
                ours, theirs = context.Pipe()
                arguments = (rank, world, where.text(), scale, str(Path(folder) / "store"), theirs)
                process = context.Process(target=_serve, args=arguments, name=f"rank-{rank}", daemon=True)
                process.start()
                processes.append(process)
                pipes.append(ours)
                theirs.close()
        ranks = _Ranks(processes, pipes)
        yield ranks, ranks.hear()[0].read
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def compare(where: Workspace, world: int, scale: float, rounds: int) -> Iterator[str]:
    """Measure, and give the lines of a table."""
    if where.url.scheme == "memory":
        raise ValueError(f"{where.url}: is the memory of one process, and ranks need a storage that all of them see")
    model = CASE.nbytes(scale)
    where.check_room(3 * model, f"a model of {world} ranks")
    if available_memory() < 1.5 * world * model:
        raise ValueError(f"{world} ranks need {size_text(1.5 * world * model)} of memory; give a smaller --scale")
    with _started(world, where, scale) as (ranks, nbytes):
        ranks.do(Job("take", KEPT))
        best: dict[str, Told] = {}
        for number in range(rounds + 1):
            for name, job in VERBS.items():
                say(f"round {number} of {rounds}: {name.format(world=world)} ...")
                told = ranks.do(Job(job.verb, job.path, job.alone, job.once, check=not number))
                if job.verb == "take":
                    Snapshot(f"{where.text()}/{job.path}", storage_options=options_from_environment()).delete()
                whole = Told(max(each.seconds for each in told), sum(each.read for each in told), told[0].written)
                if number and (name not in best or whole.seconds < best[name].seconds):
                    best[name] = whole
        say("")
    yield f"\n{world} ranks, each with the same model and optimizer of {size_text(nbytes)} (minimum of {rounds} rounds)"
    yield f"  {'':<42} {'seconds':>8} {'x alone':>8} {'bytes':>10} {'x model':>8} {'most/mean':>10}"
    for name, job in VERBS.items():
        alone = next(best[each].seconds for each, other in VERBS.items() if other.verb == job.verb and other.alone)
        yield _row(name.format(world=world), best[name], alone, nbytes, 1 if job.alone else world)
    yield "bytes: written to storage, or read from it, by all ranks; most/mean: of the bytes that each rank wrote"


def _row(name: str, told: Told, alone: float, nbytes: int, ranks: int) -> str:
    moved, balance = told.read, ""
    if told.written is not None:
        moved = sum(told.written.values())
        balance = f"{max(told.written.values()) * ranks / moved:.3f}"
    return (
        f"  {name:<42} {told.seconds:>8.3f} {told.seconds / alone:>8.2f} {size_text(moved):>10} "
        f"{moved / nbytes:>8.3f} {balance:>10}"
    ).rstrip()
