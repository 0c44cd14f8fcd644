"""Model-parallel parts of DeepSpeed's checkpoints: how the parts of a tensor join, by `universal_checkpoint_info`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from snapshot.errors import UnsupportedFormatError
from snapshot.formats.flat_ranges import cut_run
from snapshot.formats.pickle_nodes import expect_dict, expect_list, expect_name
from snapshot.manifest.entries import AnyTensor, Shard, ShardedTensorEntry, TensorEntry
from snapshot.tensors.geometry import Box, Shape, intersect, position_of, whole_box
from snapshot_deepspeed.groups import Tensors

_SIMPLE = re.compile(r"(\\[.\-_]|\\d\+?|\.[*+]?|\[0-9\]\+?|[\w\-/:$^])*", re.ASCII)
"""Patterns that can be matched in little time."""
MOST_REPEATS = 2
MOST_PATTERNS = 10_000
LONGEST_NAME = 1000
MOST_ROWS = 1 << 16
"""Maximum number of runs that a part of a tensor is cut into."""


class JoinRules:
    """The rules of a checkpoint, by patterns of names."""

    def __init__(self, where: object, info: Mapping[str, Any], parts: int) -> None:
        self._where = where
        self._parts = parts
        self._left = MOST_PATTERNS
        self._replicated = self._compile(info.get("tp_replicated_parameter_patterns"))
        self._averaged = self._compile(info.get("parameter_to_average_patterns"))
        self._rows = self._compile(info.get("parameter_with_row_parallelism_patterns"))
        self._vocabulary = self._compile(info.get("vocabulary_parameter_patterns"))
        self._halves = self._compile(info.get("parameter_with_2_sub_params_cat_dim_0"))
        self.tied = self._compile(info.get("pipeline_replicated_parameter_patterns"))
        """Parameters that several stages of a pipeline have."""
        self._words = info.get("original_vocab_size")
        self._widths = expect_dict(info.get("sub_param_shard_widths") or {})
        self._subs = []
        for each in expect_list(info.get("parameter_with_sub_params") or []):
            given = expect_dict(each)
            listed = [expect_name(pattern) for pattern in given["patterns"]]
            self._subs += [(pattern, self._compile([pattern]), given) for pattern in listed]

    def _compile(self, patterns: Any) -> Callable[[str], bool]:
        """Return a function that returns True for the names of a pattern."""
        made = []
        for each in expect_list(patterns or []):
            text = expect_name(each)
            repeats = sum(text.count(mark) for mark in "*+")
            self._left -= 1
            if not _SIMPLE.fullmatch(text) or repeats > MOST_REPEATS or len(text) > LONGEST_NAME or self._left < 0:
                raise UnsupportedFormatError(
                    f"{self._where}: universal_checkpoint_info must have simple patterns, got {text[:200]!r}"
                )
            made.append(re.compile(text))
        return lambda name: len(name) <= LONGEST_NAME and any(each.match(name) for each in made)

    def join(self, name: str, entries: Sequence[AnyTensor]) -> AnyTensor:
        """Return a tensor from those of all tensor-parallel ranks."""
        first = entries[0]
        if len(entries) == 1 or self._replicated(name) or self._averaged(name):
            return first
        found = next((each for each in self._subs if each[1](name)), None)
        if self._halves(name):
            widths = [[each.shape[0] // 2] * 2 for each in entries]
            joined = self._join_segments(name, entries, 0, widths)
        elif found is not None:
            pattern, _, given = found
            axis = given.get("partition_dim", 0)
            joined = self._join_segments(name, entries, axis, self._read_widths(name, entries, pattern, given, axis))
        else:
            axis = 1 if self._rows(name) else 0
            if not len(first.shape) > axis:
                raise UnsupportedFormatError(f"{self._where}: {name[:200]}: has no dimension {axis} to join")
            joined = self._join_segments(name, entries, axis, [[each.shape[axis]] for each in entries])
        if self._vocabulary(name) and type(self._words) is int and 0 < self._words < joined.shape[0]:
            pieces = _cut_axis(joined.pieces(), 0, 0, self._words)
            return _make_entry(joined.dtype, (self._words, *joined.shape[1:]), pieces)
        return joined

    def _read_widths(
        self, name: str, entries: Sequence[AnyTensor], pattern: str, given: Mapping[str, Any], axis: Any
    ) -> list[list[int]]:
        """Return the lengths of the sub-parameters on each rank."""
        if type(axis) is not int or not 0 <= axis < len(entries[0].shape):
            raise ValueError(f"{name[:200]}: invalid dimension of sub-parameters")
        if (held := self._widths.get(pattern)) is not None:  # by sub-parameter, then by rank
            return [[expect_list(list(each))[rank] for each in held] for rank in range(len(entries))]
        spec = given["shape"][axis]
        total = sum(each.shape[axis] for each in entries)
        sizes = list(spec) if isinstance(spec, (tuple, list)) else [total // spec] * spec
        if sum(sizes) != total or any(size % len(entries) for size in sizes):
            raise UnsupportedFormatError(f"{self._where}: {name[:200]}: its sub-parameters are not cut equally")
        return [[size // len(entries) for size in sizes] for _ in entries]

    def _join_segments(
        self, name: str, entries: Sequence[AnyTensor], axis: int, widths: Sequence[Sequence[int]]
    ) -> AnyTensor:
        """Return a tensor whose segments along a dimension are each joined from those of all ranks."""
        shape = list(entries[0].shape)
        for entry, own in zip(entries, widths, strict=True):
            rest = [size for dim, size in enumerate(entry.shape) if dim != axis]
            same = rest == [size for dim, size in enumerate(shape) if dim != axis] and entry.dtype == entries[0].dtype
            if not same or not all(type(width) is int and width >= 0 for width in own) or sum(own) != entry.shape[axis]:
                raise ValueError(f"{name[:200]}: the tensor-parallel parts do not fit each other")
        shape[axis] = sum(entry.shape[axis] for entry in entries)
        pieces: list[tuple[Box, TensorEntry]] = []
        place = 0
        for segment in range(len(widths[0])):
            for entry, own in zip(entries, widths, strict=True):
                begin = sum(own[:segment])
                for box, stored in _cut_axis(entry.pieces(), axis, begin, begin + own[segment]):
                    origin = tuple(place if dim == axis else 0 for dim in range(len(shape)))
                    pieces.append((box.moved_by(origin), stored))
                place += own[segment]
        return _make_entry(entries[0].dtype, tuple(shape), pieces)


def join_stages(rules: JoinRules, parts: Sequence[Tensors], width: int) -> Tensors:
    """Return the tensors of all parts: `width` tensor-parallel ones for each stage of a pipeline."""
    made: Tensors = {}
    for stage in range(0, len(parts), width):
        ranks = parts[stage : stage + width]
        for name in dict.fromkeys(name for each in ranks for name in each):
            if name in made:
                continue  # a tied parameter, which an earlier stage has
            held = [each[name] for each in ranks if name in each]
            if len(held) < width:
                raise ValueError(f"{name[:200]}: a tensor-parallel rank lacks it")
            made[name] = {key: rules.join(name, [each[key] for each in held]) for key in held[0]}
    return made


def _cut_axis(
    pieces: Iterable[tuple[Box, TensorEntry]], axis: int, begin: int, end: int
) -> Iterable[tuple[Box, TensorEntry]]:
    """Yield the parts of pieces between two places of a dimension, relative to the first one."""
    for box, stored in pieces:
        low, high = list(box.offsets), [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
        low[axis], high[axis] = max(low[axis], begin), min(high[axis], end)
        if low[axis] >= high[axis]:
            continue
        cut = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
        origin = tuple(begin if dim == axis else 0 for dim in range(len(low)))
        if cut == box:
            yield box.relative_to(origin), stored
            continue
        for part in _split_rows(cut, axis):
            inner = part.relative_to(box.offsets)
            at = position_of(inner.offsets, box.sizes)
            yield part.relative_to(origin), cut_run(stored, at, part.sizes)


def _split_rows(box: Box, axis: int) -> Iterable[Box]:
    """Yield the parts of a box that are runs in a piece that is longer in a dimension."""
    if axis == 0 or all(size == 1 for size in box.sizes[:axis]):
        yield box
        return
    if math.prod(box.sizes[:axis]) > MOST_ROWS:
        raise UnsupportedFormatError(f"a part of a tensor of DeepSpeed has more than {MOST_ROWS:,} runs of elements")
    for at in range(box.sizes[0]):
        offsets = (box.offsets[0] + at, *box.offsets[1:])
        row = Box(offsets, (1, *box.sizes[1:]))
        for part in _split_rows(Box(row.offsets[1:], row.sizes[1:]), axis - 1):
            yield Box((row.offsets[0], *part.offsets), (1, *part.sizes))


def _make_entry(dtype: str, shape: Shape, pieces: Iterable[tuple[Box, TensorEntry]]) -> AnyTensor:
    listed = list(pieces)
    if len(listed) == 1 and listed[0][0] == whole_box(shape):
        return listed[0][1]
    found = sum(math.prod(box.sizes) for box, _ in listed)
    if found != math.prod(shape) or any(intersect(box, whole_box(shape)) != box for box, _ in listed if box.numel):
        raise ValueError(f"the parts have {found:,} of {math.prod(shape):,} elements")
    return ShardedTensorEntry(dtype, shape, [Shard(box.offsets, box.sizes, stored) for box, stored in listed])
