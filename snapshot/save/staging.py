"""Staging: the bytes of one planned part, as buffers for a storage; copies and digests on accelerators."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch._utils import _unflatten_dense_tensors

from snapshot.errors import SnapshotError
from snapshot.events import log, span
from snapshot.io.accelerators import accelerator_of, await_events, await_host_copies, on_stream, side_stream
from snapshot.io.aio import in_thread
from snapshot.io.arena import Pinning, Slot, arena, arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Buffer
from snapshot.plan.layout import Extent, FilePart, FilePlan, cut_file
from snapshot.state.leaves import Leaf
from snapshot.state.model_state import count_changes
from snapshot.tensors.device_digest import DeviceDigests, is_usable, scratch_bytes, supports
from snapshot.tensors.digest import BLOCK, FileTree, RunningDigest, RunningTree, digest_range
from snapshot.tensors.geometry import boxes_of_range
from snapshot.tensors.memory import SHORT, copy_memory, copy_memory_short, is_flat, view_memory, wrap_memory

# Copies from accelerators to staging memory: on side streams, batched, and without memory of the device.
#
# Torch copies a strided tensor through a contiguous one, and a full device has no memory for that. Here the memory of
# such a tensor crosses in contiguous pieces, and the host arranges the elements.

_SMALL = 1 << 20
"""Tensors up to this size are copied several per call."""
_PIECE = 4 << 20
"""The maximum memory of a strided tensor that crosses at once, with its gaps."""


class DeviceCopies:
    """Copies from the accelerators of some tensors.

    They begin after all work that the application's current streams hold at this moment.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sides: dict[torch.device, Any] = {}
        for device in sorted({device for device in map(accelerator_of, tensors) if device is not None}, key=str):
            _refuse_capture(device)
            side = side_stream(device)
            if side is not None:
                side.wait_stream(torch.accelerator.current_stream(device))
                self._sides[device] = side

    def pinning(self, budget: MemoryBudget, total: int) -> Pinning | None:
        """Return the pinned memory to copy to, for an operation of `total` bytes; None without an accelerator."""
        device = next(iter(self._sides), None)
        return None if device is None else Pinning(device, budget.total, total)

    def has_stream(self, device: torch.device) -> bool:
        """Return True if tensors of a device are copied on a side stream."""
        return device in self._sides

    def keep_memory(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory during its copy, even if the application frees it."""
        side = self._sides.get(tensor.device)
        if side is not None:
            tensor.record_stream(side)

    def stream(self, device: torch.device) -> Any:
        """Return the context in which tensors of a device are copied."""
        side = self._sides.get(device)
        return contextlib.nullcontext() if side is None else on_stream(side)

    def mark(self, devices: set[torch.device]) -> list[Any]:
        """Return events that occur when the copies so far have ended."""
        return [self._sides[device].record_event() for device in devices if device in self._sides]


class PartCopies:
    """The copies of one part to its slot."""

    def __init__(self, copies: DeviceCopies, slot: Slot) -> None:
        self._copies = copies
        self._slot = slot
        self._batch: list[torch.Tensor] = []
        self._begin = self._end = 0
        """The range of the slot that the pending small tensors fill."""
        self._used: set[torch.device] = set()

    def copy(self, leaf: Leaf, start: int, nbytes: int, at: int) -> None:
        """Start the copy of some bytes of a leaf, in C order from byte `start` on, to byte `at` of the slot."""
        tensor = leaf.tensor
        if not is_flat(tensor):
            self._copy_strided(tensor.detach(), leaf, start, nbytes, at)
        elif nbytes == leaf.nbytes <= _SMALL and at % tensor.itemsize == 0:
            self._add(tensor, nbytes, at)
        else:
            with torch.no_grad(), self._on(tensor.device):
                source = tensor.detach().view(-1).view(torch.uint8)[start : start + nbytes]
                self._slot.tensor[at : at + nbytes].copy_(source, non_blocking=self._slot.pinned)

    def end(self) -> list[Any]:
        """Return events that occur when all bytes are in the slot."""
        self._flush()
        return self._copies.mark(self._used)

    def wait(self) -> None:
        """Wait for the copies that were started."""
        self._batch = []
        await_events(self.end())

    def _add(self, tensor: torch.Tensor, nbytes: int, at: int) -> None:
        """Collect a small tensor. Those that are adjacent, with one dtype and device, are copied together."""
        if self._batch:
            last = self._batch[-1]
            if self._end != at or last.dtype != tensor.dtype or last.device != tensor.device:
                self._flush()
        if not self._batch:
            self._begin = at
        self._batch.append(tensor)
        self._end = at + nbytes

    def _flush(self) -> None:
        """Copy the collected tensors: two calls, however many they are."""
        batch, self._batch = self._batch, []
        if batch:
            flat = self._slot.tensor[self._begin : self._end].view(batch[0].dtype)
            with torch.no_grad(), self._on(batch[0].device):
                targets = _unflatten_dense_tensors(flat, batch)  # type: ignore[no-untyped-call]
                torch._foreach_copy_(targets, batch, non_blocking=self._slot.pinned)

    def _copy_strided(self, tensor: torch.Tensor, leaf: Leaf, start: int, nbytes: int, at: int) -> None:
        itemsize = leaf.nbytes // tensor.numel()
        first, count = start // itemsize, nbytes // itemsize
        room = self._slot.tensor[at : at + nbytes]
        aligned = at % itemsize == 0
        values = room.view(tensor.dtype) if aligned else torch.empty(count, dtype=tensor.dtype)
        for position, box in boxes_of_range(leaf.shape, first, first + count):
            target = values[position - first : position - first + box.numel].view(box.sizes)
            self._gather(tensor[box.slices()], target)
        if not aligned:
            room.copy_(values.view(torch.uint8))

    def _gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a strided tensor to host memory, and return when it is there."""
        if source.is_cpu:
            with torch.no_grad():
                target.copy_(source)
            return
        for axis in range(source.dim()):  # an expanded axis repeats the same elements
            if source.stride(axis) == 0 and source.shape[axis] > 1:
                source = source.narrow(axis, 0, 1)
        span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        longest = max(range(source.dim()), key=lambda axis: (source.shape[axis] > 1) * source.stride(axis), default=0)
        if span * source.itemsize <= _PIECE or source.numel() == 1:
            self._gather_piece(source, target, span)
            return
        step = max(1, _PIECE // (source.stride(longest) * source.itemsize))
        step = min(step, -(-source.shape[longest] // 2))  # elements that overlap are fewer than their span
        for begin in range(0, source.shape[longest], step):
            length = min(step, source.shape[longest] - begin)
            self._gather(source.narrow(longest, begin, length), target.narrow(longest, begin, length))

    def _gather_piece(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        conj, neg = source.is_conj(), source.is_neg()
        held = torch.empty(span, dtype=source.dtype)
        with torch.no_grad(), self._on(source.device):
            source = source.conj() if conj else source
            source = torch._neg_view(source) if neg else source
            held.copy_(source.as_strided((span,), (1,)))
        values = held.as_strided(source.shape, source.stride(), 0)
        values = values.conj() if conj else values
        target.copy_(torch._neg_view(values) if neg else values)

    def _on(self, device: torch.device) -> Any:
        self._used.add(device)
        return self._copies.stream(device)


def _refuse_capture(device: torch.device) -> None:
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise SnapshotError(f"{device}: cannot take a snapshot while a graph is captured")


# Digests that accelerators compute from their own memory, before its bytes are copied.
#
# The host then has nothing to digest, and a restore also detects bytes that changed on their way to the host.

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
    slot: Slot


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
                if supports(address, nbytes):
                    ranges[leaf.tensor.device].append(_Range(address, nbytes, id(file), position))
        try:
            for device, theirs in ranges.items():
                if sum(each.nbytes for each in theirs) >= WORTH:
                    self._launch(copies, device, theirs)
        except BaseException:
            self.finish()
            raise

    def _launch(self, copies: DeviceCopies, device: torch.device, ranges: Sequence[_Range]) -> None:
        with copies.stream(device):
            if not is_usable(device):
                return
        lengths = [each.nbytes for each in ranges]
        nbytes = scratch_bytes(lengths)
        size = arena_bytes(nbytes)
        if not self._budget.try_acquire(size):
            return
        slot = None
        try:
            slot = arena().take(nbytes, pinning=copies.pinning(self._budget, size))
            if not slot.pinned:
                raise RuntimeError("no pinned memory for the table")
            with copies.stream(device):
                work = DeviceDigests([each.address for each in ranges], lengths, slot.tensor, device)
                work.launch()
            (event,) = copies.mark({device})
            self._running.append(_Running(work, ranges, event, slot))
        except BaseException as error:  # compilers and drivers raise errors of any class
            try:
                await_events(copies.mark({device}))
            finally:
                if slot is not None:
                    arena().give(slot)
                self._budget.release(size)
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
                    self._release(running.slot)

    def _release(self, slot: Slot) -> None:
        arena().give(slot)
        self._budget.release(slot.size)

    def of_file(self, file: FilePlan) -> Known:
        """Return the digests of one file's extents."""
        self.finish()
        return self._known.get(id(file), {})


# Staging: the bytes of one planned part, as buffers for a storage.
#
# A CPU tensor's own memory is the buffer if possible (`slot` is None). Otherwise the part is assembled in a slot of
# the arena. Strided tensors and accelerator tensors always go through a slot, box by box, so no full copy is ever
# allocated.

DIGESTED = 4 << 20
"""Bytes of a part that is only digested."""


class StagedPart:
    """A part's bytes in host memory, and the memory to release after they are written."""

    __slots__ = ("_budget", "_shares", "buffers", "events", "slot")

    def __init__(
        self, buffers: list[Buffer], shares: list[Buffer] | None, slot: Slot | None, budget: MemoryBudget | None
    ) -> None:
        self.events: Sequence[Any] = ()
        """They occur when the bytes have arrived from accelerators."""
        self.buffers = buffers
        """The buffers to write, in order."""
        self._shares = shares
        self.slot = slot
        self._budget = budget

    def shares(self, file: FilePlan, part: FilePart) -> Sequence[Buffer]:
        """Return the bytes of each extent in this part, in order, for digesting."""
        if self._shares is not None:
            return self._shares
        (whole,), begin, end = self.buffers, part.begin, part.end
        return [
            whole[max(each.begin - begin, 0) : min(each.end, end) - begin]
            for each in file.extents[part.first : part.last]
        ]

    def arrive(self) -> None:
        """Wait until the bytes are in host memory."""
        events, self.events = self.events, ()
        await_events(events)

    def release(self) -> None:
        """Release the memory. Later calls do nothing."""
        slot, self.slot = self.slot, None
        self.buffers, self._shares = [], []
        try:
            self.arrive()  # a copy may still write to the slot
        finally:
            if slot is not None and self._budget is not None:
                arena().give(slot)
                self._budget.release(slot.size)


class Stager:
    """The tensors of one take, as a source of parts."""

    fetches = False
    """True if parts are read from elsewhere by `fetch`, instead of staged."""
    waits = False
    """True if `fetch` waits for an event loop, so that a thread alone cannot call it."""

    def __init__(self, leaves: Sequence[Leaf], *, copies: bool, parallel: bool = False) -> None:
        self.leaves: Sequence[Leaf] = leaves
        self.copies = copies
        """True if every part is assembled in a slot: it must be aligned, or outlive the call."""
        self.parallel = parallel
        """True if the staging thread may copy with torch's thread pool."""
        self._watched: dict[int, tuple[torch.Tensor, int]] = {}
        self._ahead: ExtentDigests | None = None
        self.plain = [leaf.plain for leaf in leaves]
        await_host_copies(leaf.tensor for leaf in leaves if leaf.address)
        self._devices = DeviceCopies([leaf.tensor for leaf in leaves if not leaf.plain])

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        """Return the slot bytes that staging a part takes; 0 if its tensors' own memory suffices."""
        if self.copies:
            return part.end - part.begin
        plain, used = self.plain, 0
        for each in file.extents[part.first : part.last]:
            if not plain[each.leaf]:
                used = self._aligned(each, used) + min(each.end, part.end) - max(each.begin, part.begin)
        return used

    def pinning(self, budget: MemoryBudget, total: int) -> Pinning | None:
        """Return the pinned memory to stage in, for an operation that copies `total` bytes; None if none is useful."""
        return self._devices.pinning(budget, total)

    def digest_ahead(self, files: Sequence[FilePlan], budget: MemoryBudget) -> None:
        """Let accelerators digest what they hold of some files, where that is faster."""
        if self.pinning(budget, 0) is not None and sum(leaf.nbytes for leaf in self.leaves if not leaf.plain) >= WORTH:
            self._ahead = ExtentDigests(self._devices, self.leaves, files, budget)

    @contextmanager
    def digesting(self, files: Sequence[FilePlan], budget: MemoryBudget) -> Iterator[None]:
        """As `digest_ahead`, for a block that ends with `forget`. An error releases the memory of the digests."""
        self.digest_ahead(files, budget)
        try:
            yield
        except BaseException:
            self.end_digests()
            raise

    def end_digests(self) -> None:
        """Wait for the digests of accelerators: afterwards, the tensors may change."""
        if self._ahead is not None:
            self._ahead.finish()

    def stage(self, file: FilePlan, part: FilePart, slot: Slot | None, budget: MemoryBudget | None) -> StagedPart:
        """Bring a part into host memory. With a slot for the whole part, everything is copied."""
        with span("stage", bytes=part.end - part.begin, copied=slot is not None):
            staged = self.begin(file, part, slot, budget)
            self.end(file, part, staged)
        return staged

    def begin(self, file: FilePlan, part: FilePart, slot: Slot | None, budget: MemoryBudget | None) -> StagedPart:
        """Start to stage a part. The bytes of accelerators may arrive later; until `end`, it must not be released."""
        header = file.header[part.begin : part.end] if part.begin < len(file.header) else b""
        if slot is None:
            return self._borrow(file, part, header)
        if self._watched:  # memory that was freed must not be read
            self._check(file, part)
        copies = PartCopies(self._devices, slot)
        try:
            if self.copies:
                staged = self._copy(file, part, header, slot=slot, budget=budget, copies=copies)
            else:
                staged = self._borrow(file, part, header, slot=slot, budget=budget, copies=copies)
            staged.events = copies.end()
        except BaseException:
            copies.wait()
            raise
        return staged

    def end(self, file: FilePlan, part: FilePart, staged: StagedPart) -> None:
        """Wait until a part has arrived, and check that its tensors did not change meanwhile."""
        staged.arrive()
        if self._watched:
            self._check(file, part)

    async def fetch(self, file: FilePlan, part: FilePart, slot: Slot, budget: MemoryBudget) -> StagedPart:
        """Return a part whose bytes come from another storage."""
        return await in_thread(self.stage, file, part, slot, budget)

    def digest_file(
        self, file: FilePlan, budget: MemoryBudget, expected: Sequence[tuple[str | None, bytes]] | None = None
    ) -> FileDigests | None:
        """Digest the bytes of a file without writing them. Return None if they differ from the expected digests."""
        digests = self.digests(file)
        for part in cut_file(file, DIGESTED):
            if digests.has(part):
                continue
            needed = self.needs_slot(file, part)
            if needed:
                budget.acquire_blocking(arena_bytes(needed))
            slot = None
            try:
                slot = arena().take(needed, pinning=self.pinning(budget, 0)) if needed else None
                staged = self.stage(file, part, slot, budget)
            except BaseException:
                if slot is not None:
                    arena().give(slot)
                if needed:
                    budget.release(arena_bytes(needed))
                raise
            try:
                digests.digest_part(part, staged.shares(file, part))
            finally:
                staged.release()
            if expected is not None and not digests.agree_with(expected):
                return None
        return None if expected is not None and not digests.agree_with(expected) else digests

    def copy_alone(self) -> None:
        """Copy with one thread from now on: torch's thread pool belongs to the application again."""
        self.parallel = False

    def digests(self, file: FilePlan) -> FileDigests:
        """Return an object that digests a file's parts as they arrive."""
        return FileDigests(file, self._ahead.of_file(file) if self._ahead is not None else {})

    def watch(self, late: bytes, owners: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        """Require the marked leaves to be unchanged when they are staged: `owners` must still have these `versions`."""
        for leaf in compress(self.leaves, late):
            self._devices.keep_memory(leaf.tensor)
        watched = zip(owners, versions, strict=True)
        self._watched = dict(zip(compress(range(len(late)), late), watched, strict=True))

    def forget(self) -> None:
        """Release all tensors. The result of a concurrent staging thread is discarded."""
        self.end_digests()
        self._watched = {}
        self.leaves = ()

    def _check(self, file: FilePlan, part: FilePart) -> None:
        leaves = self.leaves  # read first: `forget` clears it last
        watched = self._watched
        for extent in file.extents[part.first : part.last]:
            if extent.leaf not in watched:
                continue
            leaf = leaves[extent.leaf]
            owner, version = watched[extent.leaf]
            if count_changes(owner) != version or leaf.tensor.data_ptr() != leaf.address:
                path = leaf.path
                del leaf, leaves, owner, watched  # the error must not keep the tensors alive
                raise SnapshotError(
                    f"{path}: changed outside an optimizer's step() before it was copied, so nothing was "
                    'committed; call wait_staged() before such changes, or use staging="blocking"'
                )

    def _copy(
        self,
        file: FilePlan,
        part: FilePart,
        header: bytes,
        *,
        slot: Slot,
        budget: MemoryBudget | None,
        copies: PartCopies,
    ) -> StagedPart:
        if header:
            slot.view[: len(header)] = header
        base, whole = slot.address - part.begin, slot.view
        leaves, plain = self.leaves, self.plain
        part_begin, part_end = part.begin, part.end
        for extent in file.extents[part.first : part.last]:
            begin, end = extent.begin, extent.end
            if begin >= part_begin and end <= part_end and plain[extent.leaf]:
                length = end - begin
                if length <= SHORT:
                    copy_memory_short(base + begin, leaves[extent.leaf].address + extent.start, length)
                    continue
            begin, end = max(begin, part_begin), min(end, part_end)
            self._fill(leaves[extent.leaf], extent, begin, end, copies=copies, slot=slot, at=begin - part_begin)
        return StagedPart([whole[: part_end - part_begin]], None, slot, budget)

    def _borrow(
        self,
        file: FilePlan,
        part: FilePart,
        header: bytes,
        *,
        slot: Slot | None = None,
        budget: MemoryBudget | None = None,
        copies: PartCopies | None = None,
    ) -> StagedPart:
        shares: list[Buffer] = []
        used = 0
        leaves, plain = self.leaves, self.plain
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            if plain[extent.leaf]:
                address = leaves[extent.leaf].address + extent.start + begin - extent.begin
                shares.append(wrap_memory(address, end - begin))
                continue
            assert slot is not None
            assert copies is not None
            used = self._aligned(extent, used)
            self._fill(leaves[extent.leaf], extent, begin, end, copies=copies, slot=slot, at=used)
            shares.append(slot.view[used : used + end - begin])
            used += end - begin
        return StagedPart([header, *shares] if header else list(shares), shares, slot, budget)

    def _aligned(self, extent: Extent, at: int) -> int:
        """Return the next position in a slot at which elements of an extent's dtype may begin."""
        itemsize = self.leaves[extent.leaf].tensor.itemsize
        return -(-at // itemsize) * itemsize

    def _fill(
        self, leaf: Leaf, extent: Extent, begin: int, end: int, *, copies: PartCopies, slot: Slot, at: int
    ) -> None:
        """Copy the bytes [begin, end) of the file, which belong to one extent, to a slot."""
        if begin == end:
            return
        start = extent.start + begin - extent.begin
        if not self.plain[extent.leaf]:
            copies.copy(leaf, start, end - begin, at)
            return
        source = leaf.address + start
        if not self.parallel or end - begin < 1 << 20:
            copy_memory(slot.address + at, source, end - begin)
        else:  # torch copies with its thread pool
            slot.tensor[at : at + end - begin].copy_(
                torch.frombuffer(view_memory(source, end - begin), dtype=torch.uint8)
            )


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
