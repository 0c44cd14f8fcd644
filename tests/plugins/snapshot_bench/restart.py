"""A restart on the same host: durable takes, the first restore after each, and raw I/O of the same bytes."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from snapshot import Snapshot, StateDict
from snapshot_bench.raw_io import read_streams, write_direct
from snapshot_bench.rounds import Workspace
from snapshot_bench.workloads import random_tensors
from tests.plugins.snapshot_bench.harness import draw_rows, folder_of

GiB = 1 << 30
STREAMS = (1, 2)
SETTING = "SNAPSHOT_DIRECT_IO"
_WRITE, _READ = "raw write, O_DIRECT", "raw read of cached bytes, streams: {}"


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder, nbytes = folder_of(where), int(GiB * scale)
    tensors = random_tensors(4, (max(1, nbytes // 4 // 4),))
    state = {"s": StateDict(tensors)}
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(row: str) -> Iterator[None]:
        began = perf_counter()
        yield
        if number:  # not the warm-up round
            seconds[row].append(perf_counter() - began)

    for number in range(rounds + 1):
        for setting in ("auto", "always") if number % 2 else ("always", "auto"):
            os.environ[SETTING] = setting
            path = folder / f"{setting}-{number % 2}"
            shutil.rmtree(path, ignore_errors=True)
            with timed(f"durable take, {setting}"):
                Snapshot.take(str(path), state)
            os.environ[SETTING] = "auto"
            with timed(f"restore after it, {setting}"):
                Snapshot(str(path)).restore(state)
        os.environ.pop(SETTING)
        raw = folder / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        raw.mkdir()
        with timed(_WRITE):
            write_direct([*tensors.values()], raw, durable=True)
        _read(raw / "0.raw")
        for streams in STREAMS:
            with timed(_READ.format(streams)):
                read_streams([*tensors.values()], raw / "0.raw", streams)
    beside = {row: _WRITE if "take" in row else _READ.format(STREAMS[-1]) for row in seconds if "raw" not in row}
    yield from draw_rows(seconds, nbytes, beside)


def _read(file: Path) -> None:
    """Read a file into the page cache."""
    with file.open("rb", buffering=0) as opened:
        while opened.read(8 << 20):
            pass
