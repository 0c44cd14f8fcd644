"""Measured systems: this library, the raw baselines, and other libraries for saving PyTorch state."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from snapshot import RestoreOptions, Snapshot, StateDict, TakeOptions
from snapshot.io.url import options_from_environment
from snapshot.settings import Settings
from snapshot_bench.raw_io import (
    LINK_PIECE,
    StagedLane,
    copy_foreach,
    copy_link,
    copy_staged,
    copy_streams,
    cut_every,
    device_views,
    host_buffer,
    read_direct,
    read_staged,
    read_streams,
    sync_tree,
    total_bytes,
    write_direct,
    write_staged,
    write_streams,
)
from snapshot_bench.workloads import CPU, Payload

# Takes that are based on the takes before them, as an incremental run makes them.


class MeasuredTake(Protocol):
    """Function that takes a snapshot, with bases."""

    def __call__(self, where: str, *, base: str | Sequence[str]) -> None: ...


class Chain:
    """A row of takes. Each is based on the one before it, or on the two before it."""

    def __init__(self, take: MeasuredTake, bases: int) -> None:
        self._take = take
        self._bases = bases
        self._places: list[str] = []

    @property
    def is_warm(self) -> bool:
        """True if the next take has all of its bases."""
        return len(self._places) >= self._bases

    def save(self, where: str) -> None:
        """Take the next snapshot. Without earlier ones, everything is written."""
        earlier = self._places[: -self._bases - 1 : -1]
        self._take(where, base=earlier[0] if earlier and self._bases == 1 else earlier)
        self._places.append(where)

    def cut(self) -> list[str]:
        """Return the places that no later take is based on, and forget them."""
        cut, self._places = self._places[: -self._bases], self._places[-self._bases :]
        return cut


# Measured systems
#
# Every system restores into the same live tensors. If a peer returns new tensors, they are copied into the live ones
# with `copy_`, as its user must do. Additional costs of its `load_state_dict` are not counted.


@dataclass(frozen=True, slots=True)
class Started:
    """An asynchronous save that has begun."""

    wait: Callable[[], object]
    """Waits until everything is written."""
    staged: Callable[[], object] | None = None
    """Waits until tensors may change; None if they may change once the call has returned."""
    waits_itself: bool = False
    """True if an optimizer's step waits for `staged` by itself. Otherwise, the training loop must wait."""


Way = Callable[[str], Started | None]
"""One way to run an operation at a place."""
OVERLAPPED = "overlapped"
"""Last word of a row whose call returns before the tensors are copied: what the device still does is not its time."""


class Competitor(ABC):
    """System that saves a state to a new place, and restores it into the original tensors."""

    kind: ClassVar[str] = "peer"
    module: ClassVar[str] = "torch"
    """Module that must be importable."""
    in_background: ClassVar[bool] = False
    """True if the system has an asynchronous save."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.on_device = payload.device != CPU
        self.chains: dict[str, Chain] = {}
        """The rows whose takes are based on earlier ones."""
        self.written_bytes: int | None = None
        """Bytes that the last save reported as written."""

    @abstractmethod
    def save(self, where: str, durable: bool = False) -> None: ...

    @abstractmethod
    def load(self, where: str) -> None: ...

    def start(self, where: str, durable: bool = False) -> Started:
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous save: {where}, durable={durable}")

    def ways(self, operation: str) -> dict[str, Way]:
        """Return this system's rows of the table; empty if it lacks the operation."""
        name = next(name for name, kind in SYSTEMS.items() if kind is type(self))
        table: dict[str, Way] = {
            "take": self.save,
            "durable": partial(self.save, durable=True),
            "restore": self.load,
            "cold": self.load,
        }
        if self.in_background:
            table["async"] = self.start
        return {name: table[operation]} if operation in table else {}


class Ours(Competitor):
    """`snapshot`, through its public API."""

    kind = "ours"
    module = "snapshot"
    in_background = True

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.app_state = {
            key: StateDict(each) if isinstance(each, dict) else each for key, each in payload.app_state.items()
        }

    def save(self, where: str, durable: bool = False) -> None:
        self._take(where, options=TakeOptions(durable=durable))

    def _take(self, where: str, **arguments: Any) -> None:
        taken = Snapshot.take(where, self.app_state, storage_options=options_from_environment(), **arguments)
        self.written_bytes = taken.report.written_bytes if taken.report else None

    def load(self, where: str, verify: bool = True) -> None:
        Snapshot(where, storage_options=options_from_environment()).restore(
            self.app_state, options=RestoreOptions(verify=verify)
        )

    def start(
        self,
        where: str,
        durable: bool = False,
        *,
        staging: Literal["blocking", "overlapped"] = "blocking",
        worker: Literal["thread", "process"] = "thread",
        budget: int | None = None,
    ) -> Started:
        pending = Snapshot.async_take(
            where,
            self.app_state,
            storage_options=options_from_environment(),
            options=TakeOptions(durable=durable, staging=staging, worker=worker, memory_budget_bytes=budget),
        )
        overlapped = staging == "overlapped"
        return Started(pending.wait, pending.wait_staged if overlapped else None, waits_itself=overlapped)

    def _open(self, where: str) -> None:
        _ = Snapshot(where, storage_options=options_from_environment()).metadata

    def ways(self, operation: str) -> dict[str, Way]:
        if operation == "open":
            return {"snapshot": self._open}
        found = super().ways(operation)
        if self.payload.changing and operation in ("take", "durable"):
            take = partial(self._take, options=TakeOptions(durable=operation == "durable"))
            self.chains = {"snapshot, one base": Chain(take, 1), "snapshot, two bases": Chain(take, 2)}
            found |= {row: chain.save for row, chain in self.chains.items()}
        if operation == "restore":
            found["snapshot, verify=False"] = partial(self.load, verify=False)
        if operation == "async" and self.on_device:
            found[f"snapshot, {OVERLAPPED}"] = partial(self.start, staging="overlapped")
        return found


class Raw(Competitor):
    """System calls only: see `raw_io`."""

    kind = "raw"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.tensors = list(payload.tensors.values())
        self.copies: list[torch.Tensor] = []

    def save(self, where: str, durable: bool = False, lanes: int = 1) -> None:
        write_streams(self.tensors, _made(where), durable, lanes)

    def save_direct(self, where: str, durable: bool) -> None:
        write_direct(self.tensors, _made(where), durable)

    def load(self, where: str, lanes: int = 1) -> None:
        read_streams(self.tensors, Path(where) / "0.raw", lanes)

    def load_direct(self, where: str, lanes: int) -> None:
        read_direct(Path(where) / "0.raw", lanes)

    def copy(self, _where: str, lanes: int) -> None:
        copy_streams(self.tensors, self.copies, lanes)

    def copy_foreach(self, _where: str) -> None:
        copy_foreach(self.tensors, self.copies)

    def ways(self, operation: str) -> dict[str, Way]:
        streams = {
            f"raw, {lanes} stream{'s' * (lanes > 1)}": lanes for lanes in sorted({1, Settings.current().cores()})
        }
        if operation in ("take", "durable"):
            durable = operation == "durable"
            written: dict[str, Way] = {
                name: partial(self.save, durable=durable, lanes=lanes) for name, lanes in streams.items()
            }
            return written | {"raw, 1 stream, O_DIRECT": partial(self.save_direct, durable=durable)}
        read: dict[str, Way] = {name: partial(self.load, lanes=lanes) for name, lanes in streams.items()}
        if operation == "cold":
            direct = {f"{name}, O_DIRECT": partial(self.load_direct, lanes=lanes) for name, lanes in streams.items()}
            return read | direct
        if operation == "async":
            return self._copies(streams)
        return read if operation == "restore" else {}

    def _copies(self, streams: dict[str, int]) -> dict[str, Way]:
        self.copies = [tensor.detach().clone() for tensor in self.tensors]
        copied: dict[str, Way] = {
            name.replace("raw,", "raw copy,").replace("stream", "thread"): partial(self.copy, lanes=lanes)
            for name, lanes in streams.items()
        }
        return copied | {"raw copy, torch._foreach_copy_": self.copy_foreach}


class RawOnDevice(Raw):
    """Plain copies between an accelerator and reused host buffers, pinned if possible, beside plain file calls."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.lanes: list[StagedLane] = []

    def save(self, where: str, durable: bool = False, lanes: int = 1) -> None:
        write_staged(self.tensors, _made(where), durable, self._lanes(lanes))

    def save_direct(self, where: str, durable: bool) -> None:
        write_staged(self.tensors, _made(where), durable, self._lanes(1), direct=True)

    def load(self, where: str, lanes: int = 1) -> None:
        read_staged(self.tensors, Path(where) / "0.raw", self._lanes(lanes))

    def load_direct(self, where: str, lanes: int) -> None:
        read_staged(self.tensors, Path(where) / "0.raw", self._lanes(lanes), direct=True)

    def _lanes(self, count: int) -> list[StagedLane]:
        self.lanes += [StagedLane(self.payload.device) for _ in range(count - len(self.lanes))]
        return self.lanes[:count]

    def _copies(self, streams: dict[str, int]) -> dict[str, Way]:
        runs = [run for _, run in cut_every(device_views(self.tensors), LINK_PIECE)]
        self.copies = [host_buffer(total_bytes(run)) for run in runs]
        source = torch.empty(max(copy.nbytes for copy in self.copies), dtype=torch.uint8, device=self.payload.device)
        return {
            "raw copy, each tensor": lambda _: copy_staged(runs, self.copies),
            f"raw copy, {LINK_PIECE >> 20} MiB pieces": lambda _: copy_link(source, self.copies),
        }


class Json(Ours):
    """Baseline for opening a manifest: its file read, and parsed by the standard library into plain values."""

    kind = "raw"

    def ways(self, operation: str) -> dict[str, Way]:
        return {"read + json.loads": self._parse} if operation == "open" else {}

    def _parse(self, where: str) -> None:
        json.loads((Path(where) / ".snapshot_metadata").read_bytes())


class TorchSave(Competitor):
    """`torch.save`, and `torch.load` of a memory-mapped file, its fastest mode."""

    def save(self, where: str, durable: bool = False) -> None:
        file = _made(where) / "state.pt"
        torch.save(self.payload.nested(), file)
        if durable:
            sync_tree(where)

    def load(self, where: str) -> None:
        loaded = torch.load(Path(where) / "state.pt", map_location="cpu", mmap=True, weights_only=True)
        for key, live in self.payload.nested().items():
            _copy_nested(live, loaded[key])


class SafeTensors(Competitor):
    """The safetensors library with a flat dict of tensors, without numbers and strings."""

    module = "safetensors"

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.library = importlib.import_module("safetensors.torch")

    def save(self, where: str, durable: bool = False) -> None:
        tensors = {name: tensor.detach() for name, tensor in self.payload.tensors.items()}
        self.library.save_file(tensors, _made(where) / "state.safetensors")
        if durable:
            sync_tree(where)

    def load(self, where: str) -> None:
        loaded = self.library.load_file(Path(where) / "state.safetensors")
        for name, tensor in self.payload.tensors.items():
            tensor.detach().copy_(loaded[name])


class DCP(Competitor):
    """`torch.distributed.checkpoint` in one process. It loads into the given tensors, like this library.

    From a device, its asynchronous save copies to pinned memory that it keeps, which is its fastest way.
    """

    in_background = True

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.library = importlib.import_module("torch.distributed.checkpoint")
        self.staging = importlib.import_module("torch.distributed.checkpoint.staging")
        known = inspect.signature(self.library.save).parameters
        self.alone: dict[str, Any] = {"no_dist": True} if "no_dist" in known else {}  # torch 2.6 finds out by itself
        self.stagers: dict[bool, Any] = {}
        self.caching_writer: Any = None

    def writer(self, where: str, durable: bool) -> Any:
        return self.library.FileSystemWriter(where, sync_files=durable)

    def reader(self, where: str) -> Any:
        return self.library.FileSystemReader(where)

    def save(self, where: str, durable: bool = False) -> None:
        self.library.save(self.payload.nested(), storage_writer=self.writer(where, durable), **self.alone)

    def load(self, where: str) -> None:
        self.library.load(self.payload.nested(), storage_reader=self.reader(where), **self.alone)

    def start(self, where: str, durable: bool = False, **options: Any) -> Started:
        """Save with any options of `async_save`, such as a stager."""
        return self._start(storage_writer=self.writer(where, durable), **options)

    def start_staged(self, where: str, durable: bool = False, *, overlapped: bool) -> Started:
        """Save with a stager that keeps its memory. It copies in the call or, if `overlapped`, in a thread."""
        if overlapped not in self.stagers:
            self.stagers[overlapped] = self.staging.DefaultStager(
                self.staging.StagingOptions(
                    use_pinned_memory=self.on_device,
                    use_shared_memory=False,
                    use_async_staging=overlapped,
                    use_non_blocking_copy=self.on_device,
                )
            )
        return self.start(where, durable, async_stager=self.stagers[overlapped])

    def start_cached(self, where: str) -> Started:
        """Save as before `DefaultStager`: one writer keeps the pinned memory."""
        if self.caching_writer is None:
            self.caching_writer = self.library.FileSystemWriter(where, sync_files=False, cache_staged_state_dict=True)
        return self._start(checkpoint_id=where, storage_writer=self.caching_writer)

    def _start(self, **options: Any) -> Started:
        response = self.library.async_save(self.payload.nested(), **self.alone, **options)
        if hasattr(response, "upload_completion"):
            return Started(response.upload_completion.result, response.staging_completion.result)
        return Started(response.result)

    def ways(self, operation: str) -> dict[str, Way]:
        if operation != "async" or not self.on_device:
            return super().ways(operation)
        if not hasattr(self.staging, "DefaultStager"):
            return {"dcp": self.start_cached}
        return {
            "dcp": partial(self.start_staged, overlapped=False),
            f"dcp, {OVERLAPPED}": partial(self.start_staged, overlapped=True),
        }


class TorchSnapshot(Competitor):
    """torchsnapshot. It never syncs, so for a durable save its files are synced as a user would."""

    module = "torchsnapshot"
    in_background = True

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.library = importlib.import_module("torchsnapshot")
        wrap = self.library.StateDict
        self.app_state = {
            key: wrap(**each) if isinstance(each, dict) else each for key, each in payload.app_state.items()
        }

    def save(self, where: str, durable: bool = False) -> None:
        self.library.Snapshot.take(where, self.app_state)
        if durable:
            sync_tree(where)

    def load(self, where: str) -> None:
        self.library.Snapshot(where).restore(self.app_state)

    def start(self, where: str, durable: bool = False) -> Started:
        return Started(self.library.Snapshot.async_take(where, self.app_state).wait)


SYSTEMS: dict[str, type[Competitor]] = {
    "raw": Raw,
    "json": Json,
    "snapshot": Ours,
    "torch.save": TorchSave,
    "safetensors": SafeTensors,
    "dcp": DCP,
    "torchsnapshot": TorchSnapshot,
}


def build_system(name: str, payload: Payload) -> Competitor:
    """Return a system for a payload."""
    return RawOnDevice(payload) if name == "raw" and payload.device != CPU else SYSTEMS[name](payload)


def installed(name: str) -> bool:
    """Return True if the package of a system can be imported."""
    return importlib.util.find_spec(SYSTEMS[name].module) is not None


def _made(where: str) -> Path:
    folder = Path(where)
    if not folder.is_absolute():  # `Path` reads "file:///x" as a folder "file:" of the current one
        raise ValueError(f"path must be absolute, got {where!r}")
    folder.mkdir()
    return folder


def _copy_nested(live: Any, loaded: Any) -> None:
    """Copy all tensors of nested dicts into those of another. Other values are skipped: they cost nothing."""
    for key, value in live.items():
        if isinstance(value, torch.Tensor):
            value.detach().copy_(loaded[key])
        elif isinstance(value, dict):
            _copy_nested(value, loaded[key])
