"""Comparison of tensor bytes: two checkpoints are read side by side, part by part within the budget.

Tensors may be split, packed or sharded differently on each side.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from snapshot.aio import in_thread, shielded
from snapshot.distributed.exchange import Exchange
from snapshot.errors import SnapshotError
from snapshot.loading.open import expect_files
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document
from snapshot.manifest.validate import check_tensor, find_locations
from snapshot.plan.layout import PAGE, Extent, FilePart, FilePlan, cut_file
from snapshot.progress import Meter
from snapshot.runtime.arena import Slot, arena, arena_bytes
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.loop import cancel_all, in_own_thread
from snapshot.runtime.session import Session
from snapshot.save.joint_work import while_all_go_on
from snapshot.state.leaves import Leaf
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.verbs.checkpoint_source import CheckpointStager
from snapshot.verbs.diff_stats import Numbers, NumbersState
from snapshot.verbs.joint_call import share_whole

LANES = 2
"""Parts that are read and compared at once."""
LARGEST_PART = 32 << 20


@dataclass(frozen=True)
class Side:
    """One of two checkpoints."""

    session: Session
    document: Document


@dataclass
class Pair:
    """Two tensors of one shape, or the bytes of two objects."""

    name: str
    a: Any
    b: Any
    dtype: str
    """The dtype of the comparison."""
    numbers: Numbers | None = None
    differs: bool = False
    cast: bool = False
    """True if the dtypes differ, so that the tensors differ in any case."""

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.a.shape)) * ITEMSIZE[self.dtype]


def as_bytes(stored: e.ObjectEntry) -> e.TensorEntry:
    """Return the bytes of an object as a byte tensor."""
    return e.TensorEntry(stored.location, stored.byte_range, "uint8", (stored.nbytes,), stored.digest, stored.blocks)


class PairResult(msgspec.Struct, array_like=True):
    """The result of one pair."""

    differs: bool
    numbers: NumbersState | None


class RankPairs(msgspec.Struct, array_like=True):
    """The results of pairs, by their numbers, and the bytes that were read for them."""

    nbytes: int
    pairs: dict[int, PairResult]


async def compare_pairs(
    a: Side, b: Side, pairs: Sequence[Pair], budget: MemoryBudget, meter: Meter, *, exchange: Exchange
) -> int:
    """Compare pairs. Each rank reads a share of them. Return the number of bytes that all ranks read."""
    numbers = share_whole(exchange, range(len(pairs)), [pair.nbytes for pair in pairs])[exchange.rank]
    nbytes = await while_all_go_on(exchange, _compare_share(a, b, [pairs[n] for n in numbers], budget, meter))
    if exchange.alone:
        return nbytes
    mine = RankPairs(
        nbytes,
        {n: PairResult(pairs[n].differs, None if (held := pairs[n].numbers) is None else held.state) for n in numbers},
    )

    def lead(results: list[RankPairs]) -> RankPairs:
        joined = {number: result for each in results for number, result in each.pairs.items()}
        return RankPairs(sum(each.nbytes for each in results), joined)

    found: RankPairs = await in_own_thread(exchange.agree, mine, lead, RankPairs, RankPairs)
    for number, result in found.pairs.items():
        pair = pairs[number]
        pair.differs = result.differs
        if pair.numbers is not None and result.numbers is not None:
            pair.numbers.state = result.numbers
    return found.nbytes


async def _compare_share(a: Side, b: Side, pairs: Sequence[Pair], budget: MemoryBudget, meter: Meter) -> int:
    for side, of in ((a, "a"), (b, "b")):
        entries = {pair.name: getattr(pair, of) for pair in pairs}
        for name, entry in entries.items():
            check_tensor(name, entry, side.document.files)
            _expect_here(side, name, entry)
        await expect_files(side.session, side.document, find_locations(entries, side.document.files))
    meter.begin(2 * sum(pair.nbytes for pair in pairs))
    file = _file(pairs)
    here, there = (_fetched(side, pairs, of) for side, of in ((a, "a"), (b, "b")))
    wanted = min(LARGEST_PART, budget.limit // (2 * LANES))
    parts = iter(cut_file(file, max(PAGE * 16, wanted // PAGE * PAGE)))

    async def lane() -> None:
        for part in parts:
            size = arena_bytes(part.end - part.begin)
            await budget.acquire(2 * size)
            slots: list[Slot] = []
            try:
                for _ in range(2):
                    slots.append(arena().take(part.end - part.begin))
                reads = [
                    asyncio.create_task(fetched.fetch(file, part, slot, budget))
                    for fetched, slot in zip((here, there), slots, strict=True)
                ]
                try:
                    await asyncio.gather(*reads)
                finally:
                    await shielded(cancel_all(reads))
                await in_thread(_look, file, part, pairs, *slots)
                meter.wrote(2 * sum(high - low for _, low, high in _shares(file, part)))
            finally:
                for slot in slots:
                    arena().give(slot)
                budget.release(2 * size)

    lanes = [asyncio.create_task(lane()) for _ in range(LANES)]
    try:
        await asyncio.gather(*lanes)
    finally:
        await shielded(cancel_all(lanes))
    return here.bytes_read + there.bytes_read


def _expect_here(side: Side, name: str, entry: e.AnyTensor) -> None:
    """Raise if only the base of a snapshot has the bytes of a tensor that must be read."""
    document = side.document
    if document.base is not None and any(document.files[each.location].in_base for _, each in entry.pieces()):
        raise SnapshotError(
            f"{side.session.url}: {name} cannot be read: it was left out, and is in the base {document.base.url} "
            f"(save id {document.base.save_id}); compare with the base instead, or leave {name} out"
        )


def _file(pairs: Sequence[Pair]) -> FilePlan:
    """Return a virtual file of the tensors in order, split without cutting elements."""
    extents = []
    position = 0
    for index, pair in enumerate(pairs):
        extents.append(Extent(index, position, position + pair.nbytes))
        position += -(-pair.nbytes // 16) * 16
    return FilePlan(b"", tuple(extents), position)


def _fetched(side: Side, pairs: Sequence[Pair], of: str) -> CheckpointStager:
    nothing = torch.empty(0, device="meta")
    leaves = [Leaf(pair.name, nothing, pair.dtype, tuple(pair.a.shape), pair.nbytes) for pair in pairs]
    return CheckpointStager(side.session, side.document, leaves, [getattr(pair, of) for pair in pairs], verify=True)


def _look(file: FilePlan, part: FilePart, pairs: Sequence[Pair], here: Slot, there: Slot) -> None:
    for index, low, high in _shares(file, part):
        pair = pairs[index]
        a, b = here.tensor[low:high], there.tensor[low:high]
        equal = torch.equal(a, b)
        if not equal:  # not `|=`: another lane may compare another part of the pair
            pair.differs = True
        if pair.numbers is not None:
            pair.numbers.update(a, b)


def _shares(file: FilePlan, part: FilePart) -> Iterator[tuple[int, int, int]]:
    """Yield the shares of a part: the pair's index, and the begin and end in the tensor."""
    for extent in file.extents[part.first : part.last]:
        low, high = max(extent.begin, part.begin), min(extent.end, part.end)
        if low < high:
            yield extent.leaf, low - part.begin, high - part.begin
