"""Boxes of tensors in Megatron-core's sharded state dicts."""

from __future__ import annotations

import sys
from typing import Any

import torch

from snapshot.errors import SnapshotError
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors import composite
from snapshot.tensors.geometry import Box, Shape, is_inside
from snapshot.text import with_article

MAPPING = "megatron.core.dist_checkpointing.mapping"


def is_of(value: Any, name: str) -> bool:
    """Return True if a value is an instance of this class of Megatron's mapping module."""
    kind = getattr(sys.modules.get(MAPPING), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


class MegatronBoxes:
    """All boxes of one tensor on this rank: the `ShardedTensor`s with one key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.parts: list[Any] = []
        self.shape: Shape = ()
        self.flexible = False
        """True if the stored tensor may be longer or shorter, such as a padded vocabulary."""

    def add(self, part: Any) -> None:
        """Add a `ShardedTensor`, which must describe the same global tensor as the previous ones."""
        if getattr(part, "flattened_range", None) is not None:
            raise SnapshotError(f"{self.key}: flattened ranges are not supported, as in current Megatron-core")
        shape = tuple(map(int, part.global_shape))
        if self.parts and (shape, part.dtype) != (self.shape, self.parts[0].dtype):
            raise SnapshotError(
                f"{self.key}: all parts must have one dtype and shape, got {self.parts[0].dtype}{list(self.shape)} "
                f"and {part.dtype}{list(shape)}"
            )
        if not is_inside(box_of(part), shape):
            raise SnapshotError(f"{self.key}: part [{box_of(part)}] is not within shape {list(shape)}")
        self.shape = shape
        self.flexible = self.flexible or bool(part.allow_shape_mismatch)
        self.parts.append(part)

    def within(self, shape: Shape) -> MegatronBoxes:
        """Return the same boxes, limited to a stored tensor of another shape."""
        made = MegatronBoxes(self.key)
        made.parts, made.shape = self.parts, shape
        return made

    def clear_outside(self, shape: Shape) -> None:
        """Set elements beyond the stored shape to zero, as Megatron does."""
        for part in self.parts:
            box, held = box_of(part), data_of(part)
            common = _common(box, shape)
            if common is None:
                held.zero_()
                continue
            for dim, (size, full) in enumerate(zip(common.sizes, box.sizes, strict=True)):
                if size < full:
                    held.narrow(dim, size, full - size).zero_()

    def __snapshot_shards__(self, path: str) -> Shards:
        pieces = []
        for part in self.parts:
            box = _common(box_of(part), self.shape)
            if box is None:
                continue
            held = data_of(part)
            if composite.plain_subclass_name(held) is None or held.layout is not torch.strided:
                raise SnapshotError(
                    f"{path} must be plain, got {with_article(type(held).__qualname__)} of layout {held.layout}"
                )
            view = held.as_subclass(torch.Tensor)[tuple(slice(0, size) for size in box.sizes)]
            pieces.append(LocalPiece(box, view, None, 0 if is_main(part.replica_id) else 1))
        dtype = self.parts[0].dtype
        return Shards("ShardedTensor", dtype, self.shape, pieces, None, None, None, "", False)

    def __repr__(self) -> str:
        return f"Boxes({self.key!r}, {len(self.parts)} of {list(self.shape)})"


def box_of(part: Any) -> Box:
    """Return the box of a `ShardedTensor` in the global tensor. Prepended axes have length 1."""
    sizes = (1,) * part.prepend_axis_num + tuple(map(int, part.local_shape))
    return Box(tuple(map(int, part.global_offset)), sizes)


def data_of(part: Any) -> torch.Tensor:
    """Return the part's memory, with as many dimensions as the global tensor."""
    if part.data is None:
        raise SnapshotError(f"{part.key}: cannot save a ShardedTensor without data")
    held: torch.Tensor = part.data.detach()
    return held[(None,) * part.prepend_axis_num]


def is_main(replica: Any) -> bool:
    """Return True for the replica that is stored."""
    return replica == 0 if isinstance(replica, int) else all(number == 0 for number in replica)


def _common(box: Box, shape: Shape) -> Box | None:
    sizes = tuple(min(size, whole - begin) for begin, size, whole in zip(box.offsets, box.sizes, shape, strict=True))
    return Box(box.offsets, sizes) if all(size > 0 for size in sizes) else None
