"""Shared-memory segments for this process and its writer process.

Segments are few and long, but sparse: pages are allocated on first write and freed by punching holes. A segment has no
file name, and is freed with the last process that maps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import tempfile

from snapshot.tensors.addresses import address_of, populate_pages

_NOEXEC_SEAL = 8
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


class SharedSegment:
    """A segment of shared memory, divided into grains. It is not thread-safe: its arena holds the lock."""

    def __init__(self, size: int, grain: int) -> None:
        self.number = next(_numbers)
        self.size = size
        self._grain = grain
        self.descriptor = _anonymous_file()
        self.closed = False
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # shared memory without huge pages is only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self._address = address_of(self.view)
        self._used = bytearray(size // grain)
        self._warm = bytearray(size // grain)
        """Free grains whose pages are allocated."""

    def find(self, count: int) -> int:
        """Return the first of `count` consecutive free grains, or -1."""
        return self._used.find(bytes(count))

    def find_warm(self, count: int) -> int:
        """Return the first of `count` consecutive free grains with allocated pages, or -1."""
        return self._warm.find(b"\1" * count)

    def take(self, first: int, count: int) -> int:
        """Mark grains as used. Return the number with allocated pages."""
        warm = self._warm.count(1, first, first + count)
        self._used[first : first + count] = b"\1" * count
        self._warm[first : first + count] = bytes(count)
        return warm

    def give(self, first: int, count: int, *, keep: bool) -> None:
        """Mark grains as free, and keep or free their pages."""
        self._used[first : first + count] = bytes(count)
        if keep:
            self._warm[first : first + count] = b"\1" * count
        else:
            self._punch(first, count)

    def trim(self) -> None:
        """Free the pages of all free grains."""
        first = self._warm.find(1)
        while first >= 0:
            end = self._warm.find(0, first)
            end = len(self._warm) if end < 0 else end
            self._warm[first:end] = bytes(end - first)
            self._punch(first, end - first)
            first = self._warm.find(1, end)

    @property
    def is_unused(self) -> bool:
        """True if no grain is used, and no free grain keeps its pages."""
        return 1 not in self._used and 1 not in self._warm

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range at once.

        This is faster than page faults. Without memory it raises, instead of sending a signal during a copy.
        """
        if not populate_pages(self._address + offset, nbytes):
            os.posix_fallocate(self.descriptor, offset, nbytes)

    def _punch(self, first: int, count: int) -> None:
        begin, length = ctypes.c_int64(first * self._grain), ctypes.c_int64(count * self._grain)
        _libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last mapping ends."""
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "closed"):
            self.close()

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.size:,} bytes)"


def _anonymous_file() -> int:
    """Return an anonymous file in memory."""
    if hasattr(os, "memfd_create"):
        for flags in (os.MFD_CLOEXEC | _NOEXEC_SEAL, os.MFD_CLOEXEC):  # the first flag exists since Linux 6.3
            with contextlib.suppress(OSError):
                return os.memfd_create("snapshot", flags)
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(name)
    return descriptor
