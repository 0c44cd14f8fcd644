"""`python -m tests.benchmarks merge`: three checkpoints become one, beside a raw read of three and a write of one."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from snapshot.bench.raw_io import StaysCached, drop
from snapshot.bench.rounds import Workspace
from snapshot.snapshot import Snapshot
from snapshot.text import size_text
from tests.benchmarks.load import model

COUNT = 3
BUDGET = 64 << 20
CHUNK = 8 << 20
_MERGE = """
import json, sys, time
from snapshot import Target
import snapshot
from snapshot.bench.child import reset_peak, status

target, to, budget, *sources = sys.argv[1:]
snapshot.Snapshot("memory://bench/x").exists()
from snapshot.transform import merge as merging
before = reset_peak() or status("VmRSS")
began = time.perf_counter()
snapshot.merge(sources, Target(target, to, overwrite=True), memory_budget_bytes=int(budget))
print(time.perf_counter() - began, (status("VmHWM") - before) >> 20)
"""


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """The lines of the table."""
    if not where.local:
        raise ValueError("merge measures beside raw reads, which need a folder of a file system")
    root = Path(where.text())
    sources = []
    for number in range(COUNT):
        save_file(model(scale, seed=number), root / f"{number}.safetensors")
        sources.append(root / f"{number}.safetensors")
    Snapshot(sources[2]).convert(root / "2")
    sources[2].unlink()
    files = [*sources[:2], *(root / "2" / "data").iterdir()]
    sources[2] = root / "2"
    nbytes = files[0].stat().st_size
    yield f"\n{COUNT} checkpoints of {size_text(nbytes)} in bfloat16, durable, budget {size_text(BUDGET)}"
    for state in ("warm", "cold"):
        seconds: dict[str, list[float]] = {}
        peaks: dict[str, int] = {}
        for number in range(rounds + 1):
            try:
                found = _round(root, sources, files, state == "cold", peaks)
            except StaysCached as error:
                yield f"  cold: left out: {error}"
                return
            for name, taken in found.items():
                if number:
                    seconds.setdefault(name, []).append(taken)
        read, write = (statistics.median(seconds.pop(name)) for name in ("read", "write"))
        yield f"  {state} raw: read of {COUNT} {read:.3f} s, durable write of one {write:.3f} s"
        for name, each in seconds.items():
            median = statistics.median(each)
            ratios = f"{median / (read + write):.2f} x read and write, {median / read:.2f} x read"
            spread = f"({min(each):.3f} to {max(each):.3f})"
            yield f"  {state} {name:<24} {median:8.3f} s  {spread} {ratios}, peak {peaks[name]} MiB"


def _round(root: Path, sources: list[Path], files: list[Path], cold: bool, peaks: dict[str, int]) -> dict[str, float]:
    found = {}
    if cold:
        drop(root)
    began = time.perf_counter()
    chunk = bytearray(CHUNK)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(chunk):
                pass
    found["read"] = time.perf_counter() - began
    began = time.perf_counter()
    with open(root / "raw", "wb", buffering=0) as opened:
        for _ in range(0, files[0].stat().st_size, CHUNK):
            opened.write(chunk)
        os.fsync(opened.fileno())
    found["write"] = time.perf_counter() - began
    os.unlink(root / "raw")
    for to, name in (("safetensors", "out.safetensors"), ("snapshot", "out")):
        if cold:
            drop(root)
        command = [sys.executable, "-c", _MERGE, str(root / name), to, str(BUDGET), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        taken, peak = done.stdout.split()
        found[f"merge to {to}"] = float(taken)
        peaks[f"merge to {to}"] = max(peaks.get(f"merge to {to}", 0), int(peak))
    return found
