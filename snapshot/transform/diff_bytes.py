"""Comparison of tensor bytes, part by part within the memory budget, and statistics of the difference."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from snapshot.distributed.exchange import Exchange
from snapshot.errors import SnapshotError
from snapshot.io.aio import in_thread, shielded
from snapshot.io.arena import Slot, arena, arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all, in_own_thread
from snapshot.loading.open import Opened, expect_files
from snapshot.manifest import entries as e
from snapshot.manifest.document import check_tensor, find_locations
from snapshot.plan.layout import PAGE, Extent, FilePart, FilePlan, cut_file
from snapshot.progress import Meter
from snapshot.reports import Values
from snapshot.save.commit import while_all_go_on
from snapshot.state.leaves import Leaf
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.transform.call import share_whole
from snapshot.transform.sources import CheckpointSource, LeafReads

# Statistics of the difference of two tensors, computed part by part.

STEP = 1 << 18
"""Elements per step; temporaries take a small multiple of their size."""


def are_comparable(dtype: str) -> bool:
    """Return True if the elements of a dtype are numbers that can be subtracted."""
    if dtype == "bool" or np_integer(dtype):
        return True
    known = BY_NAME.get(dtype)
    if known is None or not (known.is_floating_point or known.is_complex):
        return False
    if known.is_complex:
        return True
    try:
        torch.empty(1, dtype=known).to(torch.float64)
    except (RuntimeError, NotImplementedError):  # packed dtypes: two numbers in one byte
        return False
    return True


def np_integer(dtype: str) -> bool:
    """Return True if the dtype is an integer dtype of NumPy."""
    return dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def common_dtype(a: str, b: str) -> str:
    """Return the dtype for comparing two tensors.

    It is their own dtype if they have the same, 64 bits for two integer dtypes, otherwise a floating-point dtype.
    """
    if a == b:
        return a
    if all(name == "bool" or np_integer(name) for name in (a, b)):
        return "int64" if any(name.startswith("int") for name in (a, b)) else "uint64"
    return "complex128" if BY_NAME[a].is_complex or BY_NAME[b].is_complex else "float64"


class NumbersState(msgspec.Struct, array_like=True):
    """The sums so far."""

    elements: int = 0
    differing: int = 0
    not_numbers: int = 0
    largest: str = "0"
    """As text: a difference of integers may have 65 bits, and one of floats may be infinite."""
    norm: float = 0.0
    first: float = 0.0


class Numbers:
    """Sums over the elements of two tensors."""

    def __init__(self, a: str, b: str | None = None) -> None:
        """Compare tensors of the dtypes `a` and `b`, both read as `dtype`."""
        b = a if b is None else b
        self._dtypes = a, b
        self._adding = threading.Lock()
        self.dtype = common_dtype(a, b)
        exact = self.dtype == "bool" or np_integer(self.dtype)
        self._bits = (self.dtype, self.dtype)
        """The dtype of both tensors' bytes; uint64 bytes keep their value even if they are read as int64."""
        if exact:
            self._bits = ("uint64" if a == "uint64" else self.dtype, "uint64" if b == "uint64" else self.dtype)
        self._exact = exact
        integers = [name == "bool" or np_integer(name) for name in (a, b)]
        self._within = self.dtype if any(integers) and not all(integers) else ""
        self._elements = self._differing = self._not_numbers = 0
        self._largest: float = 0
        self._norm = self._first = 0.0

    def update(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the next elements of both tensors, as bytes. Several threads may add parts at once."""
        dtype, part = BY_NAME[self.dtype], Numbers(*self._dtypes)
        for begin in range(0, a.numel(), STEP * dtype.itemsize):
            piece = slice(begin, begin + STEP * dtype.itemsize)
            if self._exact:
                part._exactly(a[piece], b[piece])
            else:
                part._nearly(*(_widen(each[piece], dtype) for each in (a, b)))
        with self._adding:
            self._add(part)

    def _add(self, part: Numbers) -> None:
        self._elements += part._elements
        self._differing += part._differing
        self._not_numbers += part._not_numbers
        self._largest = max(self._largest, part._largest)
        self._norm = math.hypot(self._norm, part._norm)
        self._first = math.hypot(self._first, part._first)

    def _exactly(self, a: torch.Tensor, b: torch.Tensor) -> None:
        here, there = (
            np.frombuffer(each.numpy(), "uint8" if name == "bool" else name)
            for each, name in zip((a, b), self._bits, strict=True)
        )
        self._elements += here.size
        self._first = math.hypot(self._first, l2_norm(torch.from_numpy(np.abs(here.astype(np.float64)))))
        if here.dtype == there.dtype:
            where = here != there
        else:  # equal bits are equal numbers if neither is negative
            where = (here.view(np.int64) != there.view(np.int64)) | (here.view(np.int64) < 0)
        if not where.any():
            return
        x, y = (each[where].astype(np.int64 if each.dtype.kind == "i" else np.uint64) for each in (here, there))
        u, v = x.view(np.uint64), y.view(np.uint64)
        over = np.zeros(u.shape, bool)
        if x.dtype == y.dtype:
            apart = np.where(x > y, u - v, v - u)  # modulo 2**64, so no difference overflows
        else:
            unsigned, signed = (u, y) if x.dtype == np.uint64 else (v, x)
            less = signed < 0
            size = np.where(less, -signed.view(np.int64), signed).view(np.uint64)
            apart = np.where(less, unsigned + size, np.maximum(unsigned, size) - np.minimum(unsigned, size))
            over = less & (apart < unsigned)  # beyond 2**64, where the sum wraps
        self._differing += apart.size
        self._largest = max(self._largest, int(apart.max()))
        if over.any():
            self._largest = max(self._largest, int(apart[over].max()) + (1 << 64))
        self._norm = math.hypot(self._norm, l2_norm(torch.from_numpy(apart.astype(np.float64) + over * 2.0**64)))

    def _nearly(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._elements += a.numel()
        size = a.abs()
        self._first = math.hypot(self._first, l2_norm(size[size.isfinite()]))
        where = ~((a == b) | (a.isnan() & b.isnan()))
        apart = (a[where] - b[where]).abs()
        self._differing += apart.numel()
        self._not_numbers += int(apart.isnan().sum())
        apart = apart[~apart.isnan()]
        if apart.numel():
            self._largest = max(self._largest, float(apart.max()))
            self._norm = math.hypot(self._norm, l2_norm(apart))

    @property
    def state(self) -> NumbersState:
        """The sums so far, as another rank needs them."""
        counts = self._elements, self._differing, self._not_numbers
        return NumbersState(*counts, repr(self._largest), self._norm, self._first)

    @state.setter
    def state(self, state: NumbersState) -> None:
        self._elements, self._differing, self._not_numbers = state.elements, state.differing, state.not_numbers
        self._largest = int(state.largest) if state.largest.isdecimal() else float(state.largest)
        self._norm, self._first = state.norm, state.first

    def values(self) -> Values:
        """Return the results."""
        relative = self._norm / self._first if self._first else math.inf if self._norm else 0.0
        return Values(
            self._elements, self._differing, self._largest, self._norm, relative, self._not_numbers, self._within
        )


def _widen(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements in 64 bits. Complex numbers are converted by half, since torch warns about short ones."""
    if dtype.is_complex:
        return data.view(dtype.to_real()).to(torch.float64).view(torch.complex128)
    return data.view(dtype).to(torch.float64)


def l2_norm(values: torch.Tensor) -> float:
    """Return the L2 norm, even if the squares would overflow or underflow."""
    if not values.numel():
        return 0.0
    largest = float(values.max())
    if largest <= 0 or math.isinf(largest):
        return max(largest, 0.0)
    return largest * float(torch.linalg.vector_norm(values / largest))


# Comparison of tensor bytes: two checkpoints are read side by side, part by part within the budget.
#
# Tensors may be split, packed or sharded differently on each side.

LANES = 2
"""Parts that are read and compared at once."""
LARGEST_PART = 32 << 20


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


def as_bytes(stored: e.ObjectEntry | e.TensorEntry) -> e.TensorEntry:
    """Return the stored bytes of an object, or of a tensor of an unknown type, as a byte tensor."""
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
    a: Opened, b: Opened, pairs: Sequence[Pair], budget: MemoryBudget, meter: Meter, *, exchange: Exchange
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


async def _compare_share(a: Opened, b: Opened, pairs: Sequence[Pair], budget: MemoryBudget, meter: Meter) -> int:
    for side, of in ((a, "a"), (b, "b")):
        entries = {pair.name: getattr(pair, of) for pair in pairs}
        for name, entry in entries.items():
            check_tensor(name, entry, side.document.files)
            _expect_here(side, name, entry)
        await expect_files(side, find_locations(entries, side.document.files))
    meter.begin(2 * sum(pair.nbytes for pair in pairs))
    file = _file(pairs)
    here, there = (_make_source(side, pairs, of) for side, of in ((a, "a"), (b, "b")))
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
                    asyncio.create_task(source.read_part(file, part, slot))
                    for source, slot in zip((here, there), slots, strict=True)
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


def _expect_here(side: Opened, name: str, entry: e.AnyTensor) -> None:
    """Raise if only the base of a snapshot has the bytes of a tensor that must be read."""
    document = side.document
    if document.base is not None and any(document.files[each.location].in_base for _, each in entry.pieces()):
        raise SnapshotError(
            f"{side.url}: {name} cannot be read: it was left out, and is in the base {document.base}; "
            f"compare with the base instead, or leave {name} out"
        )


def _file(pairs: Sequence[Pair]) -> FilePlan:
    """Return a virtual file of the tensors in order, split without cutting elements."""
    extents = []
    position = 0
    for index, pair in enumerate(pairs):
        extents.append(Extent(index, position, position + pair.nbytes))
        position += -(-pair.nbytes // 16) * 16
    return FilePlan(b"", tuple(extents), position)


def _make_source(side: Opened, pairs: Sequence[Pair], of: str) -> CheckpointSource:
    nothing = torch.empty(0, device="meta")
    leaves = [Leaf(pair.name, nothing, pair.dtype, tuple(pair.a.shape), pair.nbytes) for pair in pairs]
    return CheckpointSource(side, leaves, [getattr(pair, of) for pair in pairs], LeafReads(verify=True))


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
