"""The sources of a writer's parts. Tensors are staged: their bytes become buffers for a storage.

A CPU tensor's own memory is the buffer if possible. Otherwise the part is assembled in a slot of the arena, which is
held for it. Strided tensors and accelerator tensors always go through a slot, box by box, so no full copy is ever
allocated. `device_copies.py` has the copies from accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from snapshot.errors import SnapshotError
from snapshot.events import span
from snapshot.io.accelerators import await_events, await_host_copies
from snapshot.io.aio import in_thread
from snapshot.io.arena import Pinning, Slot
from snapshot.io.budget import HeldSlot, MemoryBudget
from snapshot.io.loop import LoopFuture
from snapshot.io.storage import Buffer
from snapshot.plan.layout import Extent, FilePart, FilePlan, cut_file
from snapshot.plan.plan_cache import cut_file_cached
from snapshot.save.device_copies import DeviceCopies, PartCopies
from snapshot.save.digests import WORTH, ExtentDigests, FileDigests
from snapshot.save.step_barrier import PendingCopy
from snapshot.state.changing import count_changes
from snapshot.state.leaves import Leaf
from snapshot.tensors.buffers import SHORT, copy_memory, copy_memory_short, view_memory, wrap_memory

DIGESTED = 4 << 20
"""Bytes of a part that is only digested."""


class StagedPart:
    """A part's bytes in host memory, and the memory to release after they are written."""

    __slots__ = ("_shares", "buffers", "events", "held")

    def __init__(self, buffers: list[Buffer], shares: list[Buffer] | None, held: HeldSlot | None) -> None:
        self.events: Sequence[Any] = ()
        """They occur when the bytes have arrived from accelerators."""
        self.buffers = buffers
        """The buffers to write, in order."""
        self._shares = shares
        self.held = held

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
        held, self.held = self.held, None
        self.buffers, self._shares = [], []
        try:
            self.arrive()  # a copy may still write to the slot
        finally:
            if held is not None:
                held.release()


class PartSource:
    """Where a writer gets the parts of its files: each part's bytes in host memory, in the order of each file.

    There are three kinds. Some read each part when the writer asks for it, and define `read_part`. `Stager` finds most
    parts in the application's memory. Others stage parts ahead, on their own: see `StagedAhead`.
    """

    waits = True
    """True if `fetch` waits for an event loop, so that a thread alone cannot call it."""
    part_bytes = 0
    """The wanted length of parts; 0 if the storage decides."""
    late: PendingCopy | None = None
    """The copies that go on after the call of a take."""
    work: LoopFuture[None] | None = None
    """The writing of a take in the background, once it is about to begin."""

    def cut(self, file: FilePlan, nbytes: int) -> list[FilePart]:
        """Return the parts of a file, of at most `nbytes`."""
        return cut_file_cached(file, nbytes)

    def digests(self, file: FilePlan) -> FileDigests:
        """Return an object that digests a file's parts as they arrive."""
        return FileDigests(file)

    async def ready(self, file: FilePlan, part: FilePart) -> None:
        """Wait for a part that is staged ahead. Its staging may need the memory of parts that are being written."""

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        """Return the slot bytes that a part takes; 0 if other memory suffices."""
        return part.end - part.begin

    def pinning(self, budget: MemoryBudget, total: int) -> Pinning | None:
        """Return the pinned memory to stage in, for an operation that copies `total` bytes; None if none is useful."""
        return None

    async def fetch(
        self, file: FilePlan, part: FilePart, held: HeldSlot | None, then: Callable[[StagedPart], object] | None = None
    ) -> StagedPart:
        """Return a part that is `ready`, and call `then` with it in a thread before.

        `held` is None if the part needs no slot. An error leaves it to the caller.
        """
        assert held is not None
        slot = held.slot
        await self.read_part(file, part, slot)
        staged = StagedPart([slot.view[: part.end - part.begin]], None, held)
        if then is not None:
            await in_thread(then, staged)
        return staged

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        """Fill a slot with the bytes of a part."""
        raise NotImplementedError(type(self).__name__)

    def stop(self, error: BaseException) -> None:
        """Stop staging ahead: whoever waits for a part gets the error."""

    def release(self) -> None:
        """Release the parts that were staged, and not fetched."""

    # The steps of a take

    def begin(
        self, parts: Callable[[FilePlan], Sequence[FilePart]], write: Callable[[], LoopFuture[None]]
    ) -> LoopFuture[None]:
        """Stage what must be staged before the call returns, and begin to write. `parts`: those of the writer."""
        return write()

    async def check(self) -> None:
        """Raise if the application changed its tensors before they were copied."""

    async def end(self) -> None:
        """Wait until nothing is staged any more, and release its memory."""

    def forget(self) -> None:
        """Release all tensors."""


Key = tuple[int, int]
"""A part that is staged ahead."""


def key_of(file: FilePlan, part: FilePart) -> Key:
    """Return the key of a part, among those of files that live as long as the key."""
    return id(file), part.begin


class StagedAhead(PartSource):
    """Parts that are staged before the writer asks for them: it only waits for those that are not there yet."""

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        return 0

    async def fetch(
        self, file: FilePlan, part: FilePart, held: HeldSlot | None, then: Callable[[StagedPart], object] | None = None
    ) -> StagedPart:
        staged = self.take(file, part)
        try:
            if then is not None:
                await in_thread(then, staged)
        except BaseException:
            staged.release()
            raise
        return staged

    def take(self, file: FilePlan, part: FilePart) -> StagedPart:
        """Return a part that is `ready`. The caller releases it."""
        raise NotImplementedError(type(self).__name__)


class _Watched(msgspec.Struct, gc=False):
    """The state of a late leaf when the call returned."""

    owner: torch.Tensor
    """The optimizer's tensor, whose versions count the changes."""
    version: int
    tensor: torch.Tensor
    """The application's tensor, which may get another memory."""
    storage: torch.UntypedStorage
    """The memory of the leaf, which is kept."""
    begin: int
    nbytes: int

    def is_changed(self, address: int) -> bool:
        """Return True if the values may have changed, or if the memory was replaced or freed."""
        return (
            count_changes(self.owner) != self.version
            or self.tensor.data_ptr() != address
            or self.storage.data_ptr() != self.begin
            or self.storage.nbytes() != self.nbytes
        )


class Stager(PartSource):
    """The tensors of one take, as a source of parts."""

    waits = False

    def __init__(self, leaves: Sequence[Leaf], *, copies: bool, parallel: bool = False) -> None:
        self.leaves: Sequence[Leaf] = leaves
        self.copies = copies
        """True if each part is copied as a whole: direct I/O needs aligned memory, and a take in the background bytes
        that stay as they were when the call returned. Otherwise CPU tensors are written from their own memory."""
        self.parallel = parallel
        """True while the call itself copies: torch's thread pool then has nothing else to do."""
        self._watched: dict[int, _Watched] = {}
        self._copying: AbstractContextManager[object] = nullcontext()
        self._ahead: ExtentDigests | None = None
        self.plain = [leaf.plain for leaf in leaves]
        await_host_copies(leaf.tensor for leaf in leaves if leaf.address)
        self._devices = DeviceCopies([leaf.tensor for leaf in leaves if not leaf.plain])

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        if self.copies:
            return part.end - part.begin
        plain, used = self.plain, 0
        for each in file.extents[part.first : part.last]:
            if not plain[each.leaf]:
                used = self._aligned(each, used) + min(each.end, part.end) - max(each.begin, part.begin)
        return used

    def pinning(self, budget: MemoryBudget, total: int) -> Pinning | None:
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

    def stage(self, file: FilePlan, part: FilePart, held: HeldSlot | None) -> StagedPart:
        """Bring a part into host memory. With a slot for the whole part, everything is copied."""
        with span("stage", bytes=part.end - part.begin, copied=held is not None):
            staged = self.begin_part(file, part, held)
            self.end_part(file, part, staged)
        return staged

    async def fetch(
        self, file: FilePlan, part: FilePart, held: HeldSlot | None, then: Callable[[StagedPart], object] | None = None
    ) -> StagedPart:
        """Stage a part in a thread, and call `then` with it there, while its bytes are in a CPU cache."""

        def stage() -> StagedPart:
            staged = self.stage(file, part, held)
            if then is not None:
                then(staged)
            return staged

        return await in_thread(stage)

    def begin_part(self, file: FilePlan, part: FilePart, held: HeldSlot | None) -> StagedPart:
        """Start to stage a part. Accelerators' bytes may arrive later: until `end_part`, it must not be released."""
        header = file.header[part.begin : part.end] if part.begin < len(file.header) else b""
        if held is None:
            return self._borrow(file, part, header)
        if not self._watched:
            return self._begin(file, part, header, held)
        with self._copying:  # memory that was freed must not be read, and none is freed meanwhile
            self._check(file, part)
            return self._begin(file, part, header, held)

    def _begin(self, file: FilePlan, part: FilePart, header: bytes, held: HeldSlot) -> StagedPart:
        copies = PartCopies(self._devices, held.slot)
        try:
            if self.copies:
                staged = self._copy(file, part, header, held, copies)
            else:
                staged = self._borrow(file, part, header, held, copies)
            staged.events = copies.end()
        except BaseException:
            copies.wait()
            raise
        return staged

    def end_part(self, file: FilePlan, part: FilePart, staged: StagedPart) -> None:
        """Wait until a part has arrived, and check that its tensors did not change meanwhile."""
        staged.arrive()
        if self._watched:
            self._check(file, part)

    def digest_file(
        self, file: FilePlan, budget: MemoryBudget, expected: Sequence[tuple[str | None, bytes]] | None = None
    ) -> FileDigests | None:
        """Digest the bytes of a file without writing them. Return None if they differ from the expected digests."""
        digests = self.digests(file)
        for part in cut_file(file, DIGESTED):
            if digests.has(part):
                continue
            needed = self.needs_slot(file, part)
            held = budget.hold_blocking(needed, pinning=self.pinning(budget, 0)) if needed else None
            try:
                digests.digest_part(part, self.stage(file, part, held).shares(file, part))
            finally:
                if held is not None:
                    held.release()
            if expected is not None and not digests.agree_with(expected):
                return None
        return None if expected is not None and not digests.agree_with(expected) else digests

    def copy_alone(self) -> None:
        """Copy with one thread from now on: torch's thread pool belongs to the application again."""
        self.parallel = False

    def digests(self, file: FilePlan) -> FileDigests:
        return FileDigests(file, self._ahead.of_file(file) if self._ahead is not None else {})

    def watch(self, late: bytes, owners: Sequence[torch.Tensor], pending: PendingCopy) -> None:
        """Require the marked leaves to be unchanged when they are staged: `owners` must still have their versions.

        Their memory is kept, even if the application gives its tensors another one.
        """
        leaves = list(self.leaves)
        numbers = list(compress(range(len(late)), late))
        tensors = [leaves[number].tensor for number in numbers]
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        begins = list(map(torch.UntypedStorage.data_ptr, storages))
        sizes = map(torch.UntypedStorage.nbytes, storages)
        watched = map(_Watched, owners, pending.versions, tensors, storages, begins, sizes)
        self._watched = dict(zip(numbers, watched, strict=True))
        self._copying = pending.protect(begins)
        for number in numbers:
            leaf = leaves[number]
            if not leaf.plain:  # the bytes of others are read by their address
                self._devices.keep_memory(leaf.tensor)
                leaves[number] = replace(leaf, tensor=leaf.tensor.detach())
        self.leaves = leaves

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
            if watched[extent.leaf].is_changed(leaf.address):
                path = leaf.path
                del leaf, leaves, watched  # the error must not keep the tensors alive
                raise SnapshotError(
                    f"{path}: changed outside an optimizer's step() before it was copied, so nothing was "
                    'committed; call wait_staged() before such changes, or use TakeOptions(staging="blocking")'
                )

    def _copy(self, file: FilePlan, part: FilePart, header: bytes, held: HeldSlot, copies: PartCopies) -> StagedPart:
        slot = held.slot
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
        return StagedPart([whole[: part_end - part_begin]], None, held)

    def _borrow(
        self,
        file: FilePlan,
        part: FilePart,
        header: bytes,
        held: HeldSlot | None = None,
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
            if begin == end:  # a part of nothing else has no slot
                shares.append(b"")
                continue
            assert held is not None
            assert copies is not None
            slot = held.slot
            used = self._aligned(extent, used)
            self._fill(leaves[extent.leaf], extent, begin, end, copies=copies, slot=slot, at=used)
            shares.append(slot.view[used : used + end - begin])
            used += end - begin
        return StagedPart([header, *shares] if header else list(shares), shares, held)

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
