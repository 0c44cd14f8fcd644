"""The arena: staging memory that is kept between snapshots, since faulting in fresh pages costs more than copying to
them."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import defaultdict
from typing import Any

import torch

from snapshot.options import Settings
from snapshot.tensors.memory import address_of

GRAIN = 1 << 20
"""Slots are multiples of this long, so that parts of about one size find each other's slots."""


class Slot:
    """Page-aligned host memory; pinned where an accelerator's copies are to go through it."""

    __slots__ = ("_owner", "address", "pinned", "size", "tensor", "view")

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.pinned = pinned
        self._owner: Any = None
        if pinned:
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.view = memoryview(self.tensor.numpy().data)
        else:
            self._owner = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
                    self._owner.madvise(mmap.MADV_HUGEPAGE)
            self.view = memoryview(self._owner)
            self.tensor = torch.frombuffer(self._owner, dtype=torch.uint8)
        self.address = address_of(self.view)

    def __repr__(self) -> str:
        return f"Slot({self.size:,} bytes{', pinned' if self.pinned else ''})"


class Arena:
    """Slots that were used before, by size. What is kept is bounded; the rest goes back to the system."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = self._out = 0
        self._free: defaultdict[tuple[int, bool], list[Slot]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool = False) -> Slot:
        """A slot of at least so many bytes; its content is anything."""
        size = max(1, -(-nbytes // GRAIN)) * GRAIN
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

    def give(self, slot: Slot) -> None:
        """Take a slot back, to be used again."""
        with self._lock:
            self._out -= slot.size
            if self._kept + slot.size <= self._keep:
                self._kept += slot.size
                self._free[slot.size, slot.pinned].append(slot)

    def release(self) -> int:
        """Give all that is kept and not in use back to the system; how many bytes that was."""
        with self._lock:
            kept, self._kept = self._kept, 0
            self._free.clear()
            return kept

    def __repr__(self) -> str:
        return f"Arena({self._kept:,} bytes kept, {self._out:,} in use)"


_arena: Arena | None = None
_lock = threading.Lock()


def arena() -> Arena:
    """This process's arena."""
    global _arena  # noqa: PLW0603 - one arena a process is the point
    with _lock:
        if _arena is None:
            from snapshot.engine.budget import total_memory

            wanted = Settings.current().arena_bytes
            _arena = Arena(total_memory() // 4 // Settings.processes() if wanted < 0 else wanted)
        return _arena


def _after_fork() -> None:
    global _arena, _lock
    _arena, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
