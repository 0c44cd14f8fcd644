"""Child process of `snapshot bench`: one system, one case, one operation, and any number of repetitions.

Each system is measured in its own process, so that none inherits another's warm allocator, threads or leaks. The
process serves all rounds, so that rounds of different systems can alternate under equal conditions. The protocol uses
lines of JSON: the first argument describes the task, and each input line requests one repetition. Each response is
written to the original standard output, which nothing else can print to.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snapshot import Snapshot
from snapshot.io.url import URL, options_from_environment
from snapshot_bench.raw_io import StaysCached, drop
from snapshot_bench.systems import OVERLAPPED, build_system
from snapshot_bench.workloads import CASES, CPU, INCREMENTAL, Case


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a child."""

    system: str
    case: str
    scale: float
    operation: str
    where: str
    """Absolute path or URL below which this child may create and remove files."""
    device: str = "cpu"
    """Device of the tensors."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Measurements of one repetition."""

    seconds: float
    cpu_seconds: float
    peak_extra_bytes: int | None
    """Rise of the resident memory; None if the kernel does not report it."""
    written_bytes: int | None = None
    """Bytes of the data files that a take of this library wrote."""


class Runner(ABC):
    """A state on its device, and a place for its files. Subclasses add the system and its repetitions."""

    def __init__(self, task: Task, case: Case) -> None:
        self.task = task
        self.local = URL.parse(task.where).scheme == "file"
        self.device = torch.device(task.device)
        if self.device != CPU:
            torch.get_device_module(self.device).set_device(self.device.index or 0)
        self.payload = case.make(task.scale, self.device)
        self.count = 0

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the values that the parent needs before the first repetition."""

    @abstractmethod
    def respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a requested repetition. Return its measurements."""

    def fresh(self) -> str:
        self.count += 1
        return f"{self.task.where}/{os.getpid()}-{self.count}"

    def remove(self, where: str) -> None:
        if self.local:
            shutil.rmtree(where, ignore_errors=True)
        else:
            Snapshot(where, storage_options=options_from_environment()).delete()

    def synchronize(self) -> None:
        """Wait for the work that is queued on the device."""
        if self.device != CPU:
            torch.accelerator.synchronize(self.device)


class Worker(Runner):
    """A system with its payload, ready for repetitions."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, (CASES | INCREMENTAL)[task.case])
        self.system = build_system(task.system, self.payload)
        self.ways = self.system.ways(task.operation)
        self.reads = task.operation in ("restore", "cold", "open")
        self.saved = ""
        if self.reads:
            self.digest = self.payload.digest()
            self.saved = self.fresh()
            self.system.save(self.saved)
        for chain in self.system.chains.values():
            while not chain.is_warm:
                self.payload.change()
                chain.save(self.fresh())

    def describe(self) -> dict[str, Any]:
        return {
            "rows": list(self.ways),
            "bytes": self.payload.nbytes(),
            "tensors": len(self.payload.tensors),
            "manifest_bytes": self._manifest_bytes(),
        }

    def respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(self.repeat(request["row"], request["check"]))

    def repeat(self, row: str, check: bool) -> Repetition:
        """Run the operation once. Freeing space, dropping caches, waiting and removing are not timed."""
        where = self.saved if self.reads else self.fresh()
        if self.task.operation == "cold":
            drop(Path(where))
        if check and self.task.operation in ("restore", "cold"):
            self.payload.wipe()
        self.payload.change()
        gc.collect()
        self.synchronize()
        before = reset_peak()
        cpu = time.process_time()
        began = time.perf_counter()
        started = self.ways[row](where)
        if not row.endswith(OVERLAPPED):
            self.synchronize()
        seconds = time.perf_counter() - began
        if started is not None:  # the rest counts as memory and CPU, but not as time
            started.wait()
        cpu = time.process_time() - cpu
        peak = status("VmHWM")
        compares = check and self.task.operation in ("restore", "cold") and not row.endswith("O_DIRECT")
        if compares and self.payload.digest() != self.digest:
            raise RuntimeError(f"{row} restored other bytes than those saved")
        if not self.reads:
            chain = self.system.chains.get(row)
            for each in chain.cut() if chain else [where]:
                self.remove(each)
        extra = None if peak is None or before is None else max(0, peak - before)
        return Repetition(seconds, cpu, extra, self.system.written_bytes)

    def _manifest_bytes(self) -> int | None:
        manifest = Path(self.saved) / ".snapshot_metadata"
        return manifest.stat().st_size if self.saved and self.local and manifest.exists() else None


def reset_peak() -> int | None:
    """Reset the kernel's high-water mark of resident memory. Return the current value."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return status("VmRSS")


def status(name: str) -> int | None:
    """Return a value from this process's status file, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def serve(build: Callable[[Task], Runner]) -> None:
    """Serve the parent until it closes the input. The first argument of the process is the task."""
    warnings.simplefilter("ignore")  # warnings of peers are not shown
    responses = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not a response
    runners: list[Runner] = []

    def prepare() -> Mapping[str, Any]:
        runners.append(build(Task(**json.loads(sys.argv[1]))))
        return runners[0].describe()

    if _send(responses, prepare):
        for line in sys.stdin:
            _send(responses, partial(runners[0].respond, json.loads(line)))


def _send(responses: int, work: Callable[[], Mapping[str, Any]]) -> bool:
    """Send the result of `work`, or its error: a failing peer must not end the run."""
    try:
        reply = work()
    except Exception as error:  # noqa: BLE001  (any exception of any peer is a line in the report)
        text = " ".join(str(error).split())[:300]
        reply = {"failed": f"{type(error).__name__}: {text}", "excused": isinstance(error, StaysCached)}
    os.write(responses, json.dumps(reply).encode() + b"\n")
    return "failed" not in reply


if __name__ == "__main__":
    serve(Worker)
