"""`snapshot bench --formats`: what others wrote, read by them and by us; how little of it is read to list it; and how
much memory a conversion takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from snapshot.bench.rounds import Workspace
from snapshot.bench.workloads import CASES, Payload
from snapshot.snapshot import Snapshot
from snapshot.state.stateful import StateDict
from snapshot.testing import recording
from snapshot.text import size_text
from tests.benchmarks.dcp import quiet

MEASURED = ("train", "small")
BUDGET = 256 << 20
_CONVERT = """
import sys
from snapshot import Snapshot, Target

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

source, target, to, budget = sys.argv[1:]
Snapshot("memory://bench/x").exists()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # from here on, the most that is resident counts anew
before = resident("VmHWM")
report = Snapshot(source).convert(Target(target, to, durable=False), memory_budget_bytes=int(budget))
print((resident("VmHWM") - before) // 1024, report.seconds)
"""


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """The lines of the tables."""
    if not where.local:
        raise ValueError("--formats measures beside torch's own readers, which need a folder of a file system")
    for name in MEASURED:
        case = CASES[name]
        where.check_room(4 * case.nbytes(scale), f"{name}: formats")
        payload = case.make(scale)
        root = Path(where.text())
        yield f"\n{name}: {case.about}, {size_text(payload.nbytes())}"
        _write(payload, root)
        yield from _listed(root)
        yield from _restored(payload, root, rounds)
        if name == "train":
            yield from _converted(root)
        where.empty()


def _write(payload: Payload, root: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # dear

    with quiet():
        save({"m": payload.tensors}, checkpoint_id=str(root / "dcp"), no_dist=True)
    torch.save({"m": payload.tensors}, root / "x.pt")


def _listed(root: Path) -> Iterator[str]:
    for name, metadata in (("dcp", (root / "dcp" / ".metadata").stat().st_size), ("x.pt", 0)):
        with recording() as log:
            began = time.perf_counter()
            count = len(Snapshot(f"recording+file://{root / name}").get_manifest())
            seconds = time.perf_counter() - began
        read = log.nbytes("read_into") + metadata
        yield f"  list {name:<6} {count:,} entries in {seconds:.3f} s, {size_text(read)} read"


def _restored(payload: Payload, root: Path, rounds: int) -> Iterator[str]:
    from torch.distributed.checkpoint.state_dict_loader import load  # dear

    tensors, state = payload.tensors, StateDict(payload.tensors)

    def by_torch() -> None:
        for name, tensor in torch.load(root / "x.pt", mmap=True)["m"].items():
            tensors[name].detach().copy_(tensor)

    ways: dict[str, Callable[[], Any]] = {
        "dcp.load": lambda: load({"m": tensors}, checkpoint_id=str(root / "dcp"), no_dist=True),
        "snapshot, of dcp": lambda: Snapshot(root / "dcp").restore({"m": state}),
        "torch.load(mmap)": by_torch,
        "snapshot, of torch": lambda: Snapshot(root / "x.pt").restore({"m": state}),
    }
    expected = payload.digest()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            payload.wipe()
            with quiet():
                began = time.perf_counter()
                way()
                taken = time.perf_counter() - began
            if payload.digest() != expected:
                raise ValueError(f"{name} did not bring back what was saved")
            if number:  # the first is not counted
                seconds[name].append(taken)
    for name, taken_all in seconds.items():
        yield f"  {name:<20} {statistics.median(taken_all):8.3f} s  ({min(taken_all):.3f} to {max(taken_all):.3f})"


def _converted(root: Path) -> Iterator[str]:
    for to, name in (("snapshot", "s"), ("safetensors", "s.safetensors"), ("torch", "t.pt"), ("dcp", "d")):
        command = [sys.executable, "-c", _CONVERT, str(root / "dcp"), str(root / name), to, str(BUDGET)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        mib, seconds = done.stdout.split()
        yield f"  convert to {to:<12} {float(seconds):8.3f} s, {mib} MiB more memory (budget {BUDGET >> 20} MiB)"
