"""Tensors of another checkpoint as a source of parts: what is written is read just before, within the budget."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from snapshot.aio import in_thread
from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.formats.embedded_tensors import EmbeddedLayout, is_streamed
from snapshot.formats.foreign import is_packed
from snapshot.load.fetch import raise_faults
from snapshot.load.read_plan import MOST_TIMES, ROOM, ReadPlan
from snapshot.load.reader import Reader
from snapshot.load.requests import ReadRequest, request_all
from snapshot.manifest.document import Document
from snapshot.manifest.entries import TENSORS, AnyTensor
from snapshot.plan.layout import FilePart, FilePlan
from snapshot.progress import unmetered
from snapshot.runtime.arena import Slot
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.session import Session
from snapshot.save.staging import StagedPart, Stager
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.geometry import Box, boxes_of_range
from snapshot.tensors.strides import find_enclosing_tensor

Made = Callable[[], bytes]
"""What makes bytes that depend on those before them in their file."""


def expect_room(document: Document, leaves: Sequence[Leaf], origins: Sequence[Any]) -> None:
    """Raise if tensors would be written with far more bytes than the files have: views may repeat a few of them, and
    compressed ones may stand for any number."""
    stored = sum(file.size for file in document.files.values())
    most, total = ROOM + MOST_TIMES * stored, 0
    for leaf, origin in zip(leaves, origins, strict=True):
        if isinstance(origin, TENSORS):
            total += math.prod(origin.shape) * ITEMSIZE[origin.dtype]
            if total > most:
                raise CorruptSnapshotError(
                    f"{leaf.path}: the tensors would take more than {most:,} bytes, and the files have {stored:,}; "
                    "convert fewer with select=[...], or restore them into tensors and take a snapshot"
                )


class CheckpointStager(Stager):
    """Leaves whose tensors are read from a checkpoint, part by part; or whose bytes are given, or made in time."""

    fetches = waits = True

    def __init__(
        self,
        session: Session,
        document: Document,
        leaves: Sequence[Leaf],
        origins: Sequence[Any],
        *,
        verify: bool,
        orders: dict[int, tuple[int, ...]] | None = None,
        sums: dict[int, int] | None = None,
    ) -> None:
        """`origins`: of each leaf the entry of its tensor; bytes, or what makes them, otherwise.

        `orders`: how a leaf's dimensions are those of its entry, where they are permuted. `sums`: where the CRC32
        of each leaf's bytes is made, as they come by.
        """
        super().__init__([], copies=True)
        self.leaves = leaves
        self._session = session
        self._document = document
        self._origins = origins
        self._verify = verify
        self._orders = orders or {}
        self._sums = sums
        self._held: dict[int, torch.Tensor] = {}
        """Tensors that are read once, whole: see `_whole`."""
        self._left: dict[int, int] = {}
        """How many of their elements are not yet where they belong."""
        self.bytes_read = 0
        self._used: list[tuple[int, int]] = []
        self._making = asyncio.Lock()
        self._parted: set[int] = set()
        """Leaves that are read part by part."""

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        return part.end - part.begin

    async def fetch(self, file: FilePlan, part: FilePart, slot: Slot, budget: MemoryBudget) -> StagedPart:
        """Read a part into a slot. The parts of one file come in order."""
        if part.begin < len(file.header):
            header = file.header[part.begin : part.end]
            slot.view[: len(header)] = header
        read_plan = ReadPlan(self._document.files)
        copies: list[Callable[[], object]] = []
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            if begin == end:
                continue
            at, origin = begin - part.begin, self._origins[extent.leaf]
            first = extent.start + begin - extent.begin
            if callable(origin):
                continue  # it depends on the bytes before it
            if isinstance(origin, bytes):
                slot.view[at : at + end - begin] = origin[first : first + end - begin]
            else:
                copies += await self._want(read_plan, extent.leaf, origin, first, nbytes=end - begin, slot=slot, at=at)
        if read_plan.requests:
            await self._read(read_plan)
        used, self._used = self._used, []
        await in_thread(self._finish, read_plan, copies, file, part, slot)
        for index, count in used:  # elements of tensors that are held, which are where they belong
            self._left[index] -= count
            if not self._left[index]:
                del self._held[index]
        return StagedPart([slot.view[: part.end - part.begin]], None, slot, budget)

    async def _want(
        self, read_plan: ReadPlan, index: int, entry: AnyTensor, first: int, *, nbytes: int, slot: Slot, at: int
    ) -> list[Callable[[], object]]:
        """Want a range of a tensor's bytes in the slot; what has to be copied there afterwards."""
        leaf = self.leaves[index]
        dtype = BY_NAME[leaf.dtype]
        itemsize = dtype.itemsize
        staged = slot.tensor[at : at + nbytes].view(dtype)
        order = self._orders.get(index) or tuple(range(len(leaf.shape)))
        whole = await self._whole(index, entry)
        begin, end = first // itemsize, (first + nbytes) // itemsize
        copies: list[Callable[[], object]] = []
        for position, box in boxes_of_range(leaf.shape, begin, end):
            target = staged[position - begin : position - begin + box.numel].view(box.sizes)
            back = [order.index(axis) for axis in range(len(order))]
            target = target.permute(back)
            there = Box(tuple(box.offsets[axis] for axis in back), tuple(box.sizes[axis] for axis in back))
            if whole is None:
                read_plan.into_box(leaf.path, entry, there, target)
            else:
                copies.append(partial(target.copy_, whole[there.slices()]))
        if whole is not None:
            self._used.append((index, end - begin))
        return copies

    async def _whole(self, index: int, entry: AnyTensor) -> torch.Tensor | None:
        """All of a tensor that would be read over and over if it were read part by part; None for all others."""
        async with self._making:  # several files may have parts of it
            if index in self._parted:
                return None
            if index not in self._held:
                if not await self._is_scattered(index, entry):
                    self._parted.add(index)
                    return None
                held = await in_thread(self._room, entry)
                read_plan = ReadPlan(self._document.files)
                read_plan.into(self.leaves[index].path, entry, held)
                await self._read(read_plan)
                await in_thread(read_plan.finish)
                self._held[index] = held
                self._left[index] = math.prod(entry.shape)
            return self._held[index]

    def _room(self, entry: AnyTensor) -> torch.Tensor:
        """Memory for all of a tensor; of a long one the system may write what is not needed now to a file."""
        dtype, count = BY_NAME[entry.dtype], math.prod(entry.shape)
        nbytes = count * dtype.itemsize
        if nbytes <= self._session.budget.limit // 4:
            return torch.empty(entry.shape, dtype=dtype)
        try:
            with tempfile.NamedTemporaryFile(prefix="snapshot-convert-") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a mapping for which there is no room kills the process
                return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(entry.shape)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: no room for a tensor of {nbytes:,} bytes, which has to be read whole; set "
                f"TMPDIR to a larger folder: {error}"
            ) from error

    async def _is_scattered(self, index: int, entry: AnyTensor) -> bool:
        """Whether a part of a long tensor, in the order in which it is written, lies all over what holds it."""
        pieces = [stored for _, stored in entry.pieces()]
        if sum(stored.nbytes for stored in pieces) <= BLOCK:
            return False
        if index in self._orders or any(is_streamed(stored) for stored in pieces):
            return True
        packed = [stored for stored in pieces if is_packed(stored) and stored.nbytes > BLOCK]
        layouts: list[tuple[tuple[int, ...], EmbeddedLayout]] = []
        requests = []
        for stored in packed:
            request = request_all(self.leaves[index].path, stored)
            request.opens = partial(_note_layout, layouts, stored.shape)
            requests.append(request)
        if requests:  # only what says where they are is read
            await self._reader().read(requests, unmetered)
        return any(_is_odd(shape, layout.strides) for shape, layout in layouts)

    async def _read(self, read_plan: ReadPlan) -> None:
        result = await self._reader().read(read_plan.requests, unmetered)
        self.bytes_read += result.bytes_read
        raise_faults(self._session, result)

    def _reader(self) -> Reader:
        session = self._session
        return Reader(session.storage, session.budget, verify=self._verify, wanted_part=session.settings.part_bytes)

    def _finish(
        self, read_plan: ReadPlan, copies: list[Callable[[], object]], file: FilePlan, part: FilePart, slot: Slot
    ) -> None:
        read_plan.finish()
        for copy in copies:
            copy()
        for extent in file.extents[part.first : part.last]:
            begin, end = max(extent.begin, part.begin), min(extent.end, part.end)
            at, origin = slice(begin - part.begin, end - part.begin), self._origins[extent.leaf]
            if callable(origin):
                first = extent.start + begin - extent.begin
                slot.view[at] = origin()[first : first + end - begin]
            elif self._sums is not None and not isinstance(origin, bytes):
                self._sums[extent.leaf] = zlib.crc32(slot.view[at], self._sums.get(extent.leaf, 0))


def _note_layout(
    layouts: list[tuple[tuple[int, ...], EmbeddedLayout]], shape: tuple[int, ...], layout: EmbeddedLayout
) -> list[ReadRequest]:
    """Note where a tensor is, and want nothing of it."""
    layouts.append((shape, layout))
    return []


def _is_odd(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a view does not lie in the order of its dimensions, or overlaps itself."""
    found = find_enclosing_tensor(shape, strides)
    return found is None or [axis for axis in found.order if shape[axis] > 1] != sorted(
        axis for axis in found.order if shape[axis] > 1
    )
