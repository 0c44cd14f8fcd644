"""O_DIRECT for bulk bytes, if the file system allows it and it is faster.

Durable writes are steadier, and leave the page cache to the training job. Cold reads are faster. File systems that are
not local, or that refuse it, are used through the page cache, without a warning.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import lru_cache

from snapshot.storage import Buffer
from snapshot.system_calls import fcntl, libc
from snapshot.tensors.addresses import copy_memory

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
