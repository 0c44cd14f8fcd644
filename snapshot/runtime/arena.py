"""The arena: staging memory that is kept between snapshots.

Page faults on fresh memory cost more than the copy itself. Memory that a writer process must see, and memory that is
pinned for an accelerator, is cut from a few long segments. All other slots are mapped one by one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from snapshot.errors import system_limits
from snapshot.events import log
from snapshot.options import Settings
from snapshot.per_process import PerProcess
from snapshot.runtime.host_memory import total_memory
from snapshot.runtime.pinning import Pinning, can_register
from snapshot.runtime.segment import Segment
from snapshot.system_calls import map_memory
from snapshot.tensors.addresses import address_of, populate_pages
from snapshot.text import counted

GRAIN = 1 << 20
"""Slot sizes are multiples of this, so that parts of similar size can reuse each other's slots."""
SEGMENT = 256 << 20
"""The size of the first shared segment, and of most pinned ones."""
FIRST_PINNED = 64 << 20
"""The size of the first pinned segment: the call that needs it waits until it is pinned."""
SPARE = 64 << 20
"""The bytes that may be pinned beyond the budget, because slots of different sizes leave gaps between them."""


def arena_bytes(nbytes: int) -> int:
    """Return the budget that an arena slot of `nbytes` bytes takes."""
    return -(-nbytes // GRAIN) * GRAIN


class Slot:
    """Page-aligned host memory of its own, or a range of a segment."""

    __slots__ = ("_owner", "address", "offset", "pinned", "segment", "size", "tensor", "view")

    def __init__(self, size: int, segment: Segment | None = None, offset: int = 0) -> None:
        self.size = size
        self.pinned = segment is not None and segment.pinned
        """True if accelerators copy it without waiting for the host."""
        self.segment = segment
        self.offset = offset
        """The offset in its segment."""
        self._owner: Any = None
        if segment is not None:
            self.view = memoryview(segment.memory)[offset : offset + size]
            self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        else:
            self._owner = map_memory(size)
            self.view = memoryview(self._owner)
            self.tensor = torch.frombuffer(self._owner, dtype=torch.uint8)
            populate_pages(address_of(self.view), size)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # asynchronous: searching for huge pages now may take seconds
                with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
                    self._owner.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(self.view)

    def __repr__(self) -> str:
        where = f" at {self.offset:,} of {self.segment}" if self.segment else ""
        return f"Slot({self.size:,} bytes{where})"


class Arena:
    """A cache of slots. The cached bytes are bounded; further slots are freed."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = self._out = 0
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        self._segments: list[Segment] = []
        self._refused: set[torch.device] = set()
        """Devices whose driver refused to pin memory."""
        self._stop_growing = threading.Event()
        self._lock = threading.Lock()
        self._pin_lock = threading.Lock()
        """Held while memory is pinned, which takes long. It is acquired before the other lock."""

    def take(self, nbytes: int, *, shared: bool = False, pinning: Pinning | None = None) -> Slot:
        """Return a slot of at least `nbytes` bytes, with arbitrary content.

        A `shared` slot can be mapped by another process. With `pinning`, the slot is pinned if possible.
        """
        size = max(GRAIN, arena_bytes(nbytes))
        with system_limits(f"cannot allocate {size:,} bytes of staging memory; use a smaller memory_budget_bytes"):
            if pinning is not None:
                slot = self._take_pinned(size, shared, pinning)
                if slot is not None:
                    return slot
            return self._take_shared(size) if shared else self._take_own(size)

    def _take_own(self, size: int) -> Slot:
        with self._lock:
            self._out += size
            free = self._free[size]
            if free:
                self._kept -= size
                return free.pop()
        try:
            return Slot(size)
        except BaseException:
            with self._lock:
                self._out -= size
            raise

    def _take_shared(self, size: int) -> Slot:
        with self._lock:
            segments = [segment for segment in self._segments if segment.shared and not segment.pinned]
            found = _find_room(segments, size)
            if found is None:
                held = sum(segment.size for segment in segments)  # each is as long as all before it, so there are few
                found = Segment(max(SEGMENT, held, size), GRAIN, shared=True), 0
                self._segments.append(found[0])
            warm = self._mark(*found, size)
        slot = Slot(size, *found)
        try:
            if warm < size:
                found[0].populate(slot.offset, size)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def _mark(self, segment: Segment, offset: int, size: int) -> int:
        """Mark a range as used. Return its bytes that have pages."""
        warm = segment.take(offset // GRAIN, size // GRAIN) * GRAIN
        self._kept -= warm
        self._out += size
        return warm

    # Pinned memory

    def _take_pinned(self, size: int, shared: bool, pinning: Pinning) -> Slot | None:
        slot = self._cut_pinned(size, shared, pinning)
        if slot is None:
            with self._pin_lock:  # another thread may pin a segment at the moment
                slot = self._cut_pinned(size, shared, pinning)
                if slot is None and self._add_pinned(size, shared, pinning):
                    slot = self._cut_pinned(size, shared, pinning)
        return slot

    def _cut_pinned(self, size: int, shared: bool, pinning: Pinning) -> Slot | None:
        with self._lock:
            found = _find_room(self._pinned_segments(shared, pinning), size)
            if found is None:
                return None
            self._mark(*found, size)
        return Slot(size, *found)

    def _pinned_segments(self, shared: bool, pinning: Pinning) -> list[Segment]:
        kind = pinning.device.type
        return [
            each
            for each in self._segments
            if each.pinned and each.shared >= shared and each.device is not None and each.device.type == kind
        ]

    def _add_pinned(self, size: int, shared: bool, pinning: Pinning, *, ahead: bool = False) -> bool:
        """Pin one more segment with room for `size` bytes; return False if that is not possible."""
        if shared and not can_register(pinning.device):
            return False  # another process cannot see torch's own pinned memory
        with self._lock:
            if pinning.device in self._refused:
                return False
            pinned = sum(segment.size for segment in self._segments if segment.pinned)
            full = pinned + size > pinning.limit + SPARE
            usable = self._pinned_segments(shared, pinning)
            dropped = self._remove(lambda each: each.pinned and not (ahead and each in usable)) if full else []
            mine = sum(segment.size for segment in usable if segment not in dropped)
        pinned -= sum(segment.size for segment in dropped)
        _close(dropped)
        most = min(SEGMENT if pinned else FIRST_PINNED, pinning.limit, pinning.limit + SPARE - pinned)
        length = max(size, min(most, max(pinning.total - mine, 0)) // GRAIN * GRAIN)
        if pinned + length > pinning.limit + SPARE:
            return False
        segment = Segment(length, GRAIN, shared=shared, device=pinning.device)
        if not segment.pinned:
            self._note_refusal(segment, pinning.device)
            return False
        with self._lock:
            self._segments.append(segment)
            self._kept += segment.free
        return True

    def _note_refusal(self, segment: Segment, device: torch.device) -> None:
        segment.close()
        if segment.refusal is not None and segment.refusal.later:
            return
        log.warning("cannot pin memory for %s, so copies are slower: %s", device, segment.refusal or "it has none")
        with self._lock:
            self._refused.add(device)

    def pin_ahead(self, shared: bool, pinning: Pinning) -> Callable[[], object]:
        """Pin the memory that an operation will need in the background, while it uses the first of it.

        Return a function that ends this. Another call and `release` end it, too.
        """
        stop = threading.Event()

        def grow() -> None:
            while not stop.is_set():
                with self._pin_lock:
                    with self._lock:
                        pinned = sum(segment.size for segment in self._pinned_segments(shared, pinning))
                    if stop.is_set() or min(pinning.total, pinning.limit) - pinned < GRAIN:
                        return
                    try:
                        if not self._add_pinned(GRAIN, shared, pinning, ahead=True):
                            return
                    except (MemoryError, OSError, RuntimeError):
                        return  # the operation raises it, if it needs the memory

        with self._lock:
            self._stop_growing.set()
            self._stop_growing = stop
        with contextlib.suppress(RuntimeError):  # without a further thread, memory is pinned when it is needed
            threading.Thread(target=grow, name="snapshot-io-arena", daemon=True).start()
        return stop.set

    # Return

    def give(self, slot: Slot) -> None:
        """Return a slot to the cache."""
        segment = slot.segment
        dropped: list[Segment] = []
        with self._lock:
            if segment is not None and segment not in self._segments:
                return  # it belongs to the parent of this fork
            self._out -= slot.size
            keep = self._kept + slot.size <= self._keep
            if segment is None:
                if keep:
                    self._free[slot.size].append(slot)
            else:
                segment.give(slot.offset // GRAIN, slot.size // GRAIN, keep=keep)
            if keep or slot.pinned:
                self._kept += slot.size
            if not keep:
                dropped = self._remove(lambda segment: self._kept > self._keep or not segment.pinned)
        _close(dropped)

    def _remove(self, wanted: Callable[[Segment], bool]) -> list[Segment]:
        """Remove the unused segments that match a condition. The caller closes them without the lock."""
        removed = []
        for segment in list(self._segments):
            if segment.is_unused and wanted(segment):
                self._segments.remove(segment)
                self._kept -= segment.free
                removed.append(segment)
        return removed

    @property
    def kept(self) -> int:
        """Cached bytes that are not in use."""
        return self._kept

    def release(self) -> int:
        """Free the cached slots. Return their size in bytes."""
        self._stop_growing.set()
        with self._pin_lock, self._lock:
            before = self._kept
            self._refused.clear()
            self._kept -= sum(size * len(slots) for size, slots in self._free.items())
            self._free.clear()
            for segment in self._segments:
                self._kept -= segment.trim()
            dropped = self._remove(lambda segment: True)
            freed = before - self._kept
        _close(dropped)
        return freed

    def __repr__(self) -> str:
        segments = f", {counted(len(self._segments), 'segment')}" if self._segments else ""
        return f"Arena({self._kept:,} bytes kept, {self._out:,} in use{segments})"


def _close(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.close()


def _find_room(segments: Sequence[Segment], size: int) -> tuple[Segment, int] | None:
    """Return a segment and an offset with room for `size` bytes, preferably with pages."""
    for find in (Segment.find_warm, Segment.find):
        for segment in segments:
            if (first := find(segment, size // GRAIN)) >= 0:
                return segment, first * GRAIN
    return None


def _make_arena() -> Arena:
    wanted = Settings.current().arena_bytes
    return Arena(total_memory() // 4 // Settings.processes() if wanted < 0 else wanted)


_arena = PerProcess(_make_arena)


def arena() -> Arena:
    """Return this process's arena."""
    return _arena.get()


def release_memory() -> int:
    """Free the unused staging memory that is kept for the next snapshot. Return its size in bytes.

    Pinned memory is given back to the system, too, in whole segments that no running operation uses.

    >>> from snapshot import release_memory
    >>> release_memory() >= 0
    True
    """
    return arena().release()
