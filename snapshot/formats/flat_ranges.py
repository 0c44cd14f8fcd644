"""Flat ranges of shaped tensors: parts that are a run of a tensor's elements in C order, and not a box of it.

Such a run consists of a few boxes: at most two for each dimension. Their bytes follow each other in the stored run, so
a run needs no kind of entry of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from snapshot.errors import UnsupportedFormatError
from snapshot.manifest.entries import PLAIN, Extra, Shard, ShardedTensorEntry, TensorEntry
from snapshot.tensors.geometry import Box, Shape, boxes_of_range
from snapshot.tensors.memory import ITEMSIZE, contiguous_strides


def cut_run(stored: TensorEntry, begin: int, shape: Shape) -> TensorEntry:
    """Return the elements of a stored run from `begin` on, as a tensor of some shape.

    The run is a tensor with one dimension. Its bytes may be packed, and then so are those of the part.
    """
    if stored.serializer == "raw":
        low = stored.byte_range[0] + begin * ITEMSIZE[stored.dtype]
        high = low + math.prod(shape) * ITEMSIZE[stored.dtype]
        return TensorEntry(stored.location, (low, high), stored.dtype, shape)
    known = stored.extra or PLAIN
    if known.strides not in (None, contiguous_strides(stored.shape)):
        raise UnsupportedFormatError(f"{stored.location}: a tensor that is read in parts must be contiguous")
    extra = Extra(storage_offset=(known.storage_offset or 0) + begin)
    return msgspec.structs.replace(stored, shape=shape, extra=extra)


def cut_boxes(stored: TensorEntry, begin: int, shape: Shape) -> Iterator[tuple[Box, TensorEntry]]:
    """Yield the boxes of a tensor that a stored run fills from the flat position `begin` on."""
    for at, box in boxes_of_range(shape, begin, begin + math.prod(stored.shape)):
        yield box, cut_run(stored, at - begin, box.sizes)


def join_runs(dtype: str, shape: Shape, runs: Iterable[tuple[int, TensorEntry]]) -> TensorEntry | ShardedTensorEntry:
    """Return a tensor whose flat ranges are stored runs, each with the position of its first element.

    >>> run = TensorEntry("f", (0, 12), "float32", (3,))
    >>> [shard.sizes for shard in join_runs("float32", (3, 2), [(0, run), (3, run)]).shards]
    [(1, 2), (1, 1), (1, 1), (1, 2)]
    """
    pieces = (piece for begin, stored in runs for piece in cut_boxes(stored, begin, shape))
    shards = [Shard(box.offsets, box.sizes, part) for box, part in pieces]
    if len(shards) == 1 and shards[0].sizes == shape:
        return shards[0].tensor
    return ShardedTensorEntry(dtype, shape, shards)
