"""Raw I/O, the reference of all benchmarks: the same bytes, moved by system calls only.

Each baseline does the minimum of any Python program: create a view of every tensor, open files, move the bytes, close.
None records names, shapes or digests, and none can detect damage. Each definition says what else it leaves out.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from snapshot.io.accelerators import on_stream
from snapshot.io.system import libc, sync_folder, sync_path

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
        sync_folder(str(folder))


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
        sync_folder(str(folder))


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
        sync_folder(str(folder))


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


def sync_tree(where: str) -> None:
    """Sync all files and folders of a tree, as the user of a saver without sync must do."""
    for folder, _, names in os.walk(where):
        for name in names:
            sync_path(f"{folder}/{name}")
        sync_folder(folder)


# Removal of files from the page cache, so that a read measures the device.


class StaysCached(Exception):
    """Files cannot be dropped from the page cache."""


def drop(folder: Path) -> None:
    """Drop all files below `folder` from the page cache, and check the result.

    Only these files are dropped. If that fails, and this process runs as root, the whole machine's cache is dropped.
    Raises StaysCached if the files stay cached: on tmpfs the page cache is the storage.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        with _opened(file, os.O_RDONLY) as fd:
            os.fsync(fd)  # a dirty page cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if _resident(files) > 0.01 and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    share = _resident(files)
    if share > 0.01:
        raise StaysCached(f"cannot measure cold reads: the page cache keeps {share:.0%} of the files")


def _resident(files: list[Path]) -> float:
    """Return the share of the files' pages in memory, according to mincore(2)."""
    held = total = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            flags = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapped)  # this needs a writable mapping, so it is a private copy
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), flags)
            del first
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file} failed")
        held += bytes(flags).count(1)
        total += pages
    return held / total if total else 0.0
