"""The child process of `snapshot bench --async`: one system, which saves alone, or while a model is trained.

It is spoken to as `bench_worker` is: its first argument says what it is, and lines of JSON ask for repetitions.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snapshot import Snapshot
from snapshot.bench.child import Task, reset_peak, status
from snapshot.bench.workloads import CPU, Payload
from snapshot.io.url import URL, options_from_environment
from tests.benchmarks.background_systems import HELD, WAYS, Started

STEP = 0.05
"""Seconds that a step is to take at least, at full scale: long enough for a moment of the machine's not to decide."""
MOST_WORK = 256
QUIET, AFTER = 20, 5
"""Steps before the call, and after the end of the write."""
LONGEST = 900.0
"""Seconds after which a save that is not done never will be."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One save, with nothing beside it."""

    blocked: float
    staged: float
    """Seconds from the call until tensors may change."""
    done: float
    """Seconds from the call until it is written."""
    peak: int | None
    """How far memory has risen above where it stood before the first save, in this process and those it started."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One save, and the steps before it, beside it and after it; all times are seconds after the call began."""

    returned: float
    done: float
    steps: list[tuple[float, float]]
    """When each began and ended."""
    waited: bool
    """Whether tensors might not change yet when the call returned, so that the first step had to wait."""
    exact: bool | None
    """Whether what was saved is what was there at the moment of the call; None if nobody looked."""


class Training:
    """Steps of forward, backward and optimizer on a part of the model that is saved."""

    def __init__(self, payload: Payload, scale: float) -> None:
        self.least = STEP * min(1.0, scale**0.5)
        self.optimizer: torch.optim.Optimizer = payload.app_state["optim"]
        self.model: nn.Module = payload.app_state["model"]
        self.work = 1
        self.device = payload.device
        width = getattr(self.model, "embedding", nn.Embedding(1, 1)).embedding_dim
        self.input = torch.rand(MOST_WORK, 16, width).to(self.device)

    def calibrate(self) -> int:
        """Find how much work makes a step long enough."""
        self.step()
        while self.work < MOST_WORK and min(self._timed() for _ in range(3)) < self.least:
            self.work *= 2
        return self.work

    def step(self, before: Callable[[], object] | None = None) -> None:
        """One step; `before` is what its loop has to wait for before tensors change."""
        self._loss().backward()  # type: ignore[no-untyped-call]
        if before:
            before()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if self.device != CPU:  # a step ends when the device has done it
            torch.accelerator.synchronize(self.device)

    def _timed(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def _loss(self) -> torch.Tensor:
        if isinstance(self.model, nn.ParameterList):
            return torch.stack(list(self.model)[: 8 * self.work]).square().mean()
        made: torch.Tensor = self.model.get_submodule("encoder.layers.0")(self.input[: self.work])
        return made.square().mean()


class Worker:
    """A system with its payload, ready for repetitions."""

    def __init__(self, task: Task) -> None:
        self.task = task
        device = torch.device(task.device)
        if device != CPU:
            torch.get_device_module(device).set_device(device.index or 0)
        self.payload = HELD[task.case].make(task.scale, device)
        self.system = WAYS[task.system].make(self.payload)
        self.rows = self.system.rows(task.system)
        self.training: Training | None = None
        self.count = 0
        gc.collect()
        self.resident = reset_peak()

    def describe(self) -> dict[str, Any]:
        """What the parent needs to know first."""
        return {
            "rows": list(self.rows),
            "kind": self.system.kind,
            "synced": self.system.synced,
            "bytes": self.payload.nbytes(),
            "tensors": len(self.payload.tensors),
        }

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        if asked["do"] == "save":
            return asdict(self.save(asked["row"], asked.get("budget")))
        if self.training is None:  # only now: what steps hold is no part of a save's memory
            self.training = Training(self.payload, self.task.scale)
            os.environ["SNAPSHOT_LANES"] = "1"  # against one thread of training
        if asked["do"] == "calibrate":
            return {"work": self.training.calibrate()}
        self.training.work = asked["work"]
        return asdict(self.train(self.training, asked["row"], asked["check"]))

    def save(self, row: str, budget: int | None) -> Saved:
        """Save once; making room and removing are not timed."""
        where = self._fresh()
        gc.collect()
        began = time.perf_counter()
        started = self.rows[row](where, budget)
        blocked = time.perf_counter() - began
        if started.staged:
            started.staged()
        staged = time.perf_counter() - began
        ending = _Ending(started)
        ending.join(LONGEST)
        if not ending.seen():
            raise TimeoutError(f"not written after {LONGEST:.0f} s")
        done = ending.at - began
        highest = status("VmHWM")
        peak = None if highest is None or self.resident is None else max(0, highest - self.resident) + helpers()
        self._remove(where)
        return Saved(blocked, staged, done, peak)

    def train(self, training: Training, row: str, check: bool) -> Trained:
        """Save once, in the middle of training."""
        where = self._fresh()
        gc.collect()
        clock = time.perf_counter
        steps: list[tuple[float, float]] = []

        def step(before: Callable[[], object] | None = None) -> None:
            began = clock()
            training.step(before)
            steps.append((began, clock()))

        for _ in range(QUIET):
            step()
        digest = self.payload.digest() if check else ""
        called = clock()
        started = self.rows[row](where, None)
        returned = clock()
        ending = _Ending(started)
        step(None if started.waits_itself else started.staged)
        while not ending.seen():
            step()
            if clock() - called > LONGEST:
                raise TimeoutError(f"not written after {LONGEST:.0f} s")
        for _ in range(AFTER):
            step()
        exact = None
        if check:
            self.system.load(where)
            exact = self.payload.digest() == digest
        self._remove(where)
        relative = [(began - called, ended - called) for began, ended in steps]
        return Trained(returned - called, ending.at - called, relative, started.staged is not None, exact)

    def _fresh(self) -> str:
        self.count += 1
        return f"{self.task.where}/{os.getpid()}-{self.count}"

    def _remove(self, where: str) -> None:
        if URL.parse(where).scheme == "file":
            shutil.rmtree(where, ignore_errors=True)
        else:
            Snapshot(where, storage_options=options_from_environment()).delete()


class _Ending(threading.Thread):
    """Waits for the end of a save, and notes when that was."""

    def __init__(self, started: Started) -> None:
        super().__init__(daemon=True)
        self.started = started
        self.at = 0.0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.started.wait()
        except BaseException as error:  # noqa: BLE001 - raised by `seen`
            self.error = error
        self.at = time.perf_counter()

    def seen(self) -> bool:
        """Whether it has come; raises what made the save fail."""
        if self.error:
            raise self.error
        return self.at > 0


def helpers() -> int:
    """What the processes that this one started hold of their own; what they share is counted here."""
    held = 0
    for pid in family(os.getpid()):
        lines = _lines(f"/proc/{pid}/status")
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
        held += max(0, sizes.get("VmHWM", 0) - sizes.get("RssShmem", 0) - sizes.get("RssFile", 0))
    return held


def family(parent: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (lines := _lines(f"{entry}/stat")):
            children.setdefault(int(lines[0].rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [parent]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:  # the process has ended
        return []


def main() -> None:
    """Serve the parent until it closes our input."""
    warnings.simplefilter("ignore")  # as in `bench_worker`, and what libraries print goes to the standard error
    answers = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    task = Task(**json.loads(sys.argv[1]))

    def tell(work: Callable[[], Mapping[str, Any]]) -> bool:
        try:
            reply = work()
        except Exception as error:  # noqa: BLE001 - any exception of any peer is a line in the report
            said = " ".join(str(error).split())[:300]
            reply = {"failed": f"{type(error).__name__}: {said}", "excused": False}
        os.write(answers, json.dumps(reply).encode() + b"\n")
        return "failed" not in reply

    made: list[Worker] = []

    def prepare() -> dict[str, Any]:
        made.append(Worker(task))
        return made[0].describe()

    if tell(prepare):
        for line in sys.stdin:
            asked = json.loads(line)
            tell(lambda: made[0].answer(asked))  # noqa: B023 - called at once


if __name__ == "__main__":
    main()
