"""Boxes in a tensor, and the ranges of its flat bytes that they cover.

All counts are in elements, in C order. A box is a pair of tuples: its offsets and its sizes, by dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from snapshot.text import counted

Shape = tuple[int, ...]


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
        return ",".join(f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=True))


def whole_box(shape: Shape) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


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
