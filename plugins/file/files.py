"""Files as descriptors: complete vectored calls, and O_DIRECT for bulk bytes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from snapshot.errors import StorageError
from snapshot.io.storage import Buffer
from snapshot.io.system import CLOEXEC, MOST_BUFFERS, NONBLOCK, fcntl, libc, sync_file, try_lock_folder
from snapshot.tensors.memory import copy_memory

# O_DIRECT for bulk bytes, if the file system allows it and it is faster.
#
# Durable writes are steadier, and leave the page cache to the training job. Cold reads are faster. File systems that
# are not local, or that refuse it, are used through the page cache, without a warning.

PAGE = 4096
WORTH = 1 << 20
"""Minimum bytes of a read that uses O_DIRECT."""
CHUNK = 8 << 20
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "f2fs"))
"""File systems on which O_DIRECT is used without a setting.

Network and parallel file systems (NFS, Lustre, GPFS, FUSE) read ahead and write behind in their own caches. Many accept
O_DIRECT, and are then slower, or split each request.
"""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


@lru_cache(maxsize=256)
def _known_file_system(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    raise LookupError


def _file_system(device: int) -> str:
    """Return the type of the file system with a device number, from the kernel's table of mounts.

    A failure is not cached: it may be due to a lack of descriptors.
    """
    try:
        return _known_file_system(device)
    except (OSError, ValueError, LookupError):
        return ""


def is_worthwhile(folder: str, *, always: bool = False) -> bool:
    """Return True if durable writes below a folder should use O_DIRECT. The folder need not exist."""
    if not hasattr(os, "O_DIRECT"):
        return False
    while not os.path.exists(folder) and folder not in ("", "/"):
        folder = os.path.dirname(folder)
    try:
        kind = _file_system(os.stat(folder or "/").st_dev)
    except OSError:
        return False
    return always or kind in _LOCAL


def open_direct(full: str, flags: int, *, only_local: bool = False) -> int | None:
    """Open a file with O_DIRECT; return None if that is refused, or if only local file systems are wanted."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(full, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise
    if only_local and _file_system(os.fstat(descriptor).st_dev) not in _LOCAL:
        os.close(descriptor)
        return None
    return descriptor


def stop_direct(descriptor: int) -> None:
    """Switch a descriptor back to the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def write_aligned(descriptor: int, offset: int, buffers: Sequence[Buffer], total: int) -> bool:
    """Write one aligned buffer. Return False if it is not aligned, or the file system refuses after all.

    Then nothing counts as written. The last page may extend past the end of the buffer; `finish` truncates it.
    """
    if len(buffers) != 1 or offset % PAGE:
        return False
    view = memoryview(buffers[0]).cast("B")
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if address % PAGE:
        return False
    padded = -(-total // PAGE) * PAGE
    if padded != total:  # buffers are whole pages, so the tail of the last one can be written
        view = memoryview((ctypes.c_char * padded).from_address(address)).cast("B")
    done = 0
    while done < padded:
        try:
            step = os.pwritev(descriptor, [view[done:]], offset + done)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        done += step
        if (step % PAGE or step == 0) and done < padded:
            return False
    return True


def is_cold(descriptor: int, offset: int) -> bool:
    """Return True if the bytes at an offset are missing from the page cache, tested by a non-blocking read."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_bounced(descriptor: int, offset: int, buffers: Sequence[Buffer], total: int, bounce: memoryview) -> int:
    """Fill the buffers through an aligned bounce buffer; return the number of bytes read."""
    source = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
    got = 0
    targets = iter(buffers)
    target, room = 0, 0
    while got < total:
        begin = (offset + got) // PAGE * PAGE
        skip = offset + got - begin
        length = min(CHUNK, -(-(skip + total - got) // PAGE) * PAGE)
        done = os.preadv(descriptor, [bounce[:length]], begin)
        have = min(done - skip, total - got)
        if have <= 0:
            break
        at = source + skip
        got += have
        while have:
            while not room:
                view = memoryview(next(targets)).cast("B")
                room = len(view)
                target = ctypes.addressof(ctypes.c_char.from_buffer(view)) if room else 0
            step = min(room, have)
            copy_memory(target, at, step)
            target, room, at, have = target + step, room - step, at + step, have - step
        if done < length:
            break
    return got


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start to flush a range to disk, so that `fsync` has less to do."""
    if libc.sync_file_range is not None:
        libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(2))


# Files as descriptors: complete vectored calls, open files, folders that are synced or locked.

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
        if self._mode == "never" or (self._mode != "always" and not is_cold(self.descriptor, offset)):
            return False
        with self._lock:
            if self.around < 0:
                try:
                    around = open_direct(self._full, _FOR_READING, only_local=self._mode != "always")
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
