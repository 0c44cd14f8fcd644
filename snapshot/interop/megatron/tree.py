"""Decomposition of Megatron-core's sharded state dicts into tensor boxes, objects and common state, and the reverse.

Reassembly returns what Megatron's own `load` would return. Nothing here imports Megatron: an application that has its
objects has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from snapshot.errors import RestoreError, SnapshotError
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors import composite
from snapshot.tensors.geometry import Box, Shape, is_inside
from snapshot.text import with_article

MAPPING = "megatron.core.dist_checkpointing.mapping"
COMMON = "common_state"
"""Key of the state that is not sharded, next to the tensors and objects, as in Megatron's own directories."""
NOTHING: Any = object()
"""Placeholder if there is no common state."""


def is_of(value: Any, name: str) -> bool:
    """Return True if a value is an instance of this class of Megatron's mapping module."""
    kind = getattr(sys.modules.get(MAPPING), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """Output of a factory, in place of its tensor."""

    merge: Callable[[Any], Any]
    tree: Any


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


def built(value: Any) -> Any:
    """Return a copy of the containers in which factories have built their values. Only dicts and lists are searched."""
    if isinstance(value, dict):
        return {key: built(child) for key, child in value.items()}
    if isinstance(value, list):
        return [built(child) for child in value]
    if is_of(value, "ShardedTensorFactory"):
        return Built(value.merge_fn, built(value.build()))
    return value


class Parts:
    """Contents of a state dict, by kind, in order."""

    def __init__(self, tree: Any) -> None:
        self.tensors: dict[str, MegatronBoxes] = {}
        self.objects: dict[str, Any] = {}
        """Objects by unique key. Objects of several ranks share a key, but not the unique key."""
        self._add(tree)
        common = _common_of(tree)
        self.common: Any = {} if common is NOTHING else common
        taken = self.tensors.keys() & (self.objects.keys() | {COMMON}) or self.objects.keys() & {COMMON}
        if taken:
            raise SnapshotError(f"{sorted(taken)[0]}: several values have this name in one sharded state dict")

    def _add(self, tree: Any) -> None:
        if isinstance(tree, dict):
            for child in tree.values():
                self._add(child)
        elif isinstance(tree, list):
            for child in tree:
                self._add(child)
        elif isinstance(tree, Built):
            self._add(tree.tree)
        elif is_of(tree, "ShardedTensor"):
            self.tensors.setdefault(tree.key, MegatronBoxes(tree.key)).add(tree)
        elif is_of(tree, "ShardedObject"):
            held = self.objects.setdefault(tree.unique_key, tree)
            if not is_main(held.replica_id):
                self.objects[tree.unique_key] = tree
        elif is_of(tree, "ShardedBase"):
            raise SnapshotError(f"unknown kind of sharded value: {with_article(type(tree).__qualname__)}")


def _common_of(tree: Any) -> Any:
    """Return the state that is neither sharded nor local, without containers that become empty by that."""
    if isinstance(tree, dict):
        held = {key: _common_of(child) for key, child in tree.items()}
        kept = {key: child for key, child in held.items() if child is not NOTHING}
        return kept if kept or not tree else NOTHING
    if isinstance(tree, list):
        items = [_common_of(child) for child in tree]
        if tree and all(item is NOTHING for item in items):
            return NOTHING
        return [None if item is NOTHING else item for item in items]  # a placeholder for sharded values
    if isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject"):
        return NOTHING
    return tree


def filled(tree: Any, common: Any, objects: dict[str, Any], path: str = "") -> Any:
    """Return the state dict that Megatron's `load` would return.

    It has the snapshot's common state, and this rank's tensors, objects and local values in their places. Common state
    that only the application has is left out.
    """
    if not _has_places(tree):
        return common
    if isinstance(tree, dict):
        held = {} if common is NOTHING else common
        if not isinstance(held, dict):
            raise _no_place(path, tree, held)
        children = {key: filled(child, held.get(key, NOTHING), objects, f"{path}/{key}") for key, child in tree.items()}
        return {**held, **{key: child for key, child in children.items() if child is not NOTHING}}
    if isinstance(tree, list):
        held = [NOTHING] * len(tree) if common is NOTHING else common
        if not isinstance(held, list) or len(held) != len(tree):
            raise _no_place(path, tree, held)
        items = [filled(child, held[i], objects, f"{path}/{i}") for i, child in enumerate(tree)]
        if any(item is NOTHING for item in items):
            raise _no_place(path, tree, [])
        return items
    if isinstance(tree, Built):
        return tree.merge(filled(tree.tree, NOTHING, objects, path))
    return objects[tree.unique_key] if is_of(tree, "ShardedObject") else _held(tree)


def _held(leaf: Any) -> Any:
    return leaf.data if is_of(leaf, "ShardedTensor") else leaf.unwrap()


def _has_places(tree: Any) -> bool:
    """Return True if the tree contains a sharded or local value."""
    if isinstance(tree, dict):
        return any(map(_has_places, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_places, tree))
    return isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject")


def _no_place(path: str, tree: Any, held: Any) -> RestoreError:
    length = f" of {len(held)}" if isinstance(held, list) else ""
    wanted = f"{type(tree).__name__} of {len(tree)}"
    return RestoreError(
        f"{COMMON}{path}: the snapshot has {with_article(type(held).__name__)}{length} here, but the sharded state "
        f"dict {with_article(wanted)} with tensors or objects in it",
        [f"{COMMON}{path}"],
    )
