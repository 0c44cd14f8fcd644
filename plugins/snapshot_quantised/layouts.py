"""Weights that bitsandbytes, GPTQ and AWQ have quantised: their layouts, and the elements that they stand for.

A layout has several tensors for one weight. Its elements have the bits that the package itself computes.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.formats.derived import place_bytes
from snapshot.io.aio import in_thread
from snapshot.io.arena import Slot, arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.memory import BY_NAME, ITEMSIZE

# Derivations: the elements of a weight, computed from ranges of its stored tensors.

_LARGEST = 4 << 20
"""Maximum stored bytes that are read at once."""
_AT_ONCE = 32 << 10
"""Elements that are computed at once: they stay in a core's cache, and torch starts no threads for them."""
_ALIGNED = 16


class StoredRun(NamedTuple):
    """A run of elements of a stored tensor."""

    entry: TensorEntry
    first: int
    length: int

    @property
    def nbytes(self) -> int:
        """Its bytes in a slot, with those that align the next one."""
        return -(-self.length * ITEMSIZE[self.entry.dtype] // _ALIGNED) * _ALIGNED


def _run_of_blocks(entry: TensorEntry, begin: int, end: int, size: int) -> StoredRun:
    """Return the run with an element for each block of `size` elements of another tensor."""
    first = begin // size
    return StoredRun(entry, first, -(-end // size) - first)


def _spread(values: torch.Tensor, number: int, begin: int, end: int, size: int) -> torch.Tensor:
    """Return the value of the block of each element, from the values of some blocks. `number`: the first of them."""
    first, last = begin // size, -(-end // size)
    counts = torch.full((last - first,), size)
    counts[0] -= begin - first * size
    counts[-1] -= last * size - end
    return values[first - number : last - number].repeat_interleave(counts, output_size=end - begin)


class _Held:
    """Runs that are read into one slot, one after the other."""

    def __init__(self, storage: Storage, slot: Slot) -> None:
        self._storage = storage
        self._slot = slot
        self._used = 0

    async def read(self, *runs: StoredRun) -> torch.Tensor:
        """Read runs of one tensor, and return their elements."""
        begin, dtype = self._used, runs[0].entry.dtype
        for run in runs:
            end = self._used + run.length * ITEMSIZE[dtype]
            at = run.entry.byte_range[0] + run.first * ITEMSIZE[dtype]
            await self._storage.read_into(run.entry.location, at, [self._slot.view[self._used : end]])
            self._used = end
        found = self._slot.tensor[begin : self._used].view(BY_NAME[dtype])
        self._used = -(-self._used // _ALIGNED) * _ALIGNED
        return found


class Quantised(ABC):
    """The elements of a weight, in an order in which ranges of them need only ranges of the stored tensors."""

    dtype: str
    shape: tuple[int, ...]
    """The shape of the elements in that order."""
    turned = False
    """True if the weight is the transpose."""

    @property
    @abstractmethod
    def stored(self) -> Sequence[TensorEntry]:
        """The tensors that the elements are computed from."""

    @abstractmethod
    def end_of_step(self, begin: int, most: int) -> int:
        """Return the end of the elements from `begin` on that need at most about `most` stored bytes."""

    @abstractmethod
    def measure(self, begin: int, end: int) -> int:
        """Return the maximum number of stored bytes of some elements."""

    @abstractmethod
    async def hold(self, held: _Held, begin: int, end: int) -> Any:
        """Read the stored bytes of some elements."""

    @abstractmethod
    def compute(self, parts: Any, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the elements, a few at a time, with the number of the first one."""

    @property
    def sources(self) -> Collection[str]:
        """The stored files."""
        return {entry.location for entry in self.stored}

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Compute the bytes from `offset` on, from a few MiB of stored ones at a time."""
        itemsize = ITEMSIZE[self.dtype]
        most = min(_LARGEST, memory.limit // 4)
        for view in views:
            begin, last = offset // itemsize, -(-(offset + len(view)) // itemsize)
            while begin < last:
                end = min(last, self.end_of_step(begin, most))
                async with memory.slot(arena_bytes(self.measure(begin, end))) as slot:
                    parts = await self.hold(_Held(storage, slot), begin, end)
                    await in_thread(self._fill, parts, begin, end, view, offset)
                begin = end
            offset += len(view)

    def _fill(self, parts: Any, begin: int, end: int, view: memoryview, offset: int) -> None:
        for first, elements in self.compute(parts, begin, end):
            data = elements.contiguous().view(-1).view(torch.uint8).numpy().data
            place_bytes(view, first * ITEMSIZE[self.dtype] - offset, data)


# bitsandbytes: eight bits with a factor for each row, or four bits with a factor for each block.

_BY_127 = 7.874015718698502e-3


@dataclass(frozen=True)
class EightBit(Quantised):
    """A matrix of LLM.int8: its integers, and the largest magnitude of each row."""

    weight: TensorEntry
    largest: TensorEntry
    shape: tuple[int, int]
    dtype = "float32"

    @property
    def stored(self) -> Sequence[TensorEntry]:
        return self.weight, self.largest

    def _runs(self, begin: int, end: int) -> tuple[StoredRun, StoredRun]:
        return StoredRun(self.weight, begin, end - begin), _run_of_blocks(self.largest, begin, end, self.shape[1])

    def end_of_step(self, begin: int, most: int) -> int:
        return begin + max(1, most // 5)  # a row may have one element

    def measure(self, begin: int, end: int) -> int:
        return sum(run.nbytes for run in self._runs(begin, end))

    async def hold(self, held: _Held, begin: int, end: int) -> Any:
        return [await held.read(run) for run in self._runs(begin, end)]

    def compute(self, parts: Any, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        integers, largest = parts
        for low in range(begin, end, _AT_ONCE):
            high = min(end, low + _AT_ONCE)
            own = _spread(largest, begin // self.shape[1], low, high, self.shape[1])
            yield low, (integers[low - begin : high - begin] * own).mul_(_BY_127)


@dataclass(frozen=True)
class Nested:
    """Factors that are quantised themselves."""

    factors: TensorEntry
    table: torch.Tensor
    block: int
    offset: torch.Tensor


@dataclass(frozen=True)
class FourBit(Quantised):
    """A weight of NF4 or FP4: numbers of entries of a table, two in a byte, and a factor for each block."""

    weight: TensorEntry
    factors: TensorEntry
    pairs: torch.Tensor
    """For each byte, its two elements as one integer."""
    block: int
    nested: Nested | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> Sequence[TensorEntry]:
        return self.weight, self.factors, *([] if self.nested is None else [self.nested.factors])

    def _runs(self, begin: int, end: int) -> list[StoredRun]:
        bytes_ = msgspec.structs.replace(self.weight, dtype="uint8")
        runs = [_run_of_blocks(bytes_, begin, end, 2), _run_of_blocks(self.factors, begin, end, self.block)]
        if self.nested is not None:
            factors = runs[1]
            end = factors.first + factors.length
            runs.append(_run_of_blocks(self.nested.factors, factors.first, end, self.nested.block))
        return runs

    def end_of_step(self, begin: int, most: int) -> int:
        return begin + max(1, most)  # a block has at least 32 elements, so an element has less than a byte

    def measure(self, begin: int, end: int) -> int:
        return sum(run.nbytes for run in self._runs(begin, end))

    async def hold(self, held: _Held, begin: int, end: int) -> Any:
        runs = self._runs(begin, end)
        return runs, [await held.read(run) for run in runs]

    def compute(self, parts: Any, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        (codes, factors, *more), (packed, held, *rest) = parts
        begin -= begin % 2
        for low in range(begin, end, _AT_ONCE):
            high = min(low + _AT_ONCE, end)
            numbers = packed[low // 2 - codes.first : -(-high // 2) - codes.first].int()
            elements = self.pairs.index_select(0, numbers).view(torch.float32)[: high - low]
            first, last = low // self.block, -(-high // self.block)
            own = held[first - factors.first : last - factors.first]
            if self.nested is not None:
                outer = _spread(rest[0], more[0].first, first, last, self.nested.block)
                own = (self.nested.table.index_select(0, own.int()) * outer).add_(self.nested.offset)
            yield low, (elements * _spread(own, first, low, high, self.block)).to(BY_NAME[self.dtype])


# GPTQ and AWQ: integers of a few bits in words of 32, with a zero and a scale for each group of rows and each column.
# The matrix has the inputs first, so it is the transpose of the weight.

_WORD = 32
_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight columns, the place of its four bits in AWQ's word."""


class _Area(NamedTuple):
    """Rows and columns of a matrix. Its first column begins with a word."""

    first: int
    last: int
    left: int
    right: int


@dataclass(frozen=True)
class Grouped(Quantised):
    """A matrix of GPTQ or AWQ."""

    words: TensorEntry
    zeros: TensorEntry
    scales: TensorEntry
    groups: TensorEntry | None
    """The group of each row, with GPTQ. With AWQ, groups have the same number of rows, one after the other."""
    bits: int
    less: int
    """Number that GPTQ's first version has subtracted from each zero."""
    shape: tuple[int, int]
    """The rows, which are inputs, and the columns."""
    name: str
    turned = True

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The dtype of the scales."""
        return self.scales.dtype

    @property
    def stored(self) -> Sequence[TensorEntry]:
        return self.words, self.zeros, self.scales, *([] if self.groups is None else [self.groups])

    @property
    def per_word(self) -> int:
        """Integers in a word."""
        return _WORD // self.bits

    # The elements are computed by whole rows, or if a row is too long, by a part of one row.

    def end_of_step(self, begin: int, most: int) -> int:
        columns, row = self.shape[1], self.measure(0, self.shape[1])
        if row <= most:
            return (begin // columns + most // row) * columns
        at = begin % columns
        some = most // 16 // self.per_word * self.per_word or self.per_word
        return begin - at + min(columns, at // self.per_word * self.per_word + some)

    def measure(self, begin: int, end: int) -> int:
        area = self._area(begin, end)
        rows = area.last - area.first
        groups = min(rows, self.scales.shape[0])
        words = self._words(area).nbytes + groups * self._run(self.zeros, 0, area, self.per_word).nbytes
        return 4 * rows + words + groups * self._run(self.scales, 0, area, 1).nbytes + 4 * _ALIGNED

    def _area(self, begin: int, end: int) -> _Area:
        columns = self.shape[1]
        first, last = begin // columns, -(-end // columns)
        if last - first > 1:
            return _Area(first, last, 0, columns)
        left = (begin - first * columns) // self.per_word * self.per_word
        return _Area(first, last, left, end - first * columns)

    def _run(self, entry: TensorEntry, row: int, area: _Area, columns: int, rows: int = 1) -> StoredRun:
        """Return the part of an area in rows of a tensor, whose elements are for some columns each."""
        left, right = area.left // columns, -(-area.right // columns)
        return StoredRun(entry, row * entry.shape[1] + left, (rows - 1) * entry.shape[1] + right - left)

    def _words(self, area: _Area) -> StoredRun:
        if self.groups is None:
            return self._run(self.words, area.first, area, self.per_word, area.last - area.first)
        first = area.first // self.per_word
        return self._run(self.words, first, area, 1, -(-area.last // self.per_word) - first)

    async def hold(self, held: _Held, begin: int, end: int) -> Any:
        area = self._area(begin, end)
        if self.groups is None:
            groups = torch.arange(area.first, area.last) // (self.shape[0] // self.scales.shape[0])
        else:
            groups = await held.read(StoredRun(self.groups, area.first, area.last - area.first))
            lowest, highest = int(groups.min()), int(groups.max())
            if lowest < 0 or highest >= self.scales.shape[0]:
                raise CorruptSnapshotError(
                    f"{self.name}: g_idx must be from 0 to {self.scales.shape[0] - 1}, got {lowest} to {highest}"
                )
        distinct, places = torch.unique(groups, return_inverse=True)
        breaks = [0, *((distinct.diff() > 1).nonzero().view(-1) + 1).tolist(), len(distinct)]
        runs = [(int(distinct[low]), high - low) for low, high in pairwise(breaks)]
        words = await held.read(self._words(area))
        zeros = await held.read(*(self._run(self.zeros, row, area, self.per_word, rows) for row, rows in runs))
        scales = await held.read(*(self._run(self.scales, row, area, 1, rows) for row, rows in runs))
        return area, places, words, zeros.view(len(distinct), -1), scales.view(len(distinct), -1)

    def compute(self, parts: Any, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        area, places, words, zeros, scales = parts
        columns, width = self.shape[1], area.right - area.left
        words = words.view(-1, width if self.groups is not None else zeros.shape[1])
        step = max(1, _AT_ONCE // width)
        for first in range(area.first, area.last, step):
            rows = torch.arange(first, min(first + step, area.last))
            own, back = torch.unique(places[rows - area.first], return_inverse=True)
            for left in range(0, width, _AT_ONCE):
                right = min(width, left + _AT_ONCE)
                zero = self._unpack_columns(zeros[own] + self._one, left, right)
                scale = scales[own, left:right]
                if len(own) > 1:
                    zero, scale = zero[back], scale[back]
                integers = self._integers(words, rows, area.first, left, right)
                elements = (integers - zero).to(scale.dtype) * scale
                yield first * columns + area.left + left, elements

    @property
    def _one(self) -> int:
        """The number that is added to a word of zeros, for all of its integers."""
        return self.less * sum(1 << place for place in range(0, _WORD, self.bits))

    def _integers(self, words: torch.Tensor, rows: torch.Tensor, first: int, left: int, right: int) -> torch.Tensor:
        """Return the integers of some rows, from words whose first row is that of a row."""
        if self.groups is None:
            return self._unpack_columns(words[rows - first], left, right)
        own = words[rows // self.per_word - first // self.per_word, left:right]
        return (own >> (rows % self.per_word * self.bits).int()[:, None]).bitwise_and_((1 << self.bits) - 1)

    def _unpack_columns(self, words: torch.Tensor, left: int, right: int) -> torch.Tensor:
        """Return the integers of some columns. The first one begins with a word."""
        order = _INTERLEAVED if self.groups is None else range(self.per_word)
        shifts = torch.tensor([place * self.bits for place in order], dtype=torch.int32)
        own = words[:, left // self.per_word : -(-right // self.per_word)]
        integers = (own[..., None] >> shifts).bitwise_and_((1 << self.bits) - 1)
        return integers.view(len(words), -1)[:, : right - left]


# Layouts: the tensors of each quantised weight, by their names.

_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)", re.DOTALL)
_NESTED = ("nested_absmax", "nested_quant_map")
_LONGEST_STATE = 64 << 10
_SMALL = {"state": _LONGEST_STATE, "quant_map": 64, "nested_quant_map": 1024, "weight_format": 1}
"""Parts whose values are needed to describe a weight, and their maximum bytes."""
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DEEPEST = 8


class Layout(NamedTuple):
    """The stored tensors of a weight."""

    name: str
    """The name of the weight."""
    parts: dict[str, str]
    """Role -> name of the tensor."""

    @property
    def main(self) -> str:
        """The tensor that has most of the bytes."""
        return self.parts["qweight" if "qweight" in self.parts else "weight"]


def find_layouts(names: Collection[str], method: str) -> list[Layout]:
    """Return the quantised weights among some tensors. Raise ValueError if a tensor of one is missing."""
    found = _match_layouts(names, method)
    used: set[str] = set()
    for layout in found:
        for part in layout.parts.values():
            if part not in names:
                raise ValueError(f"{part} is missing")
            if part in used:
                raise ValueError(f"{part} is part of two weights")
            used.add(part)
        if layout.name in names and layout.name not in layout.parts.values():
            raise ValueError(f"{layout.name} exists, beside {layout.main}")
        if method == "awq" and f"{layout.main.removesuffix('.qweight')}.g_idx" in names:
            raise ValueError(f"{layout.main} has a g_idx, as with GPTQ; choose gptq")
    return found


def _match_layouts(names: Collection[str], method: str) -> list[Layout]:
    found = []
    for name in names:
        if method != "bitsandbytes":
            if name.endswith(".qweight"):
                module = name.removesuffix(".qweight")
                roles = ["qweight", "qzeros", "scales", *([] if method == "awq" else ["g_idx"])]
                found.append(Layout(f"{module}.weight", {role: f"{module}.{role}" for role in roles}))
        elif (match := _STATE.fullmatch(name)) is not None:
            weight = match[1]
            parts = {"weight": weight, "state": name}
            parts |= {role: f"{weight}.{role}" for role in ("absmax", "quant_map")}
            if any(f"{weight}.{role}" in names for role in _NESTED):
                parts |= {role: f"{weight}.{role}" for role in _NESTED}
            found.append(Layout(weight, parts))
        elif name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            parts = {"weight": f"{module}.weight", "SCB": name}
            if f"{module}.weight_format" in names:
                parts["weight_format"] = f"{module}.weight_format"
            found.append(Layout(f"{module}.weight", parts))
    return found


def small_parts(layout: Layout, entries: Mapping[str, TensorEntry]) -> list[str]:
    """Return the parts whose values are needed by `describe_weight`. Raise ValueError if one is too long."""
    roles = [role for role in layout.parts if role in _SMALL]
    for role in roles:
        nbytes = entries[role].nbytes
        if nbytes > _SMALL[role]:
            raise ValueError(f"{layout.parts[role]} must have at most {_SMALL[role]} bytes, got {nbytes:,}")
    return roles


def describe_weight(
    layout: Layout, entries: Mapping[str, TensorEntry], values: Mapping[str, torch.Tensor], method: str
) -> Quantised:
    """Return a weight, from its tensors by their roles. Raise ValueError if they do not fit together."""
    if "state" in layout.parts:
        return _describe_four_bit(layout, entries, values)
    if "SCB" in layout.parts:
        return _describe_eight_bit(layout, entries, values)
    return _describe_grouped(layout, entries, method)


def _expect(layout: Layout, role: str, entry: TensorEntry, dtypes: Sequence[str], count: int | None = None) -> None:
    name = layout.parts[role]
    if entry.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(dtypes)}, got {entry.dtype}")
    if count is not None and math.prod(entry.shape) != count:
        raise ValueError(f"{name} must have {count:,} elements, got {entry.dtype}{list(entry.shape)}")


def _describe_eight_bit(
    layout: Layout, entries: Mapping[str, TensorEntry], values: Mapping[str, torch.Tensor]
) -> EightBit:
    weight, largest = entries["weight"], entries["SCB"]
    _expect(layout, "weight", weight, ["int8"])
    if len(weight.shape) != 2 or not math.prod(weight.shape):
        raise ValueError(f"{layout.name} must be a matrix, got {list(weight.shape)}")
    _expect(layout, "SCB", largest, ["float32"], weight.shape[0])
    kind = values.get("weight_format")
    if kind is not None and (kind.dtype.is_floating_point or kind.numel() != 1 or int(kind)):
        raise ValueError(f"{layout.name} must be stored by rows (weight_format 0), got {kind.tolist()}")
    return EightBit(weight, largest, (weight.shape[0], weight.shape[1]))


class _State(msgspec.Struct):
    quant_type: str
    blocksize: int
    dtype: str
    shape: list[int]
    nested_blocksize: int = 0
    nested_dtype: str = "float32"
    nested_offset: float = 0.0


def _describe_four_bit(
    layout: Layout, entries: Mapping[str, TensorEntry], values: Mapping[str, torch.Tensor]
) -> FourBit:
    name = layout.parts["state"]
    _expect(layout, "state", entries["state"], ["uint8"])
    state: _State = decode_json(values["state"].numpy().tobytes(), _State, name)
    if not 0 < len(state.shape) <= _DEEPEST or min(state.shape) < 1 or math.prod(state.shape) >= 1 << 60:
        raise ValueError(f"{name}: invalid shape {str(state.shape)[:200]}")
    if state.blocksize not in _BLOCKS or state.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name}: unknown blocks of {state.blocksize:,} elements of {state.dtype[:80]!r}")
    count = math.prod(state.shape)
    blocks = -(-count // state.blocksize)
    if entries["weight"].nbytes != -(-count // 2):
        raise ValueError(
            f"{layout.name} must have {-(-count // 2):,} bytes for {state.shape}, got {entries['weight'].nbytes:,}"
        )
    _expect(layout, "quant_map", entries["quant_map"], ["float32"], 16)
    nested = None
    if "nested_absmax" in layout.parts:
        if not 0 < state.nested_blocksize < 1 << 31 or state.nested_dtype != "float32":
            raise ValueError(
                f"{name}: unknown blocks of {state.nested_blocksize:,} factors of {state.nested_dtype[:80]!r}"
            )
        _expect(layout, "nested_quant_map", entries["nested_quant_map"], ["float32"], 256)
        _expect(layout, "nested_absmax", entries["nested_absmax"], ["float32"], -(-blocks // state.nested_blocksize))
        offset = torch.tensor(state.nested_offset, dtype=torch.float32)
        nested = Nested(entries["nested_absmax"], values["nested_quant_map"].view(-1), state.nested_blocksize, offset)
    _expect(layout, "absmax", entries["absmax"], ["float32" if nested is None else "uint8"], blocks)
    table = values["quant_map"].view(-1)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).view(torch.int64).view(-1)
    return FourBit(
        entries["weight"], entries["absmax"], pairs, state.blocksize, nested, state.dtype, tuple(state.shape)
    )


def _describe_grouped(layout: Layout, entries: Mapping[str, TensorEntry], method: str) -> Grouped:
    words, zeros, scales = entries["qweight"], entries["qzeros"], entries["scales"]
    for role in ("qweight", "qzeros"):
        _expect(layout, role, entries[role], ["int32"])
    _expect(layout, "scales", scales, ["float16", "bfloat16", "float32"])
    shapes = [list(each.shape) for each in (words, zeros, scales)]
    text = f"{layout.main} of {shapes[0]}, with qzeros of {shapes[1]} and scales of {shapes[2]},"
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes) or zeros.shape[0] != scales.shape[0]:
        raise ValueError(f"{text} must be matrices with the same groups")
    columns = scales.shape[1]
    if method == "awq":
        rows = words.shape[0]
        if words.shape[1] != columns // 8 or zeros.shape[1] != columns // 8 or columns % 8 or rows % scales.shape[0]:
            raise ValueError(f"{text} must have four bits, in AWQ's version gemm")
        return Grouped(words, zeros, scales, None, 4, 0, (rows, columns), layout.name)
    groups = entries["g_idx"]
    _expect(layout, "g_idx", groups, ["int32"])
    rows = math.prod(groups.shape)
    fitting = [
        bits
        for bits in (2, 4, 8)
        if (words.shape[0], zeros.shape[1]) == (-(-rows * bits // _WORD), -(-columns * bits // _WORD))
    ]
    if words.shape[1] != columns or len(groups.shape) != 1 or len(fitting) != 1:
        raise ValueError(f"{text} and g_idx of {list(groups.shape)} must have 2, 4 or 8 bits")
    less = int(method == "gptq")
    return Grouped(words, zeros, scales, groups, fitting[0], less, (rows, columns), layout.name)
