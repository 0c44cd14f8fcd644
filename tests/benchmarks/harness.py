"""Parts that the benchmarks of a checkout share: rows that alternate in one process, fresh processes, ranks, and links.

Systems, raw I/O, places and figures are those of `snapshot bench`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snapshot.bench.results import align_columns
from snapshot.bench.rounds import Workspace, alternate
from snapshot.errors import SnapshotError
from snapshot.io.system import hold_signals
from snapshot.testing import Operation, Tap

GB = 10**9
BUFFER = 8 << 20

Work = Callable[[], Any]
"""Work of a row. If it returns a float, these are its seconds."""
Seconds = Mapping[str, list[float]]
"""Seconds of the counted repetitions, by row."""


def folder_of(where: Workspace) -> Path:
    """Return the folder of a place. Raise ValueError if it is not on a file system."""
    if not where.local:
        raise ValueError(f"{where.url}: the place must be a folder, as for raw I/O and for other libraries")
    return Path(where.text())


# Rows in one process.


def time_rows(
    rows: Mapping[str, Work],
    rounds: int,
    *,
    before: Callable[[str], object] | None = None,
    after: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Time rows that alternate in rounds, after a warm-up round.

    `before` and `after` receive the name of the row, and are not timed. With `failed`, an error ends only its own row.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rows}

    def repeat(name: str, number: int) -> bool:
        if before:
            before(name)
        try:
            began = clock()
            result = rows[name]()
            taken = clock() - began
        except Exception as error:
            if failed is None:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
            return False
        if number:
            seconds[name].append(result if isinstance(result, float) else taken)
        del result
        if after:
            after(name)
        return True

    alternate(list(rows), rounds, repeat)
    return seconds


def draw_rows(
    seconds: Seconds, nbytes: int = 0, beside: str | Mapping[str, str] = "", more: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines of rows: median, rate, least and most, and the ratio to the row that each is compared with."""
    others = beside if isinstance(beside, Mapping) else dict.fromkeys(seconds, beside)
    width = max(map(len, others.values()), default=0)
    lines = []
    for name, taken in seconds.items():
        if not taken:
            continue
        middle, other = statistics.median(taken), others.get(name, "")
        cells = [name, f"{middle:.4f} s"]
        if nbytes:
            cells.append(f"{nbytes / middle / GB:.2f} GB/s")
        cells.append(f"({min(taken):.4f} to {max(taken):.4f})")
        compared = other and other != name
        cells.append(f"{middle / statistics.median(seconds[other]):.2f} x {other:<{width}}" if compared else "")
        lines.append([*cells, (more or {}).get(name, "")])
    if lines:
        yield from (line.rstrip() for line in align_columns(lines))


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warning that there is only one process: this is measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# Files, without a library.


def transfer(files: Iterable[Path], folder: Path | None = None, *, durable: bool = False) -> None:
    """Read files through one buffer, and write them into a folder if it is given."""
    buffer = memoryview(bytearray(BUFFER))
    for file in files:
        with open(file, "rb", buffering=0) as source:
            if folder is None:
                while source.readinto(buffer):
                    pass
                continue
            folder.mkdir(exist_ok=True)
            with open(folder / file.name, "wb", buffering=0) as target:
                while count := source.readinto(buffer):
                    target.write(buffer[:count])
                if durable:
                    os.fsync(target.fileno())


class Link(Tap):
    """A link that transfers a number of bytes per second, for all storages with this tap together."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = 0.0

    async def before(self, operation: Operation) -> None:
        """Wait until the earlier bytes and these have passed."""
        if operation.name in ("write", "read_into", "put", "commit"):
            self._free = max(self._free, time.monotonic()) + operation.nbytes / self.rate
            await asyncio.sleep(max(0.0, self._free - time.monotonic()))


# Fresh processes.

PROGRAM = """
import json, sys, time
from pathlib import Path
from snapshot import Snapshot, Target, TensorMap, merge
from snapshot.bench.child import reset_peak, status
from snapshot.transform import merge as _
from tests.benchmarks.harness import transfer
globals().update(json.loads(sys.argv[1]))
Snapshot("memory://bench/x").exists()
{prepare}
before = reset_peak() or status("VmRSS")
began = time.perf_counter()
{work}
print(json.dumps([time.perf_counter() - began, status("VmHWM") - before]))
"""


def measure_process(work: str, *, prepare: str = "", **names: Any) -> tuple[float, int]:
    """Run Python code in a fresh process, with these names. Return its seconds, and the rise of its memory in bytes."""
    code = PROGRAM.format(prepare=prepare, work=work)
    found = subprocess.run([sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"{work}: {found.stderr}")
    seconds, nbytes = json.loads(found.stdout)
    return seconds, nbytes


# Ranks.


class Ranks:
    """Processes that are the ranks of one process group on gloo, each with one torch thread."""

    def __init__(self, processes: list[Any], pipes: list[Any]) -> None:
        self._processes, self._pipes = processes, pipes

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a module's function on all ranks, with the rank in front of the arguments. Return the results."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, arguments))
            except BrokenPipeError:
                raise self._ended(rank) from None
        return self.receive()

    def receive(self) -> list[Any]:
        """Return the result of each rank. Raise the first error, or SnapshotError if a rank ends."""
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in found]
            connection.wait([each for rank in waiting for each in (self._pipes[rank], self._processes[rank].sentinel)])
            for rank in waiting:
                if self._pipes[rank].poll():
                    try:
                        found[rank], failure = self._pipes[rank].recv()
                    except EOFError:
                        raise self._ended(rank) from None
                    if failure:
                        raise SnapshotError(f"rank {rank}: {failure}")
                elif not self._processes[rank].is_alive():
                    raise self._ended(rank)
        return [found[rank] for rank in range(len(self._pipes))]

    def _ended(self, rank: int) -> SnapshotError:
        self._processes[rank].join()
        return SnapshotError(f"rank {rank} ended with exit status {self._processes[rank].exitcode}")


@contextmanager
def start_ranks(world: int) -> Iterator[Ranks]:
    """Start ranks, and end their processes with the context."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Any] = []
    folder = tempfile.mkdtemp(prefix="snapshot-bench-store-")
    try:
        for rank in range(world):
            with hold_signals():
                here, there = context.Pipe()
                arguments = (rank, world, f"{folder}/store", there)
                process = context.Process(target=_serve_rank, args=arguments, name=f"rank-{rank}", daemon=True)
                process.start()
                processes.append(process)
                pipes.append(here)
                there.close()
        ranks = Ranks(processes, pipes)
        ranks.receive()
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _serve_rank(rank: int, world: int, store: str, pipe: Any) -> None:
    """Run the functions that the parent sends, until it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal reaches all: the parent ends its ranks
    os.dup2(2, 1)  # output of libraries is not a part of the table
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)  # the ranks share the machine's cores
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        pipe.send((None, ""))
        while True:
            function, arguments = pipe.recv()
            try:
                response = function(rank, *arguments), ""
            except Exception as error:  # noqa: BLE001 - the parent raises it
                response = None, f"{type(error).__name__}: {error}"
            pipe.send(response)
    except (EOFError, BrokenPipeError):  # the parent has ended
        pass
