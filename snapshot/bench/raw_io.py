"""Baselines of `snapshot bench`: the same bytes, moved by system calls only.

Each baseline does the minimum of any Python program: create a view of every tensor, open files, move the bytes, close.
None records names, shapes or digests, and none can detect damage. Each definition says what else it leaves out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Call = Callable[[int, Any, int], int]
"""`os.preadv` or `os.pwritev`."""

MOST_BUFFERS = 1024
"""IOV_MAX of Linux: maximum number of buffers in one vectored call."""
MOST_BYTES = 1 << 30
"""Maximum bytes per call, which must be less than 2 GiB. Longer lists of buffers are split."""
DIRECT_BUFFER = 8 << 20
PAGE = 4096


def views(tensors: Sequence[torch.Tensor]) -> list[Bytes]:
    """Return each tensor's own memory as bytes."""
    return [tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in tensors]


def cut(buffers: Sequence[Bytes], lanes: int) -> list[tuple[int, list[Bytes]]]:
    """Return the buffers in `lanes` runs of equal length, with their offsets. Long buffers are split."""
    total = sum(buffer.nbytes for buffer in buffers)
    share = -(-total // lanes)
    runs: list[tuple[int, list[Bytes]]] = [(0, [])]
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
            _transfer(os.pwritev, fd, written, [buffer[: -(-at // PAGE) * PAGE]])
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
    share = -(-size // lanes // PAGE) * PAGE

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


def _after(buffers: list[Bytes], moved: int) -> list[Bytes]:
    """Return the buffers that are left after a call has moved `moved` bytes."""
    for index, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= buffer.nbytes
    return []
