"""Tensors of several checkpoints as one source of parts: each part is read from all of them and mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from snapshot.aio import gather_limited, in_thread, run_inline, shielded
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest.entries import AnyTensor
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.runtime.arena import Slot
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.loop import cancel_all
from snapshot.save.staging import StagedPart
from snapshot.state.leaves import Leaf
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.verbs.checkpoint_source import CheckpointStager
from snapshot.verbs.diff_bytes import Side
from snapshot.verbs.merge_plan import Group, MergePlan
from snapshot.verbs.mixing import Mix

_ALIGNED = 64
_BLOCK = 256 << 10
"""Elements. Batches end at multiples of it, so that no block of a digest is read twice."""
_AT_ONCE = 2
"""Batches of one part that are read and mixed at once."""
_BATCH = 2 << 20
"""Elements of a batch, if the budget allows."""


class _Piece(msgspec.Struct, gc=False):
    """A run of elements of one leaf, and the position of its bytes in the slot of the part."""

    leaf: int
    first: int
    count: int
    at: int


class MergeStager(CheckpointStager):
    """The first checkpoint's leaves, with the values that the mix of all checkpoints gives."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        origins: Sequence[Any],
        *,
        sides: Sequence[Side],
        plan: MergePlan,
        mix: Mix,
        scratch: MemoryBudget,
        verify: bool,
        orders: dict[int, tuple[int, ...]] | None = None,
        sums: dict[int, int] | None = None,
    ) -> None:
        """`scratch`: the memory for elements of all checkpoints. See `CheckpointStager` for the others."""
        first = sides[0]
        super().__init__(first.session, first.document, leaves, origins, verify=verify, orders=orders, sums=sums)
        self._groups: list[Group | None] = [plan.group(origin) for origin in origins]
        self._mix = mix
        self._scratch = scratch
        self._blocking = all(side.session.storage.capabilities.blocking for side in sides)
        self._sources = []
        for number, side in enumerate(sides):
            own = [group.entries[number] if group is not None else None for group in self._groups]
            stored = [
                leaf if entry is None else msgspec.structs.replace(leaf, dtype=entry.dtype)
                for leaf, entry in zip(leaves, own, strict=True)
            ]
            self._sources.append(
                CheckpointStager(side.session, side.document, stored, own, verify=verify, orders=orders)
            )

    async def fetch(self, file: FilePlan, part: FilePart, slot: Slot, budget: MemoryBudget) -> StagedPart:
        """Mix a part into a slot, and read the rest of it from the first checkpoint."""
        batches = list(self._batches(file, part))
        await gather_limited(batches, lambda batch: self._merge(batch, slot), _AT_ONCE)
        staged = await super().fetch(file, part, slot, budget)
        self.bytes_read += sum(source.bytes_read for source in self._sources)
        for source in self._sources:
            source.bytes_read = 0
        return staged

    async def _want(
        self, read_plan: ReadPlan, index: int, entry: AnyTensor, first: int, **place: Any
    ) -> list[Callable[[], object]]:
        if self._groups[index] is not None:
            return []  # it is in the slot already
        return await super()._want(read_plan, index, entry, first, **place)

    def _itemsizes(self, leaf: int) -> list[int]:
        group = self._groups[leaf]
        assert group is not None
        return [ITEMSIZE[entry.dtype] for entry in group.entries]

    def _batches(self, file: FilePlan, part: FilePart) -> Iterator[list[_Piece]]:
        """Yield the mixed runs of a part, a few at a time, so that two batches fit into the memory for them."""
        most = self._scratch.limit // _AT_ONCE
        batch: list[_Piece] = []
        held = count = 0
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            if begin >= end or self._groups[extent.leaf] is None:
                continue
            itemsize = ITEMSIZE[self.leaves[extent.leaf].dtype]
            width = sum(self._itemsizes(extent.leaf))
            first = (extent.start + begin - extent.begin) // itemsize
            last = first + (end - begin) // itemsize
            at = begin - part.begin
            step = max(1, min(_BATCH, most // width) // _BLOCK) * _BLOCK
            while first < last:
                stop = min(last, (first // step + 1) * step)
                size = (stop - first) * width + _ALIGNED * len(self._sources)
                if batch and (held + size > most or count + stop - first > _BATCH):
                    yield batch
                    batch, held, count = [], 0, 0
                batch.append(_Piece(extent.leaf, first, stop - first, at))
                held, count = held + size, count + stop - first
                at += (stop - first) * itemsize
                first = stop
        if batch:
            yield batch

    async def _merge(self, batch: Sequence[_Piece], slot: Slot) -> None:
        """Read runs of elements from all checkpoints, and mix them into the slot of a part."""
        position = 0
        files: list[list[Extent]] = [[] for _ in self._sources]
        for piece in batch:
            for extents, itemsize in zip(files, self._itemsizes(piece.leaf), strict=True):
                length = piece.count * itemsize
                extents.append(Extent(piece.leaf, position, position + length, piece.first * itemsize))
                position += -(-length // _ALIGNED) * _ALIGNED
        async with self._scratch.slot(position) as scratch:

            def read(number: int) -> Coroutine[Any, Any, StagedPart]:
                file = FilePlan(b"", tuple(files[number]), position)
                part = FilePart(0, position, 0, len(file.extents))
                return self._sources[number].fetch(file, part, scratch, self._scratch)

            if await self._is_blocking(batch):
                await in_thread(self._read_and_mix, read, batch, files, scratch, slot)
                return
            reads = [asyncio.create_task(read(number)) for number in range(len(self._sources))]
            try:
                await asyncio.gather(*reads)
            except BaseException:
                await shielded(cancel_all(reads))
                raise
            await in_thread(self._mix_all, batch, files, scratch, slot)

    async def _is_blocking(self, batch: Sequence[_Piece]) -> bool:
        """Return True if one thread can read a batch from all checkpoints, which is faster than many short tasks."""
        if not self._blocking:
            return False
        leaves = {piece.leaf for piece in batch}
        return all([await source.reads_parts(leaf) for source in self._sources for leaf in leaves])

    def _read_and_mix(
        self,
        read: Callable[[int], Coroutine[Any, Any, StagedPart]],
        batch: Sequence[_Piece],
        files: Sequence[Sequence[Extent]],
        scratch: Slot,
        slot: Slot,
    ) -> None:
        for number in range(len(self._sources)):
            run_inline(read, number)
        self._mix_all(batch, files, scratch, slot)

    def _mix_all(self, batch: Sequence[_Piece], files: Sequence[Sequence[Extent]], scratch: Slot, slot: Slot) -> None:
        for piece, *extents in zip(batch, *files, strict=True):
            group = self._groups[piece.leaf]
            assert group is not None
            held = [
                scratch.tensor[extent.begin : extent.end].view(BY_NAME[entry.dtype])
                for extent, entry in zip(extents, group.entries, strict=True)
            ]
            dtype = BY_NAME[self.leaves[piece.leaf].dtype]
            target = slot.tensor[piece.at : piece.at + piece.count * dtype.itemsize].view(dtype)
            self._mix.apply(held, group.wide, target)
