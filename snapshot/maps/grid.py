"""Grids: which elements of a source tensor become which elements of a target tensor.

A grid is the common form of splits, concatenations, stacks, transpositions and reshapes. It has factors. Each factor
is a run of indices with a step along one axis of the source, and a step along one axis of the target. Exchanging the
two sides gives the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple

import torch

from snapshot.tensors.geometry import Box, Shape

Side = Literal["source", "target"]


class Factor(NamedTuple):
    """A run of indices. Along an axis, the step of a factor is at least the extent of the finer ones."""

    size: int
    source: tuple[int, int]
    """Axis of the source, and the step along it."""
    target: tuple[int, int]
    """Axis of the target, and the step along it."""


class Grid(NamedTuple):
    """Elements of a source tensor, and their places in a target tensor."""

    source: Shape
    """The index of the first element in the source tensor."""
    target: Shape
    """The index of the first element in the target tensor."""
    factors: tuple[Factor, ...]

    @staticmethod
    def identity(shape: Shape) -> Grid:
        """Return the grid of a tensor that stays as it is."""
        zeros = (0,) * len(shape)
        return Grid(zeros, zeros, tuple(Factor(size, (axis, 1), (axis, 1)) for axis, size in enumerate(shape)))

    @property
    def sizes(self) -> Shape:
        """Number of indices of each factor."""
        return tuple(factor.size for factor in self.factors)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def reversed(self) -> Grid:
        """Return the grid from the target to the source."""
        return Grid(self.target, self.source, tuple(Factor(size, there, here) for size, here, there in self.factors))

    def cover(self, side: Side) -> Box:
        """Return the smallest box of one side's tensor that has all elements of the grid.

        >>> Grid((3, 0), (0, 0), (Factor(2, (0, 4), (1, 1)), Factor(3, (1, 1), (0, 1)))).cover("source")
        Box(offsets=(3, 0), sizes=(5, 3))
        """
        begins = getattr(self, side)
        sizes = [1] * len(begins)
        for factor in self.factors:
            axis, step = getattr(factor, side)
            sizes[axis] += (factor.size - 1) * step
        return Box(begins, tuple(sizes) if self.numel else (0,) * len(begins))

    def clip(self, side: Side, box: Box) -> list[Grid]:
        """Return the parts of the grid whose elements are in a box of one side's tensor.

        >>> [each.target for each in Grid.identity((4, 4)).clip("source", Box((1, 2), (2, 2)))]
        [(1, 2)]
        """
        begins: Shape = getattr(self, side)
        by_axis: list[list[int]] = [[] for _ in begins]
        for number, factor in enumerate(self.factors):
            by_axis[getattr(factor, side)[0]].append(number)
        choices: list[list[dict[int, tuple[int, int]]]] = []
        for axis, numbers in enumerate(by_axis):
            numbers.sort(key=lambda number: -getattr(self.factors[number], side)[1])
            runs = [(self.factors[number].size, getattr(self.factors[number], side)[1]) for number in numbers]
            low = box.offsets[axis] - begins[axis]
            found = _runs_within(runs, low, low + box.sizes[axis])
            choices.append([dict(zip(numbers, each, strict=True)) for each in found])
        parts = []
        for chosen in product(*choices):
            kept: dict[int, tuple[int, int]] = {}
            for each in chosen:
                kept |= each
            parts.append(self._narrowed(kept))
        return parts

    def _narrowed(self, kept: dict[int, tuple[int, int]]) -> Grid:
        """Return the grid with only a range of each factor's indices: (begin, size)."""
        source, target = list(self.source), list(self.target)
        factors = []
        for number, (_, here, there) in enumerate(self.factors):
            begin, size = kept[number]
            source[here[0]] += begin * here[1]
            target[there[0]] += begin * there[1]
            factors.append(Factor(size, here, there))
        return Grid(tuple(source), tuple(target), tuple(factors))

    def view(self, side: Side, tensor: torch.Tensor, origin: Shape) -> torch.Tensor:
        """Return the grid's elements in a tensor that holds a box of one side, which begins at `origin`.

        The views of both sides have the same sizes: one dimension for each factor.
        """
        strides = tensor.stride()
        begins: Shape = getattr(self, side)
        first = sum((begin - at) * stride for begin, at, stride in zip(begins, origin, strides, strict=True))
        steps = [step * strides[axis] for axis, step in (getattr(factor, side) for factor in self.factors)]
        return tensor.as_strided(self.sizes, steps, tensor.storage_offset() + (first if self.numel else 0))

    def simplified(self) -> Grid:
        """Return the same grid with the fewest factors: neighbours on both sides become one.

        >>> Grid.identity((1, 2)).simplified().factors
        (Factor(size=2, source=(1, 1), target=(1, 1)),)
        """
        factors: list[Factor] = []
        for factor in sorted(self.factors, key=lambda each: (each.source[0], -each.source[1])):
            if factor.size == 1:
                continue
            last = factors[-1] if factors else None
            if (
                last is not None
                and last.source == (factor.source[0], factor.source[1] * factor.size)
                and last.target == (factor.target[0], factor.target[1] * factor.size)
            ):
                factors[-1] = Factor(last.size * factor.size, factor.source, factor.target)
            else:
                factors.append(factor)
        return Grid(self.source, self.target, tuple(factors))

    def split(self, least: int) -> Iterator[Grid]:
        """Split the grid where the source has other elements between its own, into parts of at least `least` elements.

        `cover("source")` of a part then has few elements that the part does not need.
        """
        if self.cover("source").numel == self.numel:
            yield self
            return
        ends = dict.fromkeys(range(len(self.source)), 1)
        """The extent of the finer factors, by axis."""
        loose = None
        for number, (size, (axis, step), _) in sorted(
            enumerate(self.factors), key=lambda each: (each[1].source[0], each[1].source[1])
        ):
            if step > ends[axis] and size > 1 and (loose is None or size < self.factors[loose].size):
                loose = number
            ends[axis] = step * (size - 1) + ends[axis]
        if loose is None or self.numel // self.factors[loose].size < least:
            yield self
            return
        whole = {number: (0, factor.size) for number, factor in enumerate(self.factors)}
        for index in range(self.factors[loose].size):
            yield from self._narrowed({**whole, loose: (index, 1)}).simplified().split(least)

    def source_axes(self) -> list[int | None] | None:
        """Return the factor along each axis of the source. None if the grid is not a box of the source."""
        axes: list[int | None] = [None] * len(self.source)
        for number, (size, (axis, step), _) in enumerate(self.factors):
            if size == 1:
                continue
            if step != 1 or axes[axis] is not None:
                return None
            axes[axis] = number
        return axes


def _runs_within(runs: Sequence[tuple[int, int]], low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the ranges of indices whose elements are in [low, high), for factors of one axis from coarse to fine.

    >>> _runs_within([(4, 3), (2, 1)], 1, 7)
    [((0, 1), (1, 1)), ((1, 1), (0, 2)), ((2, 1), (0, 1))]
    """
    if not runs:
        return [()] if low <= 0 < high else []
    (size, step), finer = runs[0], runs[1:]
    extent = 1 + sum((count - 1) * width for count, width in finer)
    # indices that are wholly inside: index * step >= low, and index * step + extent <= high
    first = max(0, -(-low // step))
    last = min(size, (high - extent) // step + 1)
    touched = max(0, (low - extent) // step + 1), min(size, -(-high // step))
    found: list[tuple[tuple[int, int], ...]] = []
    index = touched[0]
    while index < touched[1]:
        if first <= index < last:
            found.append(((index, last - index), *((0, count) for count, _ in finer)))
            index = last
            continue
        found += [((index, 1), *each) for each in _runs_within(finer, low - index * step, high - index * step)]
        index += 1
    return found
