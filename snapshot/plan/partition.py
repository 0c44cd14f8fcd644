"""Assignment of writers to data that several ranks have, with equal loads.

It is a pure function of data that all ranks know, so each rank finds its own share without communication.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from snapshot.tensors.geometry import Box, Shape, split_shape

SHORTEST = 256 << 10
"""Maximum length of pieces that are never split: one digest block."""
FINEST = 8
"""Pieces per rank's share, if a tensor is split."""
MOST_PIECES = 4096
"""Approximate number of pieces, for any number of ranks."""


class PartitionItem(NamedTuple):
    """A tensor, or a box of one, that several ranks have."""

    shape: Shape
    itemsize: int
    splits: bool = True
    """True if the item may be split."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self.itemsize


class Assignment(NamedTuple):
    """The part of an item that one rank writes: all of it, or a box."""

    item: int
    box: Box | None


def partition_items(items: Sequence[PartitionItem], loads: Sequence[int]) -> list[list[Assignment]]:
    """Return each rank's share, in the order of the items, given the bytes that each writes anyway.

    The longest pieces are assigned first, each to the rank with the smallest load. Long items are split before.

    >>> pieces = [PartitionItem((4,), 1), PartitionItem((2,), 1), PartitionItem((2,), 1)]
    >>> partition_items(pieces, [0, 0])
    [[Assignment(item=0, box=None)], [Assignment(item=1, box=None), Assignment(item=2, box=None)]]
    """
    shares: list[list[Assignment]] = [[] for _ in loads]
    sizes = [item.nbytes for item in items]
    total = sum(sizes)
    longest = max(SHORTEST, total // (FINEST * len(loads)), total // MOST_PIECES)
    pieces: list[tuple[int, int, Box | None]] = []
    for index, size in enumerate(sizes):
        item = items[index]
        if size <= longest or not item.splits:
            pieces.append((-size, index, None))
            continue
        even = -(-size // -(-size // longest))
        for box in split_shape(item.shape, max(1, even // item.itemsize)):
            pieces.append((-box.numel * item.itemsize, index, box))
    pieces.sort(key=lambda piece: (piece[0], piece[1]))
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    for size, index, part in pieces:
        load, rank = lightest[0]
        shares[rank].append(Assignment(index, part))
        heapq.heapreplace(lightest, (load - size, rank))
    for share in shares:
        share.sort(key=lambda dealt: (dealt.item, dealt.box or ()))
    return shares
