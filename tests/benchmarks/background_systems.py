"""Who saves in the background in `snapshot bench --async`: ours in each of its ways, the bars, and what else there is.

Peers are used as their documentation shows, with what they sync by default; what that is stands beside their rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from snapshot import Snapshot, StateDict
from snapshot.bench import raw_io as raw
from snapshot.bench.systems import DCP, Competitor, Ours, TorchSnapshot
from snapshot.bench.workloads import CASES, CPU, SEED, Case, Payload
from snapshot.io.url import options_from_environment
from snapshot.options import Settings

PARAMETERS = 10_000


def _params(scale: float, device: torch.device = CPU) -> Payload:
    module = nn.ParameterList(torch.empty(1024, device=device) for _ in range(max(1, int(PARAMETERS * scale))))
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    for parameter in module.parameters():
        parameter.data.copy_(torch.empty(1024).uniform_(-0.05, 0.05, generator=generator))
        parameter.grad = parameter.data
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = {f"model.{name}": value for name, value in module.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optim.{index}.{name}": value for name, value in moments.items()}
    return Payload({"model": module, "optim": optimizer}, tensors)


def _single(scale: float, device: torch.device = CPU) -> Payload:
    tensor = torch.rand(max(1, int((scale * (1 << 30)) / 4)), generator=torch.Generator().manual_seed(SEED)).to(device)
    return Payload({"state": {"tensor": tensor}}, {"state.tensor": tensor})


PARAMS = Case(
    "params",
    "10,000 parameters of 4 KiB with Adam's moments, 40,000 tensors",
    lambda scale: max(1, int(PARAMETERS * scale)) * 3 * 4100,
    _params,
    (),
)
SINGLE = Case("single", "one float32 tensor of 1 GiB", lambda scale: int(scale * (1 << 30)), _single, ())
TRAINED = {"train": CASES["train"], "params": PARAMS}
"""What can be saved while it is trained."""
HELD = TRAINED | {"single": SINGLE}
"""What a child can be asked to hold."""


@dataclass(frozen=True, slots=True)
class Started:
    """A save that is under way."""

    wait: Callable[[], object]
    """Returns when all is written."""
    staged: Callable[[], object] | None = None
    """Returns when tensors may change; None if they may from the moment of the call."""
    waits_itself: bool = False
    """Whether the optimizer's step waits for that by itself; else the loop has to."""


Start = Callable[[str, int | None], Started]


class Background:
    """Something that saves in the background, and can bring back what it saved."""

    kind: ClassVar[str] = "peer"
    synced: ClassVar[str] = "files, folders"
    """What has reached the device when it says that it is done."""

    def __init__(self, payload: Payload, system: type[Competitor]) -> None:
        self.payload = payload
        self.system = system(payload)

    def rows(self, name: str) -> dict[str, Start]:
        """The rows of the table that it fills."""
        return {name: self.start}

    def start(self, where: str, budget: int | None) -> Started:
        raise NotImplementedError

    def load(self, where: str) -> None:
        """Bring back what was saved, into the live tensors."""
        self.system.load(where)


class InBackground(Background):
    """`Snapshot.async_take`."""

    kind = "ours"

    def __init__(self, payload: Payload, staging: str, worker: str) -> None:
        super().__init__(payload, Ours)
        self.app_state = _stateful(payload)
        self.staging, self.worker = staging, worker

    def start(self, where: str, budget: int | None) -> Started:
        pending = Snapshot.async_take(
            where, self.app_state, storage_options=options_from_environment(), staging=self.staging, worker=self.worker,
            memory_budget_bytes=budget,
        )  # fmt: skip
        overlapped = self.staging == "overlapped"
        return Started(pending.wait, pending.wait_staged if overlapped else None, waits_itself=overlapped)


class Take(Background):
    """`Snapshot.take`, durable: all of its time is in the call."""

    kind = "bar"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, Ours)
        self.app_state = _stateful(payload)

    def start(self, where: str, budget: int | None) -> Started:
        Snapshot.take(where, self.app_state, storage_options=options_from_environment())
        return Started(lambda: None)


class RawCopy(Background):
    """A copy of all tensors into memory that is there already: the least that a save in the background can block."""

    kind = "copy"
    synced = "nothing"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, Ours)
        self.tensors = list(payload.tensors.values())
        if payload.device != CPU:
            self.copies = [raw.host_buffer(tensor.nbytes) for tensor in self.tensors]
        else:
            self.copies = [tensor.detach().clone() for tensor in self.tensors]

    def rows(self, name: str) -> dict[str, Start]:
        if self.payload.device != CPU:
            return {name: self._copy_pinned}
        return {
            f"{name}, {lanes} thread{'s' * (lanes > 1)}": self._copy(lanes)
            for lanes in sorted({1, Settings.current().cores()})
        }

    def _copy_pinned(self, where: str, budget: int | None) -> Started:
        views = raw.device_views(self.tensors)
        raw.copy_staged([[view] for view in views], self.copies)
        torch.accelerator.synchronize(self.payload.device)
        return Started(lambda: None)

    def _copy(self, lanes: int) -> Start:
        def start(where: str, budget: int | None) -> Started:
            raw.copy_streams(self.tensors, self.copies, lanes)
            return Started(lambda: None)

        return start


class Distributed(Background):
    """`torch.distributed.checkpoint.async_save`, which stages in the call, and writes in a thread."""

    synced = "files"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, DCP)
        self.library: Any = importlib.import_module("torch.distributed.checkpoint")
        self.saver: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        self.more: dict[str, Any] = {"no_dist": True}

    def start(self, where: str, budget: int | None) -> Started:
        writer = self.library.FileSystemWriter(where)
        answer = self.library.async_save(self.payload.nested(), storage_writer=writer, **self.more)
        if isinstance(answer, self.saver.AsyncSaveResponse):
            return Started(answer.upload_completion.result, answer.staging_completion.result)
        return Started(answer.result)


class DistributedProcess(Distributed):
    """The same, written by a process, which wants a process group."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.more = {"async_checkpointer_type": self.saver.AsyncCheckpointerType.PROCESS}


class DistributedStaging(Distributed):
    """The same, staged in a thread: the loop has to wait for it before it changes a tensor."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        pinned = payload.device != CPU
        options = staging.StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=pinned
        )
        self.more["async_stager"] = staging.DefaultStager(options)


class TorchSnapshotInBackground(Background):
    """torchsnapshot's `async_take`."""

    synced = "nothing"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload, TorchSnapshot)

    def start(self, where: str, budget: int | None) -> Started:
        return Started(self.system.start(where))


def _stateful(payload: Payload) -> dict[str, Any]:
    return {key: StateDict(each) if isinstance(each, dict) else each for key, each in payload.app_state.items()}


@dataclass(frozen=True, slots=True)
class Way:
    """A system, and the peer whose installation it needs; none if it is ours."""

    make: Callable[[Payload], Background]
    peer: str = ""
    trains: bool = True
    """Whether steps are done beside it: there is nothing beside a call that returns when all is done."""


WAYS = {
    "raw copy": Way(RawCopy, trains=False),
    "Snapshot.take": Way(Take, trains=False),
    "snapshot: blocking, thread": Way(lambda payload: InBackground(payload, "blocking", "thread")),
    "snapshot: overlapped, thread": Way(lambda payload: InBackground(payload, "overlapped", "thread")),
    "snapshot: overlapped, process": Way(lambda payload: InBackground(payload, "overlapped", "process")),
    "DCP": Way(Distributed, "dcp"),
    "DCP, process": Way(DistributedProcess, "dcp"),
    "DCP, async staging": Way(DistributedStaging, "dcp"),
    "torchsnapshot": Way(TorchSnapshotInBackground, "torchsnapshot"),
}
BARS = ("raw copy", "Snapshot.take")
"""What every other row is put beside; they run with each group."""
