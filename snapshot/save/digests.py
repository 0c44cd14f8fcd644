"""The digests of written files: computed by the host as parts arrive, or ahead by an accelerator.

An accelerator digests its own memory before the bytes are copied. The host then has nothing to digest, and a restore
also detects bytes that changed on their way to the host.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from snapshot.events import log
from snapshot.io.accelerators import await_events
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import HeldSlot, MemoryBudget
from snapshot.io.storage import Buffer
from snapshot.plan.layout import FilePart, FilePlan
from snapshot.save.device_copies import DeviceCopies
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import BLOCK, FileTree, RunningDigest, RunningTree, digest_range
from snapshot.tensors.memory import is_flat

if TYPE_CHECKING:
    from snapshot.tensors.device_digest import DeviceDigests

WORTH = 1 << 30
"""Bytes on one accelerator from which it digests them: the first launch of a process takes up to some seconds."""

Known = dict[int, tuple[str, bytes]]
"""The digest and the table of a file's extents, by their position."""


class _Range(NamedTuple):
    """An extent in an accelerator's memory."""

    address: int
    nbytes: int
    file: int
    """The id of the planned file."""
    position: int
    """The position among the file's extents."""


@dataclass
class _Running:
    """The launch of one device, and the memory that it uses."""

    work: DeviceDigests
    ranges: Sequence[_Range]
    event: Any
    held: HeldSlot


class ExtentDigests:
    """The digests of the planned extents of some files that are contiguous in an accelerator's memory."""

    def __init__(
        self, copies: DeviceCopies, leaves: Sequence[Leaf], files: Sequence[FilePlan], budget: MemoryBudget
    ) -> None:
        self._lock = threading.Lock()
        self._budget = budget
        self._known: defaultdict[int, Known] = defaultdict(dict)
        self._running: list[_Running] = []
        self._files = files
        """Kept, since their ids are keys."""
        ranges: defaultdict[torch.device, list[_Range]] = defaultdict(list)
        for file in files:
            for position, extent in enumerate(file.extents):
                leaf = leaves[extent.leaf]
                if not copies.has_stream(leaf.tensor.device) or not is_flat(leaf.tensor):
                    continue
                address, nbytes = leaf.tensor.data_ptr() + extent.start, extent.end - extent.begin
                ranges[leaf.tensor.device].append(_Range(address, nbytes, id(file), position))
        try:
            for device, theirs in ranges.items():
                if sum(each.nbytes for each in theirs) >= WORTH:
                    self._launch(copies, device, theirs)
        except BaseException:
            self.finish()
            raise

    def _launch(self, copies: DeviceCopies, device: torch.device, ranges: Sequence[_Range]) -> None:
        from snapshot.tensors.device_digest import DeviceDigests, is_usable, scratch_bytes, supports

        ranges = [each for each in ranges if supports(each.address, each.nbytes)]
        if not ranges:
            return
        with copies.stream(device):
            if not is_usable(device):
                return
        lengths = [each.nbytes for each in ranges]
        nbytes = scratch_bytes(lengths)
        held = self._budget.try_hold(nbytes, pinning=copies.pinning(self._budget, arena_bytes(nbytes)))
        if held is None:
            return
        try:
            if not held.slot.pinned:
                raise RuntimeError("no pinned memory for the table")
            with copies.stream(device):
                work = DeviceDigests([each.address for each in ranges], lengths, held.slot.tensor, device)
                work.launch()
            (event,) = copies.mark({device})
            self._running.append(_Running(work, ranges, event, held))
        except BaseException as error:  # compilers and drivers raise errors of any class
            try:
                await_events(copies.mark({device}))
            finally:
                held.release()
            if not isinstance(error, Exception):
                raise
            log.warning("%s: the host computes the digests: %s", device, error)

    def finish(self) -> None:
        """Wait for the digests. From then on, the tensors may change."""
        with self._lock:
            while self._running:
                running = self._running.pop()
                try:
                    await_events([running.event])
                    for each, found in zip(running.ranges, running.work.finish(), strict=True):
                        self._known[each.file][each.position] = found
                except RuntimeError as error:
                    log.warning("the host computes the digests: %s", error)
                finally:
                    running.held.release()

    def of_file(self, file: FilePlan) -> Known:
        """Return the digests of one file's extents."""
        self.finish()
        return self._known.get(id(file), {})


_EMPTY = digest_range(b"")


class FileDigests:
    """The digests of a file's extents, computed as its parts arrive in order."""

    def __init__(self, file: FilePlan, known: Known | None = None) -> None:
        self._file = file
        self._known = known or {}
        self.digests: list[str] = [_EMPTY if each.begin == each.end else "" for each in file.extents]
        self.tables: dict[int, bytes] = {}
        self.tree: RunningTree | None = None
        """The hashes of all bytes of the file, which its writer adds if the snapshot is signed."""
        self._running: RunningDigest | None = None
        self._compared = 0
        for index, (digest, table) in self._known.items():
            self.digests[index] = digest
            if table:
                self.tables[index] = table

    def digest_part(self, part: FilePart, shares: Sequence[Buffer]) -> None:
        """Add a part's share of each extent."""
        extents, digests, part_end = self._file.extents, self.digests, part.end
        for index, share in zip(range(part.first, part.last), shares, strict=True):
            if index in self._known:
                continue
            extent = extents[index]
            length = extent.end - extent.begin
            if self._running is None and length <= BLOCK and extent.begin >= part.begin and extent.end <= part_end:
                digests[index] = digest_range(share)
                continue
            if self._running is None:
                self._running = RunningDigest()
            self._running.update(memoryview(share).cast("B"))
            if extent.end <= part_end:
                digests[index], table = self._running.finish()
                self._running = None
                if table:
                    self.tables[index] = table

    def finish_tree(self) -> FileTree | None:
        """Return the hashes of the whole file, if there are any."""
        return None if self.tree is None else self.tree.finish()

    def has(self, part: FilePart) -> bool:
        """Return True if the digests of all extents in a part are known already."""
        return all(self.digests[part.first : part.last])

    def agree_with(self, expected: Sequence[tuple[str | None, bytes]]) -> bool:
        """Return True if the digests so far are the expected ones: a digest and a table for each extent."""
        while self._compared < len(self.digests) and (digest := self.digests[self._compared]):
            if digest != expected[self._compared][0]:
                return False
            self._compared += 1
        table = b"" if self._running is None else expected[self._compared][1]
        return not table or self._running is None or self._running.begins(table)
