"""Boxes in a tensor, the boxes of each rank on a mesh, and grids of elements."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

from snapshot.text import counted

if TYPE_CHECKING:
    import torch

# Boxes in a tensor, and the ranges of its flat bytes that they cover.
#
# All counts are in elements, in C order. A box is a pair of tuples: its offsets and its sizes, by dimension.

Shape = tuple[int, ...]
MOST_AXES = 64
"""Maximum number of dimensions of a tensor that torch supports."""


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that index the box in a tensor."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, origin: Shape) -> Box:
        """Return the box in coordinates relative to an origin."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def moved_by(self, origin: Shape) -> Box:
        """Return the box in outer coordinates, given the origin of its own: the inverse of `relative_to`."""
        return Box(tuple(a + b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def __str__(self) -> str:
        # An error may show a box that was refused since it has more sizes than offsets.
        return ",".join(f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=False))


@functools.lru_cache(maxsize=4096)  # a checkpoint has few shapes, and asks for each many times
def whole_box(shape: Shape) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def is_inside(box: Box, shape: Shape) -> bool:
    """Return True if a box is within a tensor of that shape."""
    return (
        len(box.offsets) == len(box.sizes) == len(shape)
        and all(offset >= 0 and size >= 0 for offset, size in zip(box.offsets, box.sizes, strict=True))
        and all(offset + size <= total for offset, size, total in zip(box.offsets, box.sizes, shape, strict=True))
    )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    begins = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(
        min(ao + asz, bo + bsz) - begin
        for ao, asz, bo, bsz, begin in zip(a.offsets, a.sizes, b.offsets, b.sizes, begins, strict=True)
    )
    return Box(begins, sizes) if all(size > 0 for size in sizes) else None


def boxes_overlap(boxes: list[Box]) -> bool:
    """Return True if any two of the boxes share an element.

    Planes split the boxes into ever smaller groups, and pairs are compared only if no plane does. Raise ValueError for
    arrangements that no sharding creates, since comparing them could take hours.
    """
    if not boxes or not boxes[0].sizes:
        return len(boxes) > 1
    groups = [[box for box in boxes if box.numel]]
    patience = 50_000 + 20 * len(boxes)
    while groups:
        group = groups.pop()
        patience -= len(group)
        if patience < 0:
            raise ValueError(f"the {counted(len(boxes), 'part')} form no known layout")
        if len(group) < 2:
            continue
        for axis in range(len(group[0].sizes)):
            parted = _split_by_planes(group, axis)
            if len(parted) > 1:
                groups.extend(parted)
                break
        else:
            if _sweep_pairs(group, patience):
                return True
    return False


def _split_by_planes(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Return groups of boxes that planes across an axis separate without cutting a box."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if box.offsets[axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[axis] + box.sizes[axis])
    return groups


def _sweep_pairs(boxes: list[Box], patience: int) -> bool:
    """Compare the boxes pair by pair, along the dimension with the most distinct offsets."""
    axis = max(range(len(boxes[0].sizes)), key=lambda axis: len({box.offsets[axis] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        patience -= len(active)
        if patience < 0:
            raise ValueError(f"the {counted(len(boxes), 'part')} form no known layout")
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        if any(intersect(box, other) for other in active):
            return True
        active.append(box)
    return False


def is_flat_range(shape: Shape, box: Box) -> bool:
    """Return True if a box is one flat range of a tensor.

    >>> is_flat_range((2, 3), Box((0, 1), (1, 2))), is_flat_range((2, 3), Box((0, 1), (2, 2)))
    (True, False)
    """
    first = next((axis for axis, size in enumerate(box.sizes) if size != 1), len(shape))
    return box.sizes[first + 1 :] == shape[first + 1 :]


def split_shape(shape: Shape, most: int) -> list[Box]:
    """Split a tensor into boxes of at most `most` elements, each of them one flat range, in order.

    >>> [str(box) for box in split_shape((2, 3), 2)]
    ['0:1,0:2', '0:1,2:3', '1:2,0:2', '1:2,2:3']
    """
    if math.prod(shape) <= most or not shape:
        return [whole_box(shape)]
    row = math.prod(shape[1:])
    if row > most:
        inner = split_shape(shape[1:], most)
        return [Box((i, *box.offsets), (1, *box.sizes)) for i in range(shape[0]) for box in inner]
    step = max(1, most // row)
    return [
        Box((begin,) + (0,) * (len(shape) - 1), (min(step, shape[0] - begin), *shape[1:]))
        for begin in range(0, shape[0], step)
    ]


def position_of(offsets: Shape, shape: Shape) -> int:
    """Return the position of an element in the flat tensor.

    >>> position_of((1, 2), (4, 3))
    5
    """
    position = 0
    for offset, size in zip(offsets, shape, strict=True):
        position = position * size + offset
    return position


def boxes_of_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Split the flat range [begin, end) of a tensor into boxes, and yield (begin in the flat tensor, box) in order.

    There are at most two boxes per dimension: a ragged head, whole rows, a ragged tail.

    >>> [(at, str(box)) for at, box in boxes_of_range((4, 3), 2, 10)]
    [(2, '0:1,2:3'), (3, '1:3,0:3'), (9, '3:4,0:1')]
    """
    if begin >= end:
        return
    if not shape:
        yield begin, Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, end // row
    if begin % row:
        stop = min(end, (first + 1) * row)
        for at, box in boxes_of_range(shape[1:], begin - first * row, stop - first * row):
            yield first * row + at, Box((first, *box.offsets), (1, *box.sizes))
        first += 1
    if first < last:
        yield first * row, Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if end % row and last >= first:
        for at, box in boxes_of_range(shape[1:], 0, end - last * row):
            yield last * row + at, Box((last, *box.offsets), (1, *box.sizes))


def find_flat_ranges(shape: Shape, box: Box, gap: int) -> list[tuple[int, int]]:
    """Return the flat ranges that cover a box, in order, joining those at most `gap` elements apart.

    >>> find_flat_ranges((4, 10), Box((1, 2), (2, 3)), gap=0)
    [(12, 15), (22, 25)]
    >>> find_flat_ranges((4, 10), Box((1, 2), (2, 3)), gap=7)
    [(12, 25)]
    """
    if box.numel == 0:
        return []
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pieces, span = [(0, 1)], 1
    for size, stride in zip(reversed(box.sizes), reversed(strides), strict=True):
        if len(pieces) == 1 and stride - span <= gap:
            pieces = [(0, (size - 1) * stride + span)]
        else:
            pieces = [(i * stride + start, length) for i in range(size) for start, length in pieces]
        span += (size - 1) * stride
    origin = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return [(origin + start, origin + start + length) for start, length in pieces]


# Boxes of a tensor on each rank of a mesh, computed from integers alone.
#
# Plans and tests need neither processes nor torch, and the boxes do not depend on the torch version.

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
_PLACEMENT = re.compile(r"R|_?S\(([0-9]{1,3})(?:,([1-9][0-9]{0,9}))?\)")
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


def find_fitting_shards(
    size: Shape,
    shape: Shape,
    mesh_shape: Shape,
    *,
    placements: Placements,
    coordinate: Shape,
    order: tuple[int, ...] | None,
) -> HeldShards:
    """Return the boxes of a local tensor of shape `size`; raise ValueError if they cannot be determined.

    Uneven strides are ambiguous: torch's operations cut from left to right, while FSDP cuts the leftmost dimension
    last. The local shape distinguishes the two; if it does not, an error is raised.
    """
    found = [find_held_shards(shape, mesh_shape, placements, coordinate, order)]
    if order is None and any(isinstance(placement, Split) and placement.strides > 1 for placement in placements):
        order = find_nesting(mesh_shape, placements)
        if order is not None:
            found.append(find_held_shards(shape, mesh_shape, placements, coordinate, order))
    fitting = {held for held in found if held.shape == size or (not held.boxes and 0 in size)}
    if len({held.boxes for held in fitting}) == 1:
        return fitting.pop()
    placed = f"of {shape}, placed as {', '.join(map(str, placements))} on a mesh of {mesh_shape}, at {coordinate}"
    if fitting:
        raise ValueError(
            f"the position of the local {size} {placed} is ambiguous, since the sizes do not divide evenly"
        )
    raise ValueError(f"local part must be {found[0].shape} {placed}, got {size}")


def iterate_shards(
    shape: Shape, mesh_shape: Shape, placements: Placements, order: tuple[int, ...] | None = None
) -> Iterator[tuple[Shape, HeldShards]]:
    """Yield the boxes at each coordinate of the mesh, in the mesh's order."""
    for coordinate in itertools.product(*map(range, mesh_shape)):
        yield coordinate, find_held_shards(shape, mesh_shape, placements, coordinate, order)


def find_coordinates(
    shape: Shape, mesh_shape: Shape, placements: Placements, box: Box, order: tuple[int, ...] | None = None
) -> Iterator[Shape]:
    """Yield the coordinates of a mesh whose boxes meet a box, without a look at the others.

    >>> sorted(find_coordinates((8, 4), (2, 4), (Copy(), Split(0)), Box((3, 0), (2, 4))))
    [(0, 1), (0, 2), (1, 1), (1, 2)]
    """
    wanted = [(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True)]
    found = [([[(0, size)] for size in shape], dict[int, int]())]
    for mesh_dim in range(len(mesh_shape)) if order is None else order:
        placement, parts = placements[mesh_dim], mesh_shape[mesh_dim]
        if isinstance(placement, Copy):
            continue
        low, high = wanted[placement.dim]
        strides = placement.strides if order is None else 1
        cut = []
        for axes, chosen in found:
            axis = axes[placement.dim]
            indices = range(parts)
            if strides == 1 and len(axis) == 1 and axis[0][1] > axis[0][0]:  # nearly always: most are not even cut
                begin, end = axis[0]
                step = -(-(end - begin) // parts)
                indices = range(max(0, (low - begin) // step), min(parts, -(-(high - begin) // step)))
            for index in indices:
                share = _take_share(axis, strides, parts, index)
                if any(first < high and low < last for first, last in share):
                    below = [share if dim == placement.dim else each for dim, each in enumerate(axes)]
                    cut.append((below, {**chosen, mesh_dim: index}))
        found = cut
    for _, chosen in found:
        free = ((chosen[dim],) if dim in chosen else range(size) for dim, size in enumerate(mesh_shape))
        yield from itertools.product(*free)


def parse_placements(texts: Sequence[str]) -> Placements | None:
    """Return placements from their texts; None if one is unknown."""
    made: list[Placement] = []
    for text in texts:
        found = _PLACEMENT.fullmatch(text)
        if found is None:
            return None
        made.append(Copy() if found[1] is None else Split(int(found[1]), int(found[2] or 1)))
    return tuple(made)


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


# Grids: which elements of a source tensor become which elements of a target tensor.
#
# A grid is the common form of splits, concatenations, stacks, transpositions and reshapes. It has factors. Each
# factor is a run of indices with a step along one axis of the source, and a step along one axis of the target.
# Exchanging the two sides gives the reverse.

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
