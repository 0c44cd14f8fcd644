"""Merging of the ranks' parts into one manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.entries import AnyTensor, ChunkedTensorEntry, Entry, Shard, ShardedTensorEntry


def merge(into: dict[str, Any], entries: Mapping[str, Any], whose: object) -> None:
    """Add one rank's entries. Parts of a tensor are joined, and all other entries must have one owner."""
    for path, entry in entries.items():
        held = into.setdefault(path, entry)
        if held is not entry:
            ours, theirs = _find_shards(held), _find_shards(entry)
            if ours is None or theirs is None or _tensor_header(held) != _tensor_header(entry):
                raise CorruptSnapshotError(f"{path}: described twice, by {whose} and by another part of the manifest")
            ours += theirs


def expect_whole_tensors(entries: Mapping[str, Any]) -> None:
    """Raise unless the parts of every tensor cover all its elements; sort the parts."""
    for path, entry in entries.items():
        shards = _find_shards(entry)
        if shards is not None:
            shards.sort(key=lambda shard: shard.offsets)
            found, expected = sum(math.prod(shard.sizes) for shard in shards), math.prod(entry.shape)
            if found != expected:
                raise CorruptSnapshotError(f"{path}: all ranks together wrote {found:,} of {expected:,} elements")


def _find_shards(entry: Entry) -> list[Shard] | None:
    if isinstance(entry, ChunkedTensorEntry):
        return entry.chunks
    return entry.shards if isinstance(entry, ShardedTensorEntry) else None


def _tensor_header(entry: AnyTensor) -> tuple[Any, ...]:
    more = (getattr(entry, name, None) for name in ("replicated", "mesh", "placements"))
    return type(entry), entry.dtype, tuple(entry.shape), *more
