"""Measured systems: this library, the raw baselines, and other libraries for saving PyTorch state."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from snapshot import Snapshot, StateDict
from snapshot.bench.workloads import CPU, Payload
from snapshot.io.accelerators import on_stream
from snapshot.io.url import options_from_environment
from snapshot.options import Settings

# Takes that are based on the takes before them, as an incremental run makes them.


class Take(Protocol):
    """Function that takes a snapshot, with bases."""

    def __call__(self, where: str, *, base: str | Sequence[str]) -> None: ...


class Chain:
    """A row of takes. Each is based on the one before it, or on the two before it."""

    def __init__(self, take: Take, bases: int) -> None:
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


# Baselines of `snapshot bench`: the same bytes, moved by system calls only.
#
# Each baseline does the minimum of any Python program: create a view of every tensor, open files, move the bytes,
# close. None records names, shapes or digests, and none can detect damage. Each definition says what else it leaves
# out.

Bytes = npt.NDArray[np.uint8]
Call = Callable[[int, Any, int], int]
"""`os.preadv` or `os.pwritev`."""
Flat = TypeVar("Flat", Bytes, torch.Tensor)
"""Bytes in one dimension: on the host, or on any device."""

MOST_BUFFERS = 1024
"""IOV_MAX of Linux: maximum number of buffers in one vectored call."""
MOST_BYTES = 1 << 30
"""Maximum bytes per call, which must be less than 2 GiB. Longer lists of buffers are split."""
DIRECT_BUFFER = 8 << 20
PAGE = 4096
LINK_PIECE = 64 << 20
"""Bytes of one copy between a device and the host that reaches the speed of their link."""
LINK_ROUNDS = 5


def views(tensors: Sequence[torch.Tensor]) -> list[Bytes]:
    """Return each tensor's own memory as bytes."""
    return [tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in tensors]


def device_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor's own memory as bytes, also if the host cannot address it."""
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


def cut(buffers: Sequence[Flat], lanes: int) -> list[tuple[int, list[Flat]]]:
    """Return the buffers in `lanes` runs of equal length, with their offsets. Long buffers are split."""
    return cut_every(buffers, -(-total_bytes(buffers) // lanes))


def cut_every(buffers: Sequence[Flat], share: int) -> list[tuple[int, list[Flat]]]:
    """Return the buffers in runs of `share` bytes, with their offsets. The last run may be shorter."""
    runs: list[tuple[int, list[Flat]]] = [(0, [])]
    room, at = share, 0
    for buffer in buffers:
        rest = buffer
        while rest.nbytes:
            if not room:
                runs.append((at, []))
                room = share
            taken = rest[:room]
            runs[-1][1].append(taken)
            at += taken.nbytes
            room -= taken.nbytes
            rest = rest[taken.nbytes :]
    return runs


def total_bytes(buffers: Sequence[Flat]) -> int:
    """Return the bytes of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)


def batches(buffers: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Yield the buffers in batches for one vectored call each."""
    batch: list[Bytes] = []
    nbytes = 0
    for buffer in buffers:
        for start in range(0, buffer.nbytes, MOST_BYTES):
            piece = buffer[start : start + MOST_BYTES] if buffer.nbytes > MOST_BYTES else buffer
            if batch and (len(batch) == MOST_BUFFERS or nbytes + piece.nbytes > MOST_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(piece)
            nbytes += piece.nbytes
    if batch:
        yield batch


def write_streams(tensors: Sequence[torch.Tensor], folder: Path, durable: bool, lanes: int) -> None:
    """Write the tensors' own memory with vectored calls. Each stream has its own file."""

    def lane(index: int, buffers: list[Bytes]) -> None:
        with _opened(folder / f"{index}.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            _transfer(os.pwritev, fd, 0, buffers)
            if durable:
                os.fsync(fd)

    _each(lane, [(index, run) for index, (_, run) in enumerate(cut(views(tensors), lanes))])
    if durable:
        sync_folder(folder)


def write_direct(tensors: Sequence[torch.Tensor], folder: Path, durable: bool) -> None:
    """Write past the page cache: one stream, from one aligned buffer that is filled from the tensors."""
    with _opened(folder / "0.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT) as fd:
        buffer = np.frombuffer(mmap.mmap(-1, DIRECT_BUFFER), np.uint8)
        at = written = 0
        for view in views(tensors):
            taken = 0
            while taken < view.nbytes:
                length = min(view.nbytes - taken, DIRECT_BUFFER - at)
                buffer[at : at + length] = view[taken : taken + length]
                at += length
                taken += length
                if at == DIRECT_BUFFER:
                    _transfer(os.pwritev, fd, written, [buffer])
                    written += at
                    at = 0
        if at:
            _transfer(os.pwritev, fd, written, [buffer[: _in_pages(at)]])
            os.ftruncate(fd, written + at)
        if durable:
            os.fsync(fd)
    if durable:
        sync_folder(folder)


def read_streams(tensors: Sequence[torch.Tensor], file: Path, lanes: int) -> None:
    """Read into the tensors' own memory with vectored calls. All streams read one file."""

    def lane(offset: int, buffers: list[Bytes]) -> None:
        with _opened(file, os.O_RDONLY) as fd:
            _transfer(os.preadv, fd, offset, buffers)

    _each(lane, cut(views(tensors), lanes))


def read_direct(file: Path, lanes: int) -> None:
    """Read past the page cache into reused aligned buffers: the device's speed, without a copy to tensors."""
    size = file.stat().st_size
    share = _in_pages(-(-size // lanes))

    def lane(start: int, stop: int) -> None:
        with mmap.mmap(-1, DIRECT_BUFFER) as memory, _opened(file, os.O_RDONLY | os.O_DIRECT) as fd:
            while start < stop:
                moved = os.preadv(fd, [memory], start)
                if not moved:
                    raise OSError(f"{file} ended early")
                start += moved

    _each(lane, [(start, min(start + share, size)) for start in range(0, size, share)])


def copy_streams(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor], lanes: int) -> None:
    """Copy into existing tensors with plain threads: the minimum for a consistent asynchronous save."""

    def lane(sources: list[Bytes], targets: list[Bytes]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    runs = zip(cut(views(tensors), lanes), cut(views(into), lanes), strict=True)
    _each(lane, [(source, target) for (_, source), (_, target) in runs])


def copy_foreach(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """Copy by torch with its own threads: fast on idle cores, slow on busy ones."""
    torch._foreach_copy_([*into], [tensor.detach() for tensor in tensors])


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return host memory for copies of an accelerator: pinned by torch if possible, otherwise only page-aligned."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class StagedLane:
    """A side stream of an accelerator, with two host buffers: one is copied while a file call uses the other."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device=device)
        self.buffers = (host_buffer(DIRECT_BUFFER), host_buffer(DIRECT_BUFFER))
        self._copied: list[torch.Event | None] = [None, None]

    def fill(self, turn: int, run: Sequence[torch.Tensor]) -> None:
        """Begin to copy a run from the device into the buffer of this turn."""
        self._copy(turn, split_like(self.buffers[turn % 2], run), run)

    def drain(self, turn: int, run: Sequence[torch.Tensor]) -> None:
        """Begin to copy the buffer of this turn into a run on the device."""
        self._copy(turn, run, split_like(self.buffers[turn % 2], run))

    def wait(self, turn: int) -> Bytes:
        """Wait until the last copy of this turn's buffer is complete. Return the buffer."""
        copied = self._copied[turn % 2]
        if copied is not None:
            copied.synchronize()
        view: Bytes = self.buffers[turn % 2].numpy()
        return view

    def _copy(self, turn: int, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        with on_stream(self.stream):
            torch._foreach_copy_([*into], [*source], non_blocking=True)
        self._copied[turn % 2] = self.stream.record_event()


def split_like(buffer: torch.Tensor, run: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the first bytes of a buffer in pieces that are as long as those of a run."""
    return torch.split(buffer[: total_bytes(run)], [piece.nbytes for piece in run])


def write_staged(
    tensors: Sequence[torch.Tensor], folder: Path, durable: bool, lanes: Sequence[StagedLane], direct: bool = False
) -> None:
    """Copy an accelerator's tensors to host buffers, and write those. Each lane has its own file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)

    def work(index: int, pieces: list[torch.Tensor]) -> None:
        lane, runs = lanes[index], cut_every(pieces, DIRECT_BUFFER)
        with _opened(folder / f"{index}.raw", flags) as fd:
            lane.fill(0, runs[0][1])
            for turn, (offset, run) in enumerate(runs):
                if turn + 1 < len(runs):
                    lane.fill(turn + 1, runs[turn + 1][1])
                nbytes = total_bytes(run)
                _transfer(os.pwritev, fd, offset, [lane.wait(turn)[: _in_pages(nbytes) if direct else nbytes]])
            if direct:
                os.ftruncate(fd, total_bytes(pieces))
            if durable:
                os.fsync(fd)

    _each(work, [(index, run) for index, (_, run) in enumerate(cut(device_views(tensors), len(lanes)))])
    if durable:
        sync_folder(folder)


def read_staged(tensors: Sequence[torch.Tensor], file: Path, lanes: Sequence[StagedLane], direct: bool = False) -> None:
    """Read into host buffers, and copy those into an accelerator's tensors. All lanes read one file."""
    views = device_views(tensors)
    read: Call = os.preadv

    def work(lane: StagedLane, start: int, pieces: list[torch.Tensor]) -> None:
        with _opened(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) as fd:
            for turn, (offset, run) in enumerate(cut_every(pieces, DIRECT_BUFFER)):
                buffer, moved, nbytes = lane.wait(turn), 0, total_bytes(run)
                while moved < nbytes:  # whole pages, as O_DIRECT requires; the file may end before the last one does
                    more = read(fd, [buffer[moved : _in_pages(nbytes)]], start + offset + moved)
                    if not more:
                        raise OSError(f"{file} ended early")
                    moved += more
                lane.drain(turn, run)
        lane.stream.synchronize()

    share = _in_pages(-(-total_bytes(views) // len(lanes)))
    _each(work, [(lane, *run) for lane, run in zip(lanes, cut_every(views, share), strict=False)])


def copy_staged(runs: Sequence[Sequence[torch.Tensor]], into: Sequence[torch.Tensor]) -> None:
    """Copy each run of an accelerator's tensors into its host buffer, as a plain loop over the tensors does."""
    for run, buffer in zip(runs, into, strict=True):
        torch._foreach_copy_([*split_like(buffer, run)], [*run], non_blocking=True)


def copy_link(source: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Fill host buffers by one copy each, from any memory of the device: the link's speed, without the tensors."""
    for buffer in into:
        buffer.copy_(source[: buffer.nbytes], non_blocking=True)


def measure_link(device: torch.device) -> dict[str, Any]:
    """Return the speed of large plain copies between a device and the host, and whether the host memory is pinned."""
    here, there = host_buffer(LINK_PIECE), torch.empty(LINK_PIECE, dtype=torch.uint8, device=device)

    def speed(target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = []
        for _ in range(LINK_ROUNDS):
            torch.accelerator.synchronize(device)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - started)
        return LINK_PIECE / min(seconds) / 1e9

    speeds = {"to_host_gb_per_second": speed(here, there), "to_device_gb_per_second": speed(there, here)}
    return {"pinned": here.is_pinned(), **speeds}


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its names survive a power loss."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _each(lane: Callable[..., None], runs: Sequence[tuple[object, ...]]) -> None:
    """Run the lanes concurrently; a single lane needs no thread."""
    if len(runs) == 1:
        lane(*runs[0])
        return
    with ThreadPoolExecutor(len(runs)) as pool:
        for done in [pool.submit(lane, *run) for run in runs]:
            done.result()


def _transfer(call: Call, fd: int, offset: int, buffers: Sequence[Bytes]) -> None:
    for batch in batches(buffers):
        rest = batch
        while rest:
            moved = call(fd, rest, offset)
            if not moved:
                raise OSError("the file ended early, or a write wrote no bytes")
            offset += moved
            rest = _after(rest, moved)


def _in_pages(nbytes: int) -> int:
    """Return a length that is rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _after(buffers: list[Bytes], moved: int) -> list[Bytes]:
    """Return the buffers that are left after a call has moved `moved` bytes."""
    for index, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= buffer.nbytes
    return []


# Measured systems: this library, the raw baselines, and other libraries for saving PyTorch state.
#
# Every system restores into the same live tensors. If a peer returns new tensors, they are copied into the live ones
# with `copy_`, as its user must do. Additional costs of its `load_state_dict` are not counted.

Wait = Callable[[], object]
Way = Callable[[str], Wait | None]
"""One way to run an operation at a place. For `async` it returns the function that waits for the end."""
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

    def start(self, where: str) -> Wait:
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous save: {where}")

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
        self._take(where, durable=durable)

    def _take(self, where: str, **arguments: Any) -> None:
        taken = Snapshot.take(where, self.app_state, storage_options=options_from_environment(), **arguments)
        self.written_bytes = taken.report.written_bytes if taken.report else None

    def load(self, where: str, verify: bool = True) -> None:
        Snapshot(where, storage_options=options_from_environment()).restore(self.app_state, verify=verify)

    def start(self, where: str, staging: Literal["blocking", "overlapped"] = "blocking") -> Wait:
        return Snapshot.async_take(
            where, self.app_state, storage_options=options_from_environment(), durable=False, staging=staging
        ).wait

    def _open(self, where: str) -> None:
        _ = Snapshot(where, storage_options=options_from_environment()).metadata

    def ways(self, operation: str) -> dict[str, Way]:
        if operation == "open":
            return {"snapshot": self._open}
        found = super().ways(operation)
        if self.payload.changing and operation in ("take", "durable"):
            take = partial(self._take, durable=operation == "durable")
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

    def save(self, where: str, durable: bool = False) -> None:
        writer = self.library.FileSystemWriter(where, sync_files=durable)
        self.library.save(self.payload.nested(), storage_writer=writer, **self.alone)

    def load(self, where: str) -> None:
        reader = self.library.FileSystemReader(where)
        self.library.load(self.payload.nested(), storage_reader=reader, **self.alone)

    def start(self, where: str) -> Wait:
        writer = self.library.FileSystemWriter(where, sync_files=False)
        future: Future[object] = self.library.async_save(self.payload.nested(), storage_writer=writer, **self.alone)
        return future.result

    def start_staged(self, where: str, overlapped: bool) -> Wait:
        if overlapped not in self.stagers:
            self.stagers[overlapped] = self.staging.DefaultStager(
                self.staging.StagingOptions(
                    use_pinned_memory=True,
                    use_shared_memory=False,
                    use_async_staging=overlapped,
                    use_non_blocking_copy=True,
                )
            )
        answer = self.library.async_save(
            self.payload.nested(),
            storage_writer=self.library.FileSystemWriter(where, sync_files=False),
            async_stager=self.stagers[overlapped],
            **self.alone,
        )
        wait: Wait = (answer.upload_completion if overlapped else answer).result
        return wait

    def start_cached(self, where: str) -> Wait:
        """Save as before `DefaultStager`: one writer keeps the pinned memory."""
        if self.caching_writer is None:
            self.caching_writer = self.library.FileSystemWriter(where, sync_files=False, cache_staged_state_dict=True)
        future: Future[object] = self.library.async_save(
            self.payload.nested(), checkpoint_id=where, storage_writer=self.caching_writer, **self.alone
        )
        return future.result

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

    def start(self, where: str) -> Wait:
        pending = self.library.Snapshot.async_take(where, self.app_state)
        wait: Wait = pending.wait
        return wait


SYSTEMS: dict[str, type[Competitor]] = {
    "raw": Raw,
    "json": Json,
    "snapshot": Ours,
    "torch.save": TorchSave,
    "safetensors": SafeTensors,
    "dcp": DCP,
    "torchsnapshot": TorchSnapshot,
}
PEERS = tuple(name for name, kind in SYSTEMS.items() if kind.kind == "peer")


def build_system(name: str, payload: Payload) -> Competitor:
    """Return a system for a payload."""
    return RawOnDevice(payload) if name == "raw" and payload.device != CPU else SYSTEMS[name](payload)


def installed(name: str) -> bool:
    """Return True if the package of a system can be imported."""
    return importlib.util.find_spec(SYSTEMS[name].module) is not None


def sync_tree(where: str) -> None:
    """Sync all files and folders of a tree, as the user of a saver without sync must do."""
    for folder, _, names in os.walk(where):
        for name in names:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))


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
