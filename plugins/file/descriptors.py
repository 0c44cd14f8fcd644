"""Files as descriptors: vectored calls until all is done, readers that may go around the page cache, synced and locked
folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from snapshot.errors import StorageError
from snapshot.plugins.file import direct_io
from snapshot.storage import Buffer

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
_FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""A FIFO without a writer would be waited for; a regular file knows no O_NONBLOCK."""
LOCK_PATIENCE = 10.0
"""Seconds that a folder may be locked by somebody else: they hold the lock for one rename."""
_LOCK_POLL = 0.02


class OpenFile:
    """One file that is open for reading: through the page cache, and (from the first cold read on) around it."""

    def __init__(self, full: str, mode: str) -> None:
        self.descriptor = open_regular(full)
        self.around = -1
        opened = os.fstat(self.descriptor)
        self.identity = _identity(opened)
        self._full = full
        self._mode = mode
        self._lock = threading.Lock()

    def goes_around(self, offset: int) -> bool:
        """Whether a long read from an offset on should go around the page cache; if so, `around` is open."""
        if self._mode == "never" or (self._mode != "always" and not direct_io.is_cold(self.descriptor, offset)):
            return False
        with self._lock:
            if self.around < 0:
                try:
                    around = direct_io.open_direct(self._full, _FOR_READING, for_reading=True)
                except OSError as error:  # one that is open is enough
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    return False
                if around is not None and _identity(os.fstat(around)) != self.identity:
                    os.close(around)  # another file has taken its name
                    around = None
                if around is None:
                    self._mode = "never"
                    return False
                self.around = around
        return True

    def close(self) -> None:
        """What a file says at its end is of no use to who has read it."""
        for descriptor in (self.descriptor, self.around):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def open_regular(full: str) -> int:
    """Open a file for reading; `StorageError` where it is no regular one, whose end may never come."""
    descriptor = os.open(full, _FOR_READING)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{full}: is not a regular file")
    return descriptor


def read_all(full: str, limit: int | None) -> bytes:
    """A regular file's content; of one that is longer than the limit, one byte more than that."""
    with open(open_regular(full), "rb") as file:
        return file.read() if limit is None else file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)


def fill(descriptor: int, data: bytes, *, durable: bool) -> None:
    """Write all of a small file."""
    view = memoryview(data)
    while view:
        done = os.write(descriptor, view)
        if done == 0:
            raise OSError(errno.EIO, f"none of {len(view)} bytes were written")
        view = view[done:]
    if durable:
        os.fsync(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def length_of(data: Buffer) -> int:
    """How many bytes a buffer holds; of a ctypes array, the short way."""
    return ctypes.sizeof(data) if isinstance(data, ctypes.Array) else memoryview(data).nbytes


def vectored(call: Callable[..., int], descriptor: int, buffers: Sequence[Buffer], offset: int, total: int) -> int:
    """Do a vectored call until all is done, or (reading) the file ends; where it ended. The kernel takes 1024
    buffers."""
    end = offset + total
    for first in range(0, len(buffers), _MOST_BUFFERS):
        rest: Sequence[Buffer] = buffers[first : first + _MOST_BUFFERS]
        while rest:
            done = call(descriptor, rest, offset)
            offset += done
            if offset >= end:
                return offset
            rest = after(rest, done)
            if done == 0 and rest:
                return offset
    return offset


def after(buffers: Sequence[Buffer], done: int) -> Sequence[Buffer]:
    """What is left of the buffers behind their first `done` bytes."""
    for i, each in enumerate(buffers):
        length = length_of(each)
        if done < length:
            return [memoryview(each).cast("B")[done:], *buffers[i + 1 :]]
        done -= length
    return []


def link_below(root: str, folder: str) -> str | None:
    """The first folder below a root, down to `folder`, that is a symbolic link: what it leads to is not the root's."""
    full = root
    for part in folder.split("/") if folder else ():
        full = f"{full}/{part}"
        if os.path.islink(full):
            return full
    return None


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system whose folders cannot be synced
            raise
    finally:
        os.close(descriptor)


def drop_cache(path: str) -> None:
    """Drop a file from the page cache; pages that are not on the disk yet would stay."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold a folder's lock; `StorageError` where somebody else does not give it up. Without one where the file system
    has none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_PATIENCE
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"{folder}: is locked by another process, and was for {LOCK_PATIENCE:g} seconds"
                    ) from None
                time.sleep(_LOCK_POLL)
                continue
            except OSError:  # a file system without locks
                pass
            break
        yield
    finally:
        os.close(descriptor)


def token_of(found: os.stat_result) -> str:
    """What changes whenever a file's content does."""
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"
