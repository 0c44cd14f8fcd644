"""Files as descriptors: complete vectored calls, open files, folders that are synced or locked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from snapshot.errors import StorageError
from snapshot.plugins.file import direct_io
from snapshot.storage import Buffer
from snapshot.system_calls import CLOEXEC, MOST_BUFFERS, NONBLOCK, sync_file, try_lock_folder

_FOR_READING = os.O_RDONLY | CLOEXEC | NONBLOCK
"""O_NONBLOCK, since opening a FIFO without a writer would wait. Regular files ignore it."""
_is_junction: Callable[[str], bool] = getattr(os.path, "isjunction", lambda _: False)
LOCK_PATIENCE = 10.0
"""Seconds to wait for a folder's lock, which is held for one rename."""


class OpenFile:
    """A file that is open for reading: through the page cache and, from the first cold read on, with O_DIRECT."""

    def __init__(self, full: str, mode: str) -> None:
        self.descriptor = open_regular(full)
        self.around = -1
        opened = os.fstat(self.descriptor)
        self.identity = _identity(opened)
        self._full = full
        self._mode = mode
        self._lock = threading.Lock()
        if mode == "never":
            self._read_ahead()

    def goes_around(self, offset: int) -> bool:
        """Return True if a long read at an offset should use O_DIRECT. Then `around` is open."""
        if self._mode == "never" or (self._mode != "always" and not direct_io.is_cold(self.descriptor, offset)):
            return False
        with self._lock:
            if self.around < 0:
                try:
                    around = direct_io.open_direct(self._full, _FOR_READING, only_local=self._mode != "always")
                except OSError as error:  # too many descriptors: use one
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    return False
                if around is not None and _identity(os.fstat(around)) != self.identity:
                    os.close(around)  # the file was replaced
                    around = None
                if around is None:
                    self._mode = "never"
                    return False
                self.around = around
        return True

    def stay_in_cache(self) -> None:
        """Read through the page cache only."""
        self._mode = "never"
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Let the kernel read further ahead: threads that take turns look to it like reads at random."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Close the descriptors; errors do not matter after reading."""
        for descriptor in (self.descriptor, self.around):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def open_regular(full: str, flags: int = 0) -> int:
    """Open a file for reading; raise StorageError if it is not a regular file, which might never end."""
    if NONBLOCK or stat.S_ISREG(os.stat(full).st_mode):
        descriptor = os.open(full, _FOR_READING | flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    error = StorageError(f"{full}: not a regular file")
    error.errno = errno.EISDIR
    raise error


def read_regular(full: str, limit: int | None) -> bytes:
    """Return the content of a regular file, and at most one byte more than the limit."""
    with open(open_regular(full), "rb") as file:
        return file.read() if limit is None else file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)


def write_all(descriptor: int, data: bytes, *, durable: bool) -> None:
    """Write all of a small file."""
    view = memoryview(data)
    while view:
        done = os.write(descriptor, view)
        if done == 0:
            raise OSError(errno.EIO, f"write failed: 0 of {len(view)} bytes were written")
        view = view[done:]
    if durable:
        sync_file(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def buffer_length(data: Buffer) -> int:
    """Return the size of a buffer in bytes, with a faster path for ctypes arrays."""
    return ctypes.sizeof(data) if isinstance(data, ctypes.Array) else memoryview(data).nbytes


def transfer_vectored(
    call: Callable[..., int], descriptor: int, buffers: Sequence[Buffer], offset: int, total: int
) -> int:
    """Repeat a vectored call until all bytes are moved or the file ends; return the offset reached.

    The kernel accepts at most 1024 buffers per call.
    """
    end = offset + total
    for first in range(0, len(buffers), MOST_BUFFERS):
        rest: Sequence[Buffer] = buffers[first : first + MOST_BUFFERS]
        while rest:
            done = call(descriptor, rest, offset)
            offset += done
            if offset >= end:
                return offset
            rest = skip_bytes(rest, done)
            if done == 0 and rest:
                return offset
    return offset


def skip_bytes(buffers: Sequence[Buffer], done: int) -> Sequence[Buffer]:
    """Return the buffers without their first `done` bytes."""
    for i, each in enumerate(buffers):
        length = buffer_length(each)
        if done < length:
            return [memoryview(each).cast("B")[done:], *buffers[i + 1 :]]
        done -= length
    return []


def find_link(root: str, folder: str) -> str | None:
    """Return the first symbolic link among the folders from a root down to `folder`, or None.

    A link may lead out of the root.
    """
    full = root
    for part in folder.split("/") if folder else ():
        full = f"{full}/{part}"
        if os.path.islink(full) or _is_junction(full):
            return full
    return None


def drop_cache(path: str) -> None:
    """Drop a file from the page cache, after flushing it: dirty pages would stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY | CLOEXEC)
    try:
        sync_file(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: str) -> Iterator[None]:
    """Hold a folder's lock; raise StorageError if another process does not release it.

    On a file system without locks, go on without one.
    """
    with try_lock_folder(folder, LOCK_PATIENCE) as locked:
        if not locked:
            raise StorageError(f"{folder}: locked by another process for more than {LOCK_PATIENCE:g} seconds")
        yield


def file_token(found: os.stat_result) -> str:
    """Return a token that changes whenever a file's content does."""
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"
