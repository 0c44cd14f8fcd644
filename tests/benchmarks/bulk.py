"""`python -m tests.benchmarks bulk`: verbs whose work N ranks share, beside one rank, and beside raw copies and reads.

Each rank has one core, as if it were on a small host of its own. As many processes do a raw copy or read. Each has
whole files, of about the same number of bytes. With a link, each rank reads at a limited rate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from snapshot import Snapshot, StateDict, Target, merge
from snapshot.distributed.exchange import solo_exchange
from snapshot.testing import Operation, Tap, tapped
from snapshot.text import size_text
from snapshot.transform.call import share_whole

FILES = 8
FILE = 128 << 20
"""Bytes of each tensor. Each is in a file of its own."""
CHUNK = 8 << 20
LINK = 200e6
"""Bytes per second that a rank reads over its link."""
RAW = {"cp": "raw copy", "convert": "raw copy", "merge": "raw copy", "verify": "raw read", "diff": "raw read"}
"""Verbs, and what they are compared with. A merge and a comparison read two sources."""
LINKED = {"cp, link": "cp", "verify, link": "verify"}


def compare(folder: Path, scale: float, rounds: int, world: int) -> Iterator[str]:
    """The lines of the table."""
    torch.manual_seed(0)
    count = max(1, int(FILE * scale) // 4)
    for name in ("a", "b"):
        for number in range(FILES):
            tensor = {f"w{number}": torch.randn(count)}
            Snapshot.take(folder / f"{name}-{number}", {"m": StateDict(**tensor)}, durable=False)
    _gather(folder, "a")
    _gather(folder, "b")
    yield f"\n{FILES} files of {size_text(count * 4)}, durable"
    seconds: dict[tuple[str, int], list[float]] = {}
    with _ranks(folder, 1) as alone, _ranks(folder, world) as all_:
        for number in range(rounds + 1):
            for job in ("raw copy", "raw read", *RAW, *LINKED):
                for ranks, pipes in ((1, alone), (world, all_)):
                    taken = _together(pipes, job)
                    shutil.rmtree(folder / "made", ignore_errors=True)
                    if number:
                        seconds.setdefault((job, ranks), []).append(taken)
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    for job in ("raw copy", "raw read", *RAW, *LINKED):
        one, many = medians[job, 1], medians[job, world]
        line = f"  {job:<12} 1 rank {one:6.3f} s, {world} ranks {many:6.3f} s: {one / many:.2f} x as fast"
        if job in RAW:
            raw = [medians[RAW[job], ranks] for ranks in (1, world)]
            line += f"; {one / raw[0]:.2f} and {many / raw[1]:.2f} x the time of the {RAW[job]}"
        elif job in LINKED:
            link = FILES * count * 4 / LINK
            line += f"; {one / link:.2f} and {many / link * world:.2f} x the time of the link"
        yield line


def _gather(folder: Path, name: str) -> None:
    """Make one snapshot in several files: a folder of safetensors files, converted by a rank for each."""
    parts = folder / f"{name}-parts"
    parts.mkdir()
    for number in range(FILES):
        Snapshot(folder / f"{name}-{number}").convert(
            Target(parts / f"{number}.safetensors", "safetensors", durable=False)
        )
        shutil.rmtree(folder / f"{name}-{number}")
    index = {f"w{number}": f"{number}.safetensors" for number in range(FILES)}
    (parts / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    with _ranks(folder, FILES) as pipes:
        _together(pipes, f"gather {name}")
    shutil.rmtree(parts)


@contextmanager
def _ranks(folder: Path, world: int) -> Iterator[list[Connection]]:
    """Start ranks that wait for jobs."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store:
        pipes, processes = [], []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(rank, world, theirs, str(folder), store), daemon=True)
                process.start()
                pipes.append(ours)
                processes.append(process)
            _together(pipes, "nothing")
            yield pipes
        finally:
            for process in processes:
                process.kill()
                process.join()


def _together(pipes: list[Connection], job: str) -> float:
    """Let all ranks do a job. Return the seconds until the last one has ended it."""
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send(job)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - began


class Link(Tap):
    """Lets reads wait as a link would that all of them share."""

    def __init__(self) -> None:
        self._free = 0.0

    async def before(self, operation: Operation) -> None:
        """Wait for the end of a read."""
        if operation.name == "read_into":
            self._free = max(self._free, time.monotonic()) + operation.nbytes / LINK
            await asyncio.sleep(self._free - time.monotonic())


def _work(rank: int, world: int, pipe: Connection, folder: str, store: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}/store", world), rank=rank, world_size=world)
    with tapped("linked", Link()):
        while True:
            _do(pipe.recv(), Path(folder), rank, world)
            pipe.send(None)


def _do(job: str, root: Path, rank: int, world: int) -> None:
    """Do this rank's share of a job."""
    a, b, made = root / "a", root / "b", root / "made"
    origin = f"linked+file://{a}" if job in LINKED else a
    job = LINKED.get(job, job)
    if job.startswith("gather"):
        name = job.partition(" ")[2]
        Snapshot(root / f"{name}-parts").convert(Target(root / name, durable=False), ranks=True)
    elif job.startswith("raw"):
        _raw(rank, world, a, made if job == "raw copy" else None)
    elif job == "cp":
        Snapshot(origin).copy(made, ranks=True)
    elif job == "verify":
        Snapshot(origin).verify(ranks=True)
    elif job == "convert":
        Snapshot(a).convert(made, ranks=True)
    elif job == "merge":
        merge([a, b], made, ranks=True)
    elif job == "diff":
        Snapshot.diff(a, b, values=True, ranks=True)


def _raw(rank: int, world: int, source: Path, target: Path | None) -> None:
    """Read this rank's files, and write them if there is a target."""
    exchange = solo_exchange("raw")
    exchange.world = world
    files = sorted((source / "data").iterdir())
    chunk = bytearray(CHUNK)
    for file in share_whole(exchange, files, [file.stat().st_size for file in files])[rank]:
        with open(file, "rb", buffering=0) as opened:
            if target is None:
                while opened.readinto(chunk):
                    pass
                continue
            target.mkdir(exist_ok=True)
            with open(target / file.name, "wb", buffering=0) as written:
                while size := opened.readinto(chunk):
                    written.write(memoryview(chunk)[:size])
                os.fsync(written.fileno())
