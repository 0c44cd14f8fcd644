"""Views into a storage, and the test if a view is a box in a tensor of C order.

All counts are in elements. Nearly every saved view is one: a slice, a transposition, or both.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of C order.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def measure_span(shape: Shape, strides: Shape) -> int:
    """Return the distance from a view's first element to its end, in elements of storage.

    >>> measure_span((2, 3), (10, 2))
    15
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class EnclosingTensor(NamedTuple):
    """A tensor of C order with the same first element as a view, which is a box of it."""

    order: Shape
    """The view's dimensions by decreasing stride: its permutation."""
    sizes: Shape
    """Shape of the enclosing tensor. It has one more dimension than the view if the view's last stride exceeds 1."""

    @property
    def padded(self) -> bool:
        """True if there is one more dimension, in which the view has only the first element."""
        return len(self.sizes) > len(self.order)


def find_enclosing_tensor(shape: Shape, strides: Shape) -> EnclosingTensor | None:
    """Return the tensor that a view is a box of; None if its elements overlap or interleave.

    >>> find_enclosing_tensor((3, 2), (1, 10))
    EnclosingTensor(order=(1, 0), sizes=(2, 10))
    >>> find_enclosing_tensor((2, 3), (10, 2))
    EnclosingTensor(order=(0, 1), sizes=(2, 5, 2))
    >>> find_enclosing_tensor((4, 4), (0, 1)) is None
    True
    """
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] != 1, -strides[axis], axis)))
    sizes: list[int] = []
    step = 0
    for axis in order:
        size, stride = shape[axis], strides[axis]
        if size == 1:
            sizes.append(1)
            continue
        if stride <= 0:
            return None
        if step:  # the previous stride must be a multiple of this one
            count, rest = divmod(step, stride)
            if rest or count < size:
                return None
            size = count
        sizes.append(size)
        step = stride
    if step > 1:
        sizes.append(step)
    return EnclosingTensor(order, tuple(sizes))
