"""The arena: staging memory that is kept between snapshots.

Page faults on fresh memory cost more than the copy itself. Memory that a writer process must see is in a few shared
segments. All other memory is private to this process.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import defaultdict
from typing import Any

import torch

from snapshot.errors import system_limits
from snapshot.options import Settings
from snapshot.per_process import PerProcess
from snapshot.runtime.host_memory import total_memory
from snapshot.runtime.shared_memory import SharedSegment
from snapshot.tensors.addresses import address_of, populate_pages

GRAIN = 1 << 20
"""Slot sizes are multiples of this, so that parts of similar size can reuse each other's slots."""
SEGMENT = 256 << 20
"""The size of the first shared segment."""


class Slot:
    """Page-aligned host memory: private, pinned for accelerator copies, or a range of a shared segment."""

    __slots__ = ("_owner", "address", "offset", "pinned", "segment", "size", "tensor", "view")

    def __init__(self, size: int, pinned: bool, segment: SharedSegment | None = None, offset: int = 0) -> None:
        self.size = size
        self.pinned = pinned
        self.segment = segment
        self.offset = offset
        """The offset in its segment."""
        self._owner: Any = None
        if segment is not None:
            self.view = segment.view[offset : offset + size]
            self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        elif pinned:
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.view = memoryview(self.tensor.numpy().data)
        else:
            self._owner = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.view = memoryview(self._owner)
            self.tensor = torch.frombuffer(self._owner, dtype=torch.uint8)
            populate_pages(address_of(self.view), size)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # asynchronous: searching for huge pages now may take seconds
                with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
                    self._owner.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(self.view)

    def __repr__(self) -> str:
        where = f" at {self.offset:,} of {self.segment}" if self.segment else ", pinned" if self.pinned else ""
        return f"Slot({self.size:,} bytes{where})"


class Arena:
    """A cache of slots by size. The cached bytes are bounded; further slots are freed."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = self._out = 0
        self._free: defaultdict[tuple[int, bool], list[Slot]] = defaultdict(list)
        self._segments: list[SharedSegment] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool = False, shared: bool = False) -> Slot:
        """Return a slot of at least `nbytes` bytes, with arbitrary content.

        A `shared` slot can be mapped by another process, and is never pinned.
        """
        size = max(1, -(-nbytes // GRAIN)) * GRAIN
        with system_limits(f"cannot allocate {size:,} bytes of staging memory; use a smaller memory_budget_bytes"):
            return self._take_shared(size) if shared else self._take_own(size, pinned)

    def _take_own(self, size: int, pinned: bool) -> Slot:
        with self._lock:
            self._out += size
            free = self._free[size, pinned]
            if free:
                self._kept -= size
                return free.pop()
        try:
            return Slot(size, pinned)
        except BaseException:
            with self._lock:
                self._out -= size
            raise

    def _take_shared(self, size: int) -> Slot:
        count = size // GRAIN
        with self._lock:
            segment, first = self._room(count)
            warm = segment.take(first, count)
            self._kept -= warm * GRAIN
            self._out += size
        slot = Slot(size, False, segment, first * GRAIN)
        try:
            if warm < count:
                segment.populate(first * GRAIN, size)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def _room(self, count: int) -> tuple[SharedSegment, int]:
        """Return a segment and offset with `count` free grains, preferably with pages."""
        for find in (SharedSegment.find_warm, SharedSegment.find):
            for segment in self._segments:
                if (first := find(segment, count)) >= 0:
                    return segment, first
        held = sum(segment.size for segment in self._segments)  # each is as long as all before it, so there are few
        segment = SharedSegment(max(SEGMENT, held, count * GRAIN), GRAIN)
        self._segments.append(segment)
        return segment, 0

    def give(self, slot: Slot) -> None:
        """Return a slot to the cache."""
        if slot.segment is not None:
            self._give_shared(slot, slot.segment)
            return
        with self._lock:
            self._out -= slot.size
            if self._kept + slot.size <= self._keep:
                self._kept += slot.size
                self._free[slot.size, slot.pinned].append(slot)

    def _give_shared(self, slot: Slot, segment: SharedSegment) -> None:
        with self._lock:
            if segment not in self._segments:
                return  # it belongs to the parent of this fork
            self._out -= slot.size
            keep = self._kept + slot.size <= self._keep
            self._kept += slot.size if keep else 0
            segment.give(slot.offset // GRAIN, slot.size // GRAIN, keep=keep)
            if not keep:
                self._drop_unused()

    def _drop_unused(self) -> None:
        for segment in [each for each in self._segments if each.is_unused]:
            self._segments.remove(segment)
            segment.close()

    @property
    def kept(self) -> int:
        """Cached bytes that are not in use."""
        return self._kept

    def release(self) -> int:
        """Free the cached slots. Return their size in bytes."""
        with self._lock:
            kept, self._kept = self._kept, 0
            self._free.clear()
            for segment in self._segments:
                segment.trim()
            self._drop_unused()
            return kept

    def __repr__(self) -> str:
        shared = f", {len(self._segments)} shared segments" if self._segments else ""
        return f"Arena({self._kept:,} bytes kept, {self._out:,} in use{shared})"


def _make_arena() -> Arena:
    wanted = Settings.current().arena_bytes
    return Arena(total_memory() // 4 // Settings.processes() if wanted < 0 else wanted)


_arena = PerProcess(_make_arena)


def arena() -> Arena:
    """Return this process's arena."""
    return _arena.get()


def release_memory() -> int:
    """Free the unused staging memory that is kept for the next snapshot. Return its size in bytes.

    >>> from snapshot import release_memory
    >>> release_memory() >= 0
    True
    """
    return arena().release()
