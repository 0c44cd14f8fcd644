"""Child of `python -m tests.plugins.snapshot_bench background`: a system that saves alone, or while a model is trained.

Peers are used as their documentation shows, with their default syncs.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from snapshot_bench.child import Runner, Task, reset_peak, serve, status
from snapshot_bench.systems import DCP, Competitor, Ours, Started, TorchSnapshot, build_system
from snapshot_bench.systems import Way as SystemWay
from snapshot_bench.workloads import CASES, CPU, Case, Payload, plain_payload, random_tensors, train_once

# States that are saved.

PARAMETERS = 10_000


def _params(scale: float, device: torch.device = CPU) -> Payload:
    with torch.device("meta"):
        model = nn.ParameterList(torch.empty(1024) for _ in range(max(1, int(PARAMETERS * scale))))
    return train_once(model, device)


def _single(scale: float, device: torch.device = CPU) -> Payload:
    [tensor] = random_tensors(1, (max(1, int(scale * (1 << 28))),), device).values()
    return plain_payload("state", {"tensor": tensor})


PARAMS = Case(
    "params",
    "10,000 parameters of 4 KiB with AdamW's moments, 40,000 tensors",
    lambda scale: max(1, int(PARAMETERS * scale)) * 3 * 4100,
    _params,
    (),
)
SINGLE = Case("single", "one float32 tensor of 1 GiB", lambda scale: int(scale * (1 << 30)), _single, ())
TRAINED = {"train": CASES["train"], "params": PARAMS}
"""States of a model that is trained."""
HELD = TRAINED | {"single": SINGLE}
"""All states."""

# Ways to save in the background, with the systems of `snapshot bench`.

Begin = Callable[[str, int | None], Started]
"""Begins a save at a place, with a memory budget."""
COMPLETE = Started(lambda: None)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to save in the background."""

    system: Callable[[Payload], Any]
    begin: Callable[[Any, str, int | None], Started]
    kind: str = "ours"
    """`ours`, `peer`, or a bar that the others are compared with: `copy` or `bar`."""
    synced: str = "files, folders"
    """Parts that are synced to the device at the end of a save."""
    peer: str = ""
    """Peer that must be installed."""

    def make(self, payload: Payload) -> Background:
        return RawCopy(payload) if self.kind == "copy" else Background(self, payload)

    @property
    def trains(self) -> bool:
        """True if steps of training can run at the same time: a bar returns when it is complete."""
        return self.kind in ("ours", "peer")


class Background:
    """A way to save a payload in the background, and to restore it."""

    def __init__(self, way: Way, payload: Payload) -> None:
        self.way = way
        self.system: Competitor = way.system(payload)

    def rows(self, name: str) -> dict[str, Begin]:
        return {name: partial(self.way.begin, self.system)}

    def load(self, where: str) -> None:
        self.system.load(where)


class RawCopy(Background):
    """Copies of all tensors into resident memory: the minimum that a save in the background blocks."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(WAYS_OF_COPIES, payload)
        self.device = payload.device
        self.ways = self.system.ways("async")
        self.copies: list[torch.Tensor] = self.system.copies  # type: ignore[attr-defined]

    def rows(self, name: str) -> dict[str, Begin]:
        chosen = {row: way for row, way in self.ways.items() if "thread" in row or "each tensor" in row}
        return {row: partial(self._copy, way) for row, way in chosen.items()}

    def _copy(self, way: SystemWay, where: str, budget: int | None) -> Started:
        way(where)
        if self.device != CPU:
            torch.accelerator.synchronize(self.device)
        return COMPLETE


def _take(system: Ours, where: str, budget: int | None) -> Started:
    system.save(where, durable=True)
    return COMPLETE


def _ours(**options: Any) -> Way:
    return Way(Ours, lambda ours, where, budget: ours.start(where, durable=True, budget=budget, **options))


def _dcp_with_group(payload: Payload) -> DCP:
    """Return DCP in a process group, which its writer process needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    system = DCP(payload)
    system.alone = {}
    return system


def _dcp_process(dcp: DCP, where: str, budget: int | None) -> Started:
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    return dcp.start(where, durable=True, async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS)


_dcp = partial(Way, kind="peer", synced="files", peer="dcp")
WAYS_OF_COPIES = Way(partial(build_system, "raw"), lambda raw, where, budget: COMPLETE, "copy", "nothing")
WAYS = {
    "raw copy": WAYS_OF_COPIES,
    "Snapshot.take": Way(Ours, _take, "bar"),
    "snapshot: blocking, thread": _ours(staging="blocking", worker="thread"),
    "snapshot: overlapped, thread": _ours(staging="overlapped", worker="thread"),
    "snapshot: overlapped, process": _ours(staging="overlapped", worker="process"),
    "DCP": _dcp(DCP, lambda dcp, where, budget: dcp.start(where, durable=True)),
    "DCP, process": _dcp(_dcp_with_group, _dcp_process),
    "DCP, async staging": _dcp(DCP, lambda dcp, where, budget: dcp.start_staged(where, durable=True, overlapped=True)),
    "torchsnapshot": Way(
        TorchSnapshot, lambda system, where, budget: system.start(where), "peer", "nothing", "torchsnapshot"
    ),
}
BARS = ("raw copy", "Snapshot.take")
"""The ways that every other row is compared with. They run in each group."""

# Measurements: a save alone, and a save in the middle of training.

STEP = 0.05
"""Least seconds of a step at full scale, so that short disturbances of the machine do not decide."""
MOST_WORK = 256
QUIET, AFTER = 20, 5
"""Steps before the call, and after the end of the write."""
LONGEST = 900.0
"""Seconds after which a save has failed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A save without training."""

    blocked: float
    staged: float
    """Seconds from the call until tensors may change."""
    done: float
    """Seconds from the call until everything is written."""
    peak: int | None
    """Rise of the memory since before the first save, in this process and those that it started."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A save, and the training steps around it. All times are seconds after the call began."""

    returned: float
    done: float
    steps: list[tuple[float, float]]
    """Begin and end of each step."""
    waited: bool
    """True if tensors could not change yet when the call returned, so that the first step had to wait."""
    exact: bool | None
    """True if the saved state is that at the moment of the call; None if it was not compared."""


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
        """Find the amount of work that makes a step long enough."""
        self.step()
        while self.work < MOST_WORK and min(self._timed() for _ in range(3)) < self.least:
            self.work *= 2
        return self.work

    def step(self, before: Callable[[], object] | None = None) -> None:
        """Run a step. `before` is called before tensors change, as the loop of a user must wait there."""
        self._loss().backward()  # type: ignore[no-untyped-call]
        if before:
            before()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if self.device != CPU:  # a step ends with an idle device
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


class Worker(Runner):
    """A system with its payload, ready for repetitions."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, HELD[task.case])
        self.way = WAYS[task.system]
        self.system = self.way.make(self.payload)
        self.rows = self.system.rows(task.system)
        self.training: Training | None = None
        gc.collect()
        self.resident = reset_peak()

    def describe(self) -> dict[str, Any]:
        return {
            "rows": list(self.rows),
            "kind": self.way.kind,
            "synced": self.way.synced,
            "bytes": self.payload.nbytes(),
            "tensors": len(self.payload.tensors),
        }

    def respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "save":
            return asdict(self.save(request["row"], request.get("budget")))
        if self.training is None:  # not earlier, since the memory of steps is not that of a save
            self.training = Training(self.payload, self.task.scale)
            os.environ["SNAPSHOT_LANES"] = "1"  # against one thread of training
        if request["do"] == "calibrate":
            return {"work": self.training.calibrate()}
        self.training.work = request["work"]
        return asdict(self.train(self.training, request["row"], request["check"]))

    def save(self, row: str, budget: int | None) -> Saved:
        """Save once. Freeing space and removing are not timed."""
        where = self.fresh()
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
        self.remove(where)
        return Saved(blocked, staged, done, peak)

    def train(self, training: Training, row: str, check: bool) -> Trained:
        """Save once, in the middle of training."""
        where = self.fresh()
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
        self.remove(where)
        relative = [(began - called, ended - called) for began, ended in steps]
        return Trained(returned - called, ending.at - called, relative, started.staged is not None, exact)


class _Ending(threading.Thread):
    """Waits for the end of a save, and notes its time."""

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
        """Return True after the end. Raise the error of a failed save."""
        if self.error:
            raise self.error
        return self.at > 0


def helpers() -> int:
    """Return the memory of the processes that this one started, without shared memory, which is counted here."""
    held = 0
    for pid in family(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
            held += max(0, sizes.get("VmHWM", 0) - sizes.get("RssShmem", 0) - sizes.get("RssFile", 0))
    return held


def family(parent: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    try:
        return [each.pid for each in psutil.Process(parent).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Worker)
