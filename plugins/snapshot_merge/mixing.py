"""Tensors that are computed from elements of several sources: each part is read from all of them and mixed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.io.aio import gather_limited, in_thread, run_inline, shielded
from snapshot.io.arena import Slot
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all
from snapshot.loading.open import Opened
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest.entries import AnyTensor
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.state.leaves import Leaf
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.transform.sources import CheckpointSource, LeafReads

_ALIGNED = 64
_BLOCK = 256 << 10
"""Elements. Batches end at multiples of it, so that no block of a digest is read twice."""
_AT_ONCE = 2
"""Batches of one part that are read and mixed at once."""
_BATCH = 2 << 20
"""Elements of a batch, if the budget allows."""


class Piece(msgspec.Struct, gc=False):
    """A run of elements of one leaf, and the position of its bytes in the slot of the part."""

    leaf: int
    first: int
    count: int
    at: int


class InputRun(NamedTuple):
    """Elements of a source that a piece needs. There may be none."""

    first: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.itemsize


class MixedSource(CheckpointSource, ABC):
    """A checkpoint's leaves, some of them mixed from elements of several sources. Subclasses say how."""

    def __init__(
        self,
        opened: Opened,
        leaves: Sequence[Leaf],
        origins: Sequence[Any],
        how: LeafReads,
        *,
        sources: Sequence[CheckpointSource],
        scratch: MemoryBudget,
    ) -> None:
        """Store the sources. Each has a leaf of the same number for each mixed one.

        `scratch`: the memory for their elements. See `CheckpointSource` for the others.
        """
        super().__init__(opened, leaves, origins, how)
        self._scratch = scratch
        self._sources = sources
        self._blocking = all(source.is_blocking for source in sources)

    @abstractmethod
    def is_mixed(self, leaf: int) -> bool:
        """Return True if a leaf is mixed. All other leaves are read from the checkpoint."""

    @abstractmethod
    def inputs_of(self, piece: Piece) -> Sequence[InputRun]:
        """Return the elements of each source that a piece needs."""

    @abstractmethod
    def mix(self, piece: Piece, held: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Compute a piece from the bytes of its inputs."""

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        """Mix a part into a slot, and read the rest of it from the checkpoint."""
        batches = list(self._batches(file, part))
        await gather_limited(batches, lambda batch: self._merge(batch, slot), _AT_ONCE)
        await super().read_part(file, part, slot)
        self.bytes_read += sum(source.bytes_read for source in self._sources)
        for source in self._sources:
            source.bytes_read = 0

    async def _want(
        self, read_plan: ReadPlan, index: int, entry: AnyTensor, first: int, **place: Any
    ) -> list[Callable[[], object]]:
        if self.is_mixed(index):
            return []  # it is in the slot already
        return await super()._want(read_plan, index, entry, first, **place)

    def _batches(self, file: FilePlan, part: FilePart) -> Iterator[list[Piece]]:
        """Yield the mixed runs of a part, a few at a time, so that two batches fit into the memory for them."""
        most = self._scratch.limit // _AT_ONCE
        batch: list[Piece] = []
        held = count = 0
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            if begin >= end or not self.is_mixed(extent.leaf):
                continue
            itemsize = ITEMSIZE[self.leaves[extent.leaf].dtype]
            first = (extent.start + begin - extent.begin) // itemsize
            last = first + (end - begin) // itemsize
            at = begin - part.begin
            step = self._step(extent.leaf, most)
            while first < last:
                stop = min(last, (first // step + 1) * step)
                piece = Piece(extent.leaf, first, stop - first, at)
                size = _measure(self.inputs_of(piece))
                if batch and (held + size > most or count + piece.count > _BATCH):
                    yield batch
                    batch, held, count = [], 0, 0
                batch.append(piece)
                held, count = held + size, count + piece.count
                at += piece.count * itemsize
                first = stop
        if batch:
            yield batch

    def _step(self, leaf: int, most: int) -> int:
        """Return the elements of a batch of one leaf: as many blocks as fit, but at least one."""
        step = _BATCH
        while step > _BLOCK and _measure(self.inputs_of(Piece(leaf, 0, step, 0))) > most:
            step -= _BLOCK
        return step

    async def _merge(self, batch: Sequence[Piece], slot: Slot) -> None:
        """Mix pieces into the slot of a part."""

        def mix(piece: Piece, held: Sequence[torch.Tensor]) -> None:
            dtype = BY_NAME[self.leaves[piece.leaf].dtype]
            self.mix(piece, held, slot.tensor[piece.at : piece.at + piece.count * dtype.itemsize].view(dtype))

        await self._with_inputs(batch, mix)

    async def _with_inputs(self, batch: Sequence[Piece], work: Callable[[Piece, Sequence[torch.Tensor]], None]) -> None:
        """Read the inputs of pieces from all sources, and call a function with the bytes of each, in a thread."""
        inputs = [self.inputs_of(piece) for piece in batch]
        files: list[list[Extent]] = [[] for _ in self._sources]
        places: list[list[slice]] = []
        position = 0
        for piece, runs in zip(batch, inputs, strict=True):
            places.append([])
            for extents, run in zip(files, runs, strict=True):
                end = position + run.nbytes
                if run.numel:
                    extents.append(Extent(piece.leaf, position, end, run.first * run.itemsize))
                places[-1].append(slice(position, end))
                position = -(-end // _ALIGNED) * _ALIGNED
        async with self._scratch.slot(position) as scratch:

            def read(number: int) -> Coroutine[Any, Any, None]:
                file = FilePlan(b"", tuple(files[number]), position)
                part = FilePart(0, position, 0, len(file.extents))
                return self._sources[number].read_part(file, part, scratch)

            if await self._is_blocking(files):
                await in_thread(self._read_all, read, batch, places, scratch, work)
                return
            reads = [asyncio.create_task(read(number)) for number in range(len(self._sources))]
            try:
                await asyncio.gather(*reads)
            except BaseException:
                await shielded(cancel_all(reads))
                raise
            await in_thread(_work_all, batch, places, scratch, work)

    async def _is_blocking(self, files: Sequence[Sequence[Extent]]) -> bool:
        """Return True if one thread can read a batch from all sources, which is faster than many short tasks."""
        if not self._blocking:
            return False
        needed = {(number, extent.leaf) for number, extents in enumerate(files) for extent in extents}
        return all([await self._sources[number].reads_parts(leaf) for number, leaf in needed])

    def _read_all(
        self,
        read: Callable[[int], Coroutine[Any, Any, None]],
        batch: Sequence[Piece],
        places: Sequence[Sequence[slice]],
        scratch: Slot,
        work: Callable[[Piece, Sequence[torch.Tensor]], None],
    ) -> None:
        for number in range(len(self._sources)):
            run_inline(read, number)
        _work_all(batch, places, scratch, work)


def _work_all(
    batch: Sequence[Piece],
    places: Sequence[Sequence[slice]],
    scratch: Slot,
    work: Callable[[Piece, Sequence[torch.Tensor]], None],
) -> None:
    for piece, held in zip(batch, places, strict=True):
        work(piece, [scratch.tensor[place] for place in held])


def _measure(runs: Sequence[InputRun]) -> int:
    """Return the memory of a piece's inputs."""
    return sum(run.nbytes + _ALIGNED for run in runs)
