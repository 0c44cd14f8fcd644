"""The files of the newest take stay in the page cache while memory is free, so that a restart reads them from there.

Bytes go to the page cache if at least half of the memory is free when the take begins, and are flushed as they arrive.
Those of the take before stay until this one is whole; older ones leave at the pace of the writes, so that their memory
is used again. A quarter of the memory stays free: if there is less, first earlier takes leave, then the
rest of this one. So nothing that a training reads is evicted. Without that much free memory, O_DIRECT leaves the page
cache alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from snapshot.io.host_memory import memory_in_use
from snapshot.io.system import CLOEXEC, PerProcess, count_processes, drop_oldest, libc, sync_file

AMPLE = 1 / 2
"""The share of the memory that is free at the beginning of a take whose bytes stay in the page cache."""
RESERVE = 1 / 4
"""The share that stays free."""
STRIDE = 64 << 20
"""Bytes that are written between two looks at the free memory, and that a file without room has in the cache."""
MOST = 1024
"""Maximum number of files that are recorded."""
_START, _COMPLETE = 2, 7
"""Flags of `sync_file_range`: start to flush a range; also wait until all of it is flushed."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EPERM, errno.EACCES)
"""Errors of systems that do not have the call, or do not permit it: then `fsync` flushes all bytes."""


class _Left(NamedTuple):
    """A file that a take left in the page cache, from `begin` on."""

    take: object
    begin: int
    size: int


class PageCache:
    """The files that takes of this process left in the page cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _Left] = {}
        """Oldest first."""
        self._unchecked = 0
        self._room = True

    def is_ample(self) -> bool:
        """Return True if the bytes of a take that begins now should stay. Those of earlier ones leave for it."""
        if libc.sync_file_range is None:
            return False
        with self._lock:
            for full in [full for full in self._files if not os.path.exists(full)]:
                del self._files[full]
            ours = sum(left.size - left.begin for left in self._files.values())
        return _is_free(AMPLE, ours * count_processes())  # the other ranks of this host have about as much

    def has_room(self, nbytes: int, take: object) -> bool:
        """Return True if `nbytes` that a take has just written may stay. As many bytes of older takes leave."""
        with self._lock:
            self._unchecked += nbytes
            if self._unchecked >= STRIDE:
                earlier = list(dict.fromkeys(left.take for left in self._files.values() if left.take is not take))
                self._leave(self._unchecked, earlier[:-1])
                self._unchecked = 0
                while not (enough := _is_free(RESERVE)) and self._leave(STRIDE, earlier):
                    pass
                self._room = enough
            return self._room

    def _leave(self, nbytes: int, takes: Sequence[object]) -> bool:
        """Drop bytes of some takes, those of the oldest files first. Return False if there are none."""
        while nbytes > 0:
            full, left = next(((full, left) for full, left in self._files.items() if left.take in takes), ("", None))
            if left is None:
                return False
            step = min(nbytes, left.size - left.begin)
            nbytes -= step
            self._files[full] = left = left._replace(begin=left.begin + step)
            if left.begin == left.size:
                del self._files[full]
            with contextlib.suppress(OSError):  # such as a file that was deleted since, which freed its memory
                # From its first byte on, since a large page that an earlier call met in part is still there.
                drop_cache(full, left.begin if full in self._files else 0)
        return True

    def keep(self, full: str, take: object, size: int) -> None:
        """Record a finished file that stays in the page cache."""
        with self._lock:
            self._files.pop(full, None)
            self._files[full] = _Left(take, 0, size)
            drop_oldest(self._files, MOST)


def _is_free(share: float, more: int = 0) -> bool:
    """Return True if a share of the memory is free, of the host and of all control groups. `more` counts as free."""
    return all(total - used + more >= share * total for total, used in memory_in_use())


page_cache = PerProcess(PageCache)


class CachedFile:
    """A file that is written through the page cache, and whether it stays there."""

    def __init__(self, full: str, take: object) -> None:
        self._full = full
        self._take = take
        self._stays = True
        self._behind = 0
        """Bytes that were written without room since older ones were dropped."""

    def wrote(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Start to flush bytes that were written. Without room, wait until older ones are flushed, and drop them."""
        start_writeback(descriptor, offset, nbytes)
        self._stays = page_cache.get().has_room(nbytes, self._take) and self._stays
        if self._stays:
            return
        self._behind += nbytes
        if self._behind >= STRIDE:
            self._behind = 0
            end = max(0, offset - STRIDE // 2)
            if end:
                _flush(descriptor, 0, end, _COMPLETE)
                os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)

    def synced(self, descriptor: int) -> None:
        """Keep the file, or drop what is left of it."""
        if self._stays:
            page_cache.get().keep(self._full, self._take, os.fstat(descriptor).st_size)
        else:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start to flush a range to disk, so that `fsync` has less to do."""
    if libc.sync_file_range is not None:
        _flush(descriptor, offset, length, _START)


def drop_cache(path: str, nbytes: int = 0) -> None:
    """Drop a file, or its first bytes, from the page cache, after flushing it: dirty pages would stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY | CLOEXEC)
    try:
        sync_file(descriptor)
        os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _flush(descriptor: int, offset: int, length: int, flags: int) -> None:
    """Call `sync_file_range`. Its errors are raised: a lost write is reported once, and `fsync` would not tell it."""
    if libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
