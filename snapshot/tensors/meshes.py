"""Boxes of a tensor on each rank of a mesh, computed from integers alone.

Plans and tests need neither processes nor torch, and the boxes do not depend on the torch version.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snapshot.tensors.geometry import Box, Shape

Interval = tuple[int, int]
"""Begin and end of a run of indices."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Placement along a dimension of the mesh: all ranks have the same data."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Split:
    """Placement along a dimension of the mesh: ranks share a dimension of the tensor, split like `torch.chunk`.

    With `strides`, the dimension is first split into that many equal ranges, and each rank gets its share of every
    range. So another dimension of the mesh can distribute whole ranges.
    """

    dim: int
    strides: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.strides == 1 else f"_S({self.dim},{self.strides})"


Placement = Copy | Split
Placements = tuple[Placement, ...]


class HeldShards(NamedTuple):
    """Boxes of a tensor on one rank."""

    shape: Shape
    """Shape of its local tensor."""
    boxes: tuple[tuple[Box, Box], ...]
    """Box of each part in the whole tensor, and in the local one. No part is empty."""


@functools.lru_cache(maxsize=4096)
def find_held_shards(
    shape: Shape,
    mesh_shape: Shape,
    placements: Placements,
    coordinate: Shape,
    order: tuple[int, ...] | None = None,
) -> HeldShards:
    """Return the boxes of the rank at a coordinate of the mesh.

    The dimensions of the mesh split from left to right, each the remainder of the previous ones. With an `order` of the
    mesh's dimensions (see `find_nesting`), they split in that order instead, and all without strides.

    >>> shape, boxes = find_held_shards((6,), (2,), (Split(0, strides=2),), (0,))
    >>> shape, [f"{box} is {local}" for box, local in boxes]
    ((4,), ['0:2 is 0:2', '3:5 is 2:4'])
    """
    if not len(mesh_shape) == len(placements) == len(coordinate):
        raise ValueError(
            f"a mesh of shape {mesh_shape} must have one placement per dimension, got {len(placements)} at {coordinate}"
        )
    axes: list[list[Interval]] = [[(0, size)] for size in shape]
    for mesh_dim in range(len(mesh_shape)) if order is None else order:
        placement = placements[mesh_dim]
        if isinstance(placement, Split):
            strides = placement.strides if order is None else 1
            axes[placement.dim] = _take_share(axes[placement.dim], strides, mesh_shape[mesh_dim], coordinate[mesh_dim])
    located = [_locate_runs(axis) for axis in axes]
    boxes = []
    for part in itertools.product(*located):
        sizes = tuple(size for _, _, size in part)
        boxes.append((Box(tuple(at for at, _, _ in part), sizes), Box(tuple(at for _, at, _ in part), sizes)))
    return HeldShards(tuple(sum(size for _, _, size in axis) for axis in located), tuple(boxes))


def iterate_shards(
    shape: Shape, mesh_shape: Shape, placements: Placements, order: tuple[int, ...] | None = None
) -> Iterator[tuple[Shape, HeldShards]]:
    """Yield the boxes at each coordinate of the mesh, in the mesh's order."""
    for coordinate in itertools.product(*map(range, mesh_shape)):
        yield coordinate, find_held_shards(shape, mesh_shape, placements, coordinate, order)


def find_peers(
    mesh_ranks: Sequence[int], mesh_shape: Shape, placements: Placements, coordinate: Shape
) -> tuple[int, ...]:
    """Return the ranks with the same boxes as the one at a coordinate, including itself.

    `mesh_ranks` has all ranks of the mesh, flat. The result is in the mesh's order.

    >>> find_peers([0, 1, 2, 3], (2, 2), (Copy(), Split(0)), (0, 1))
    (1, 3)
    """
    same = (
        range(size) if isinstance(placement, Copy) else (at,)
        for size, placement, at in zip(mesh_shape, placements, coordinate, strict=True)
    )
    steps = [math.prod(mesh_shape[axis + 1 :]) for axis in range(len(mesh_shape))]
    return tuple(
        mesh_ranks[sum(at * step for at, step in zip(other, steps, strict=True))] for other in itertools.product(*same)
    )


def find_nesting(mesh_shape: Shape, placements: Placements) -> tuple[int, ...] | None:
    """Return the order in which the mesh's dimensions split, if strides encode one; None otherwise.

    FSDP uses such strides for a tensor that is already parallel: dimensions further right have split it before. If all
    sizes divide evenly, splitting in this order is equal to splitting from left to right.

    >>> find_nesting((4, 2), (Split(0, strides=2), Split(0)))
    (1, 0)
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(mesh_shape))):
        placement = placements[mesh_dim]
        if isinstance(placement, Copy):
            continue
        order = orders.setdefault(placement.dim, [])
        before = itertools.accumulate((mesh_shape[other] for other in order), lambda a, b: a * b, initial=1)
        position = next((i for i, ranges in enumerate(before) if ranges == placement.strides), None)
        if position is None:
            return None
        order.insert(position, mesh_dim)
    return tuple(itertools.chain.from_iterable(orders.values()))


def add_strides(mesh_shape: Shape, placements: Placements, order: tuple[int, ...]) -> Placements:
    """Return the placements with strides that encode an order: the inverse of `find_nesting`.

    >>> add_strides((4, 2), (Split(0), Split(0)), (1, 0))
    (Split(dim=0, strides=2), Split(dim=0, strides=1))
    """
    made = list(placements)
    for i, mesh_dim in enumerate(order):
        placement = placements[mesh_dim]
        if isinstance(placement, Split):
            earlier = (
                other for other in order[:i] if other > mesh_dim and _cuts_dimension(placements[other], placement.dim)
            )
            made[mesh_dim] = Split(placement.dim, math.prod(mesh_shape[other] for other in earlier))
    return tuple(made)


def _cuts_dimension(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Split) and placement.dim == dim


def _take_share(axis: list[Interval], strides: int, parts: int, index: int) -> list[Interval]:
    """Return one rank's share of an axis's indices, counted consecutively."""
    length = sum(end - begin for begin, end in axis)
    shares: list[Interval] = []
    for stride in range(strides):
        first, last = _chunk_interval(length, strides, stride)
        begin, end = _chunk_interval(last - first, parts, index)
        shares += _select_range(axis, first + begin, first + end)
    return shares


def _chunk_interval(length: int, parts: int, index: int) -> Interval:
    """Return the interval of a chunk. Chunks are as long as the first, except the last ones, which may be shorter."""
    step = -(-length // parts)
    return min(length, step * index), min(length, step * (index + 1))


def _select_range(axis: list[Interval], begin: int, end: int) -> Iterator[Interval]:
    """Yield the intervals that the range [begin, end) covers, counting the axis's indices consecutively."""
    at = 0
    for low, high in axis:
        first, last = max(begin - at, 0), min(end - at, high - low)
        if first < last:
            yield low + first, low + last
        at += high - low


def _locate_runs(axis: list[Interval]) -> list[tuple[int, int, int]]:
    """Return (begin in the tensor, begin in the local one, length) of each run of indices.

    Adjacent runs are joined.
    """
    runs: list[tuple[int, int, int]] = []
    at = 0
    for begin, end in axis:
        size = end - begin
        if size and runs and sum(runs[-1][::2]) == begin:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + size)
        elif size:
            runs.append((begin, at, size))
        at += size
    return runs
