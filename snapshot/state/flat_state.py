"""The result of flattening: entries in order, leaves and blobs by path, and shared memory."""

from __future__ import annotations

from snapshot.manifest.entry import Entry
from snapshot.state.leaves import Blob, Leaf
from snapshot.state.sharded import Shards

LOW = 1 << 40
"""Ordinary addresses are above it; offsets of views into freed memory are below."""


class FlatState:
    """A flattened app state. `entries` is in order; a leaf's entry is None until the leaf was written."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry | None] = {}
        self.leaves: list[Leaf] = []
        self.blobs: list[Blob] = []
        self.shards: dict[str, Shards] = {}
        """Tensors with boxes that other processes may hold."""
        self.ties: dict[str, str] = {}
        """Path -> the path of the leaf that is the same view of the same memory."""
        self.pickled: list[str] = []
        self.lossy: list[str] = []
        """Tensors with attributes of Python, which are not stored."""
        self.excluded: list[str] = []
        self.once: set[str] = set()
        """Paths that this rank stores for all: see `FromOneRank`."""
        self.seen: dict[int, Leaf | list[Leaf]] = {}
        """Address -> the leaf, or leaves, whose memory begins there."""
