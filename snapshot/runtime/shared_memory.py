"""Segments: memory that this process and its writer process both see, in a few long pieces.

A segment is sparse: its pages come when they are first written to, and go when a hole is punched, so a long one costs
nothing. It has no name in any file system, and is gone with the last process that has it.
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
    """Shared memory, of which grains are handed out. Not safe between threads: its arena has the lock."""

    def __init__(self, size: int, grain: int) -> None:
        self.number = next(_numbers)
        self.size = size
        self._grain = grain
        self.descriptor = _anonymous_file()
        self.closed = False
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # where shared memory knows no huge pages: only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self._address = address_of(self.view)
        self._used = bytearray(size // grain)
        self._warm = bytearray(size // grain)
        """Grains that are free, and have their pages."""

    def find(self, count: int) -> int:
        """Return the first of so many free grains in a row, or -1."""
        return self._used.find(bytes(count))

    def find_warm(self, count: int) -> int:
        """Return the same among those that have their pages."""
        return self._warm.find(b"\1" * count)

    def take(self, first: int, count: int) -> int:
        """Mark grains as used; how many of them have their pages."""
        warm = self._warm.count(1, first, first + count)
        self._used[first : first + count] = b"\1" * count
        self._warm[first : first + count] = bytes(count)
        return warm

    def give(self, first: int, count: int, *, keep: bool) -> None:
        """Mark grains as free; their pages are kept, or go back to the system."""
        self._used[first : first + count] = bytes(count)
        if keep:
            self._warm[first : first + count] = b"\1" * count
        else:
            self._punch(first, count)

    def trim(self) -> None:
        """Give back the pages of what is free."""
        first = self._warm.find(1)
        while first >= 0:
            end = self._warm.find(0, first)
            end = len(self._warm) if end < 0 else end
            self._warm[first:end] = bytes(end - first)
            self._punch(first, end - first)
            first = self._warm.find(1, end)

    @property
    def is_unused(self) -> bool:
        """Whether there is nothing in it."""
        return 1 not in self._used and 1 not in self._warm

    def populate(self, offset: int, nbytes: int) -> None:
        """Have the pages of a range made, at once: quicker than one by one, and where there is no memory for them this
        is an error, and not a signal in the middle of a copy."""
        if not populate_pages(self._address + offset, nbytes):
            os.posix_fallocate(self.descriptor, offset, nbytes)

    def _punch(self, first: int, count: int) -> None:
        begin, length = ctypes.c_int64(first * self._grain), ctypes.c_int64(count * self._grain)
        _libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length)

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last that looks at it."""
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "closed"):
            self.close()

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.size:,} bytes)"


def _anonymous_file() -> int:
    """Return a file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        for flags in (os.MFD_CLOEXEC | _NOEXEC_SEAL, os.MFD_CLOEXEC):  # the first one since Linux 6.3
            with contextlib.suppress(OSError):
                return os.memfd_create("snapshot", flags)
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(name)
    return descriptor
