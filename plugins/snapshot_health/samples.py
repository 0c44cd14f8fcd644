"""Samples of tensors, at places that change from take to take.

Of short tensors, those that fit into a number of bytes are read as a whole, in turn. Of many others, a few elements are
read, and of each long one a run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from snapshot.state.leaves import Leaf

T = TypeVar("T")
LINE = 64
"""Bytes of a short tensor that are read."""
LONG_TENSOR = 1 << 20
SHARE = 1024
"""The part of a long tensor that is read: one of this number of bytes."""
MOST_LINES = 256
"""Short tensors that one take reads."""
MOST_ELSEWHERE = 256
"""Tensors on accelerators that one take reads."""
MOST_WHOLE = 512
"""Short tensors that one take reads as a whole."""
WHOLE_BYTES = 1 << 20
"""Bytes of short tensors that one take reads as a whole, beside `1 / SHARE` of all bytes."""
SHORT_ELSEWHERE = 16 << 10
"""A tensor with strides or on an accelerator is read as a whole if it has at most this number of bytes."""
SCRATCH = 256 << 10
_SPACE = 1 << 47
"""Bytes of the address space of a process."""
_BEGIN = 1 << 16
"""Its lowest address that memory can have. NumPy takes the address 0 for none."""
_address, _nbytes = attrgetter("address"), attrgetter("nbytes")
_dtype, _plain = attrgetter("dtype"), attrgetter("plain")
_EXPONENTS: dict[str, tuple[str, int]] = {
    "float32": ("u4", 0x7F800000),
    "float64": ("u8", 0x7FF0000000000000),
    "bfloat16": ("u2", 0x7F80),
    "float16": ("u2", 0x7C00),
    "complex64": ("u4", 0x7F800000),
    "complex128": ("u8", 0x7FF0000000000000),
}
"""Dtype -> the integers of the size of its numbers, and the bits that are all set in NaN and infinity."""


class _Space(threading.local):
    """The memory of this process, as arrays. Only memory of tensors is read through it."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.scratch = np.empty(SCRATCH, np.uint8)

    def of(self, kind: str) -> Any:
        if kind not in self.arrays:
            held: Any = (ctypes.c_ubyte * (_SPACE - _BEGIN)).from_address(_BEGIN)
            self.arrays[kind] = np.frombuffer(held, f"<{kind}")
        return self.arrays[kind]


_space = _Space()


def find_nonfinite(leaves: Sequence[Leaf], turn: int, *, everything: bool = False) -> list[Leaf]:
    """Return the leaves with NaN or infinity in a sample, or in all of their elements."""
    if everything:
        return [leaf for leaf in leaves if leaf.dtype in _EXPONENTS and count_nonfinite(leaf)]
    runs, others = _split(leaves)
    long = [at for run in runs for at in run.at[run.counts * run.size >= LONG_TENSOR].tolist()]
    long = sorted([*long, *(at for at in others if leaves[at].plain)])
    found = [leaves[at] for at in long if _long_is_nonfinite(leaves[at], turn)]
    for run in runs:
        found += [leaves[at] for at in _find_in_lines(run.shorter_than(LONG_TENSOR), turn)]
    return found + _find_elsewhere([leaves[at] for at in others if not leaves[at].plain], turn)


class _Run(NamedTuple):
    """Leaves of one dtype whose elements are read at their addresses, as integers."""

    dtype: str
    size: int
    """Bytes of an integer."""
    bits: int
    at: Any
    """Positions of the leaves."""
    firsts: Any
    """Positions of their first integers in `_space`."""
    counts: Any
    """Numbers of their integers."""

    @property
    def space(self) -> Any:
        return _space.of(f"u{self.size}")

    def shorter_than(self, nbytes: int) -> _Run:
        kept = self.counts * self.size < nbytes
        if kept.all():
            return self
        return self._replace(at=self.at[kept], firsts=self.firsts[kept], counts=self.counts[kept])


def _split(leaves: Sequence[Leaf]) -> tuple[list[_Run], list[int]]:
    """Return the leaves that can be read at their addresses, by dtype, and the positions of the others.

    All attributes are read at once, since a Python step for each leaf would take longer than its sample.
    """
    if not leaves:
        return [], []
    addresses = np.fromiter(map(_address, leaves), np.int64, len(leaves))
    nbytes = np.fromiter(map(_nbytes, leaves), np.int64, len(leaves))
    fits = np.fromiter(map(_plain, leaves), np.bool_, len(leaves)) & (addresses % 8 == 0)
    fits &= (addresses >= _BEGIN) & (addresses < _SPACE - LONG_TENSOR)
    dtypes = list(map(_dtype, leaves))
    runs = []
    for dtype in dict.fromkeys(dtypes):
        if dtype in _EXPONENTS:
            kind, bits = _EXPONENTS[dtype]
            size = int(kind[1])
            at = np.flatnonzero(fits & np.fromiter(map(dtype.__eq__, dtypes), np.bool_, len(dtypes)))
            runs.append(_Run(dtype, size, bits, at, (addresses[at] - _BEGIN) // size, nbytes[at] // size))
    others = [at for at in np.flatnonzero(~fits).tolist() if dtypes[at] in _EXPONENTS]
    return runs, others


def take_some(many: list[T], most: int, turn: int) -> list[T]:
    """Return some of many, others in each turn."""
    if len(many) <= most:
        return many
    begin = turn * most % len(many)
    return (many[begin : begin + most] + many[: max(0, begin + most - len(many))])[:most]


class Rotation:
    """The leaves that takes sample: the long ones in host memory in each take, and of the others some in turn."""

    def __init__(self, leaves: Sequence[Leaf], numbers: Sequence[int]) -> None:
        """`numbers`: the positions of those leaves that matter."""
        self._whole_at = 0
        """The position in `_lines` where the next whole tensors begin."""
        self._always: list[int] = []
        self._lines: list[int] = []
        self._elsewhere: list[int] = []
        for number in numbers:
            leaf = leaves[number]
            if not leaf.plain or not leaf.tensor.is_cpu:
                self._elsewhere.append(number)
            else:
                (self._always if leaf.nbytes >= LONG_TENSOR else self._lines).append(number)
        self._ends = np.cumsum([leaves[number].nbytes for number in self._lines])
        self._budget = WHOLE_BYTES + sum(leaves[number].nbytes for number in numbers) // SHARE

    def choose(self, leaves: Sequence[Leaf], turn: int) -> list[Leaf]:
        """Return the leaves to sample in a turn."""
        lines, elsewhere = take_some(self._lines, MOST_LINES, turn), take_some(self._elsewhere, MOST_ELSEWHERE, turn)
        return [leaves[number] for number in (*self._always, *lines, *elsewhere)]

    def choose_whole(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the short leaves that the next take reads as a whole."""
        begin = self._whole_at
        reach = (int(self._ends[begin - 1]) if begin else 0) + self._budget
        end = min(max(begin + 1, int(np.searchsorted(self._ends, reach, side="right"))), begin + MOST_WHOLE)
        self._whole_at = end if end < len(self._lines) else 0
        return [leaves[number] for number in self._lines[begin:end]]


def _find_in_lines(run: _Run, turn: int) -> list[int]:
    """Return the positions of the leaves with NaN or infinity in a line. None of them is empty."""
    if not len(run.at):
        return []
    wide = LINE // run.size
    begins = (turn * wide) % run.counts
    places = (begins[:, None] + np.arange(wide)) % run.counts[:, None]
    values = run.space[run.firsts[:, None] + places]
    bad = ((values & run.bits) == run.bits).any(axis=1)
    return run.at[bad].tolist()  # type: ignore[no-any-return]


def find_in_whole(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return those of short leaves in host memory that have NaN or infinity in any element."""
    runs, others = _split(leaves)
    unaligned = [leaves[at] for at in others if leaves[at].plain and leaves[at].nbytes]
    found = [leaf for leaf in unaligned if count_nonfinite(leaf)]
    for run in runs:
        begin, space, scratch = 0, run.space, _space.scratch.view(f"<u{run.size}")
        lasts = run.firsts + run.counts
        parts = [space[first:last] for first, last in zip(run.firsts.tolist(), lasts.tolist(), strict=True)]
        ends = np.cumsum(run.counts)
        while begin < len(parts):  # as many as the scratch memory holds, which stays in the cache of the processor
            reach = len(scratch) + (int(ends[begin - 1]) if begin else 0)
            end = max(begin + 1, int(np.searchsorted(ends, reach, side="right")))
            if _has_all_bits(parts[begin:end], run.bits, scratch):
                found += [leaves[at] for at in run.at[begin:end].tolist() if count_nonfinite(leaves[at])]
            begin = end
    return found


def _has_all_bits(parts: Sequence[Any], bits: int, scratch: Any) -> bool:
    """Return True if an element has all of the bits. Several parts fit into `scratch`, and one may be longer."""
    [part] = parts if len(parts) == 1 else [np.concatenate(parts, out=scratch[: sum(map(len, parts))])]
    pieces = (part[at : at + len(scratch)] for at in range(0, len(part), len(scratch)))
    return any(np.bitwise_and(piece, bits, out=scratch[: len(piece)]).max() == bits for piece in pieces)


def _long_is_nonfinite(leaf: Leaf, turn: int) -> bool:
    kind, bits = _EXPONENTS[leaf.dtype]
    size = int(kind[1])
    count = leaf.nbytes // size
    length = min(count, max(LINE, count // SHARE))
    begin = turn * length % max(1, count - length + 1)
    if leaf.address % 8 or not is_in_memory(leaf):
        flat = leaf.tensor.detach().view(-1)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return not bool(torch.isfinite(flat[begin : begin + length]).all())
    first = (leaf.address - _BEGIN) // size + begin
    return bool(((_space.of(kind)[first : first + length] & bits) == bits).any())


def _find_elsewhere(leaves: list[Leaf], turn: int) -> list[Leaf]:
    """Look at tensors with strides, or on an accelerator: their samples are brought together there."""
    together: dict[Any, list[tuple[Leaf, torch.Tensor]]] = {}
    for leaf in leaves:
        tensor = leaf.tensor.detach()
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        short = leaf.nbytes <= SHORT_ELSEWHERE
        if short or tensor.is_contiguous():
            flat = tensor.reshape(-1)
        else:
            flat = tensor[tuple(turn % n for n in tensor.shape[:-1])]
        length = flat.numel() if short else min(flat.numel(), LINE)
        begin = turn * length % max(1, flat.numel() - length + 1)
        together.setdefault((tensor.device, tensor.dtype), []).append((leaf, flat[begin : begin + length]))
    found: list[Leaf] = []
    for held in together.values():
        sample = torch.cat([each for _, each in held])
        if not bool(torch.isfinite(sample).all()):
            found += [leaf for leaf, each in held if not bool(torch.isfinite(each).all())]
    return found


def is_in_memory(leaf: Leaf) -> bool:
    """Return True if the bytes of a leaf can be read at its address."""
    return leaf.tensor.is_cpu and _BEGIN <= leaf.address < _SPACE - LONG_TENSOR


def measure_squares(leaves: Sequence[Leaf]) -> Any:
    """Return the mean square of a sample from the middle of each leaf, at equal places in each take.

    It is NaN for leaves that cannot be sampled.
    """
    means = np.full(len(leaves), np.nan)
    elsewhere: dict[Any, list[int]] = {}
    runs, others = _split(leaves)
    for at in others:
        tensor = leaves[at].tensor
        if tensor.numel() and not tensor.is_meta and tensor.is_contiguous():
            elsewhere.setdefault(tensor.device, []).append(at)
    for run in runs:
        wide = LINE // run.size
        begins = np.maximum(0, (run.counts - wide) // 2)
        places = np.minimum(begins[:, None] + np.arange(wide), run.counts[:, None] - 1)
        means[run.at] = np.square(_as_floats(run.dtype, run.space[run.firsts[:, None] + places])).mean(axis=1)
    for held in elsewhere.values():
        flats = [leaves[at].tensor.detach().view(-1) for at in held[:MOST_ELSEWHERE]]
        middles = [max(0, (flat.numel() - LINE) // 2) for flat in flats]
        samples = [flat[begin : begin + LINE].abs().float() for flat, begin in zip(flats, middles, strict=True)]
        values = torch.cat(samples).double().cpu().square().numpy()
        ends = np.cumsum([sample.numel() for sample in samples])
        means[held[:MOST_ELSEWHERE]] = [part.mean() for part in np.split(values, ends[:-1])]
    return means


def _as_floats(dtype: str, words: Any) -> Any:
    """Return the bits of floating point numbers as float64. Those of complex numbers become their parts."""
    dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    if dtype == "bfloat16":
        words = words.astype("<u4") << 16
        dtype = "float32"
    return words.view(dtype).astype(np.float64)


def count_nonfinite(leaf: Leaf) -> int:
    """Return the number of elements that are NaN or infinite."""
    return int(torch.isfinite(leaf.tensor.detach()).logical_not().sum())
