"""Segments of staging memory: shared with the writer process, pinned for an accelerator, or both.

Segments are few and long, but sparse: pages are allocated on first write and freed by punching holes. A shared segment
has no file name, and is freed with the last process that maps it. A pinned segment is never sparse: it is allocated and
registered with the accelerator's driver as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from snapshot.runtime.pinning import (
    PinningRefused,
    allocate_pinned,
    bind_to_node,
    can_register,
    find_numa_node,
    register_memory,
    unregister_memory,
)
from snapshot.system_calls import libc, map_memory
from snapshot.tensors.addresses import address_of, populate_pages

_NOEXEC_SEAL = 8
_HUGEPAGE, _WIPEONFORK = 14, 18
"""Advice to the kernel; `mmap` names the second one only in newer versions of Python."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_numbers = itertools.count(1)
_never_unmapped: list[Any] = []
"""Memory that the driver still uses, because it refused to unregister it."""


class Segment:
    """A segment of memory, divided into grains. It is not thread-safe: its arena holds the lock.

    Args:
        device: The accelerator to pin it for. If that fails, `pinned` is False and `refusal` is the reason.
    """

    def __init__(self, size: int, grain: int, *, shared: bool, device: torch.device | None = None) -> None:
        self.number = next(_numbers)
        self.size = size
        self.shared = shared
        self.device = device
        self._grain = grain
        self.descriptor = -1
        self.closed = False
        self._process = os.getpid()
        """The process that pinned the memory: a forked child must not unpin it."""
        self.pinned = False
        self.refusal: PinningRefused | None = None
        self._torch: torch.Tensor | None = None
        if device is not None and not can_register(device):
            self._torch = None if shared else allocate_pinned(size)
        if self._torch is not None:
            self.memory: Any = self._torch.numpy()
            self.pinned = True
        else:
            self.memory = self._map_memory()
        self._address = address_of(memoryview(self.memory))
        self._used = bytearray(size // grain)
        self._warm = bytearray(size // grain)
        """Free grains whose pages are allocated."""
        if device is not None and self._torch is None and can_register(device):
            self._pin(device)
        if self.pinned:
            self._warm[:] = b"\1" * len(self._warm)

    def _map_memory(self) -> mmap.mmap:
        if self.shared:
            self.descriptor = _anonymous_file()
            os.ftruncate(self.descriptor, self.size)
            memory = mmap.mmap(self.descriptor, self.size)
        else:
            memory = map_memory(self.size)
        # A forked child would get a copy of each pinned page, which it does not need: it has an arena of its own. The
        # range stays mapped, since the child may free a segment that it inherited.
        for advice in [_HUGEPAGE] + ([] if self.shared else [_WIPEONFORK]):
            with contextlib.suppress(OSError, AttributeError):  # a system without it is only slower
                memory.madvise(advice)
        return memory

    def _pin(self, device: torch.device) -> None:
        node = find_numa_node(device)
        if node >= 0:
            bind_to_node(self._address, self.size, node)
        self.populate(0, self.size)
        try:
            register_memory(self._address, self.size, device)
            self.pinned = True
        except PinningRefused as refused:
            self.refusal = refused

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
        """Mark grains as free, and keep or free their pages. Pinned pages are always kept."""
        self._used[first : first + count] = bytes(count)
        if keep or self.pinned:
            self._warm[first : first + count] = b"\1" * count
        else:
            self._punch(first, count)

    def trim(self) -> int:
        """Free the pages of all free grains, unless they are pinned. Return their size in bytes."""
        if self.pinned:
            return 0
        freed = self.free
        first = self._warm.find(1)
        while first >= 0:
            end = self._warm.find(0, first)
            end = len(self._warm) if end < 0 else end
            self._warm[first:end] = bytes(end - first)
            self._punch(first, end - first)
            first = self._warm.find(1, end)
        return freed

    @property
    def is_unused(self) -> bool:
        """True if no grain is used, and no free grain keeps its pages, except pinned ones."""
        return 1 not in self._used and (self.pinned or 1 not in self._warm)

    @property
    def free(self) -> int:
        """The bytes of free grains whose pages are allocated."""
        return self._warm.count(1) * self._grain

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range at once.

        This is faster than page faults. Without memory it raises, instead of sending a signal during a copy.
        """
        if not populate_pages(self._address + offset, nbytes) and self.shared:
            os.posix_fallocate(self.descriptor, offset, nbytes)

    def _punch(self, first: int, count: int) -> None:
        begin, length = ctypes.c_int64(first * self._grain), ctypes.c_int64(count * self._grain)
        libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length)

    def close(self) -> None:
        """Unpin the memory and close the descriptor. The memory is freed when the last mapping ends."""
        if self.closed:
            return
        self.closed = True
        registered, self.pinned = self.pinned and self._torch is None and self._process == os.getpid(), False
        try:
            if registered and self.device is not None and not unregister_memory(self._address, self.device):
                _never_unmapped.append(self.memory)
        finally:
            if self.descriptor >= 0:
                os.close(self.descriptor)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # the memory ends with the process
            self.close()

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.size:,} bytes{', pinned' if self.pinned else ''})"


def _anonymous_file() -> int:
    """Return an anonymous file in memory."""
    if hasattr(os, "memfd_create"):
        for flags in (os.MFD_CLOEXEC | _NOEXEC_SEAL, os.MFD_CLOEXEC):  # the first flag exists since Linux 6.3
            with contextlib.suppress(OSError):
                return os.memfd_create("snapshot", flags)
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(name)
    return descriptor
