"""Megatron-core's sharded state dicts, taken apart: what in them is a tensor's box, an object at a position, or common
to all ranks; and put together again, as Megatron's own `load` gives them back.

Nothing here imports Megatron: who has its objects has imported it already.
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
"""The name under which what is not sharded stands beside the tensors and objects, as in Megatron's own directories."""
NOTHING: Any = object()
"""Stands where nothing is common."""


def is_of(value: Any, name: str) -> bool:
    """Whether a value is of a class of Megatron's mapping."""
    kind = getattr(sys.modules.get(MAPPING), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """What a factory made of its tensor, in the tensor's place."""

    merge: Callable[[Any], Any]
    tree: Any


class MegatronBoxes:
    """All that this rank holds of one tensor: the `ShardedTensor`s of one key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.parts: list[Any] = []
        self.shape: Shape = ()
        self.flexible = False
        """Whether the stored tensor may be longer or shorter: a padded vocabulary."""

    def add(self, part: Any) -> None:
        """Add a `ShardedTensor`, which must describe the same whole as those before."""
        if getattr(part, "flattened_range", None) is not None:
            raise SnapshotError(f"{self.key}: has a flattened range, which Megatron-core itself no longer takes")
        shape = tuple(map(int, part.global_shape))
        if self.parts and (shape, part.dtype) != (self.shape, self.parts[0].dtype):
            raise SnapshotError(
                f"{self.key}: is {self.parts[0].dtype}{list(self.shape)}, and in the same state dict also "
                f"{part.dtype}{list(shape)}"
            )
        if not is_inside(box_of(part), shape):
            raise SnapshotError(f"{self.key}: the part [{box_of(part)}] is not within a tensor of shape {list(shape)}")
        self.shape = shape
        self.flexible = self.flexible or bool(part.allow_shape_mismatch)
        self.parts.append(part)

    def within(self, shape: Shape) -> MegatronBoxes:
        """Return the same boxes, as far as they lie in a stored tensor of another shape."""
        made = MegatronBoxes(self.key)
        made.parts, made.shape = self.parts, shape
        return made

    def clear_outside(self, shape: Shape) -> None:
        """Zero what no stored element reaches, as Megatron does."""
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
                    f"{path}: is {with_article(type(held).__qualname__)} of layout {held.layout}, not a plain tensor"
                )
            view = held.as_subclass(torch.Tensor)[tuple(slice(0, size) for size in box.sizes)]
            pieces.append(LocalPiece(box, view, None, 0 if is_main(part.replica_id) else 1))
        dtype = self.parts[0].dtype
        return Shards("ShardedTensor", dtype, self.shape, pieces, None, None, None, "", False)

    def __repr__(self) -> str:
        return f"Boxes({self.key!r}, {len(self.parts)} of {list(self.shape)})"


def box_of(part: Any) -> Box:
    """Where a `ShardedTensor` lies in the whole: the axes that were put before its own are of length 1."""
    sizes = (1,) * part.prepend_axis_num + tuple(map(int, part.local_shape))
    return Box(tuple(map(int, part.global_offset)), sizes)


def data_of(part: Any) -> torch.Tensor:
    """Its memory, with as many dimensions as the whole has."""
    if part.data is None:
        raise SnapshotError(f"{part.key}: is a ShardedTensor without data, so there is nothing to save")
    held: torch.Tensor = part.data.detach()
    return held[(None,) * part.prepend_axis_num]


def is_main(replica: Any) -> bool:
    """Whether this is the copy that is to be stored."""
    return replica == 0 if isinstance(replica, int) else all(number == 0 for number in replica)


def _common(box: Box, shape: Shape) -> Box | None:
    sizes = tuple(min(size, whole - begin) for begin, size, whole in zip(box.offsets, box.sizes, shape, strict=True))
    return Box(box.offsets, sizes) if all(size > 0 for size in sizes) else None


def built(value: Any) -> Any:
    """Return a copy of the containers, in which factories have built what they stand for. Dicts and lists are looked
    into, as Megatron does."""
    if isinstance(value, dict):
        return {key: built(child) for key, child in value.items()}
    if isinstance(value, list):
        return [built(child) for child in value]
    if is_of(value, "ShardedTensorFactory"):
        return Built(value.merge_fn, built(value.build()))
    return value


class Parts:
    """What a state dict holds, by kind, in order."""

    def __init__(self, tree: Any) -> None:
        self.tensors: dict[str, MegatronBoxes] = {}
        self.objects: dict[str, Any] = {}
        """By their unique keys: objects of several ranks share a key, and not that."""
        self._add(tree)
        common = _common_of(tree)
        self.common: Any = {} if common is NOTHING else common
        taken = self.tensors.keys() & (self.objects.keys() | {COMMON}) or self.objects.keys() & {COMMON}
        if taken:
            raise SnapshotError(f"{sorted(taken)[0]}: is the name of several things in one sharded state dict")

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
            raise SnapshotError(f"{with_article(type(tree).__qualname__)} is of a kind that is not known here")


def _common_of(tree: Any) -> Any:
    """Return what is neither sharded nor local: containers with nothing of it are left out, but for those that were
    empty."""
    if isinstance(tree, dict):
        held = {key: _common_of(child) for key, child in tree.items()}
        kept = {key: child for key, child in held.items() if child is not NOTHING}
        return kept if kept or not tree else NOTHING
    if isinstance(tree, list):
        items = [_common_of(child) for child in tree]
        if tree and all(item is NOTHING for item in items):
            return NOTHING
        return [None if item is NOTHING else item for item in items]  # a place for what is sharded
    if isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject"):
        return NOTHING
    return tree


def filled(tree: Any, common: Any, objects: dict[str, Any], path: str = "") -> Any:
    """Return the state dict that Megatron's `load` would give: the snapshot's common state, and in its places the
    tensors, objects, and local values of this rank. What only the application has as common state is not in it."""
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
    """Whether anything beneath is given back in a place of its own."""
    if isinstance(tree, dict):
        return any(map(_has_places, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_places, tree))
    return isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject")


def _no_place(path: str, tree: Any, held: Any) -> RestoreError:
    length = f" of {len(held)}" if isinstance(held, list) else ""
    wanted = f"{type(tree).__name__} of {len(tree)}"
    return RestoreError(
        f"{COMMON}{path}: the snapshot has {with_article(type(held).__name__)}{length} here, and the sharded state "
        f"dict {with_article(wanted)} with tensors or objects in it",
        [f"{COMMON}{path}"],
    )
