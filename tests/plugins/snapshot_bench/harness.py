"""Parts that the benchmarks of a checkout share: rows that alternate in one process, fresh processes, ranks, and links.

Systems, raw I/O, places and figures are those of `snapshot bench`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snapshot.cli.arguments import environment
from snapshot.errors import SnapshotError
from snapshot.testing import StorageCall, Tap
from snapshot_bench.results import align_columns
from snapshot_bench.rounds import Workspace, alternate
from tests.helpers.rank_pool import Died, Pool

GB = 10**9
BUFFER = 8 << 20

Work = Callable[[], Any]
"""Work of a row. If it returns a float, these are its seconds."""
LONGEST = 24 * 3600
"""Seconds that a job of ranks may take."""
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

    async def before(self, operation: StorageCall) -> None:
        """Wait until the earlier bytes and these have passed."""
        if operation.name in ("write", "read_into", "put", "commit"):
            self._free = max(self._free, time.monotonic()) + operation.nbytes / self.rate
            await asyncio.sleep(max(0.0, self._free - time.monotonic()))


# Fresh processes.

PROGRAM = """
import json, sys, time
from pathlib import Path
from snapshot import Snapshot, Target, TensorMap
from snapshot_merge import MergeOptions, merge
from snapshot_bench.child import reset_peak, status
from tests.plugins.snapshot_bench.harness import transfer
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


class Ranks(Pool):
    """Processes that are the ranks of one process group on gloo, each with one torch thread."""

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = LONGEST) -> list[Any]:
        """Return the results of a module's function on all ranks. Raise SnapshotError if one fails, or a rank ends."""
        self.start(function, *arguments)
        found: list[Any] = self.finish(timeout, until_death=True)
        for rank, each in enumerate(found):
            if isinstance(each, Died):
                raise SnapshotError(f"rank {rank} ended with exit status {each.code}")
        for rank, each in enumerate(found):
            if isinstance(each, BaseException):
                raise SnapshotError(f"rank {rank}: {type(each).__name__}: {each}")
        return found


@contextmanager
def start_ranks(world: int) -> Iterator[Ranks]:
    """Start ranks in interpreters of their own, and end them with the context."""
    with environment({"LOCAL_WORLD_SIZE": str(world)}):
        ranks = Ranks(world, timeout=LONGEST, method="spawn")
    with ranks:
        yield ranks
