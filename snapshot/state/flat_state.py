"""The result of flattening: entries in order, leaves and blobs by path, and shared memory."""

from __future__ import annotations

from snapshot.manifest.entry import Entry
from snapshot.state.leaves import Blob, Leaf
from snapshot.state.sharded import Shards

LOW = 1 << 40
"""Below it no ordinary address lies, but the offsets do that views have into memory that was freed."""


class FlatState:
    """A flattened app state. `entries` is in order; a leaf's entry is None until the leaf was written."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry | None] = {}
        self.leaves: list[Leaf] = []
        self.blobs: list[Blob] = []
        self.shards: dict[str, Shards] = {}
        """Tensors of which this process may hold only some boxes."""
        self.ties: dict[str, str] = {}
        """Path -> the path of the leaf that is the very same memory, seen the same way."""
        self.pickled: list[str] = []
        self.lossy: list[str] = []
        """Tensors with attributes of Python, which are not stored."""
        self.excluded: list[str] = []
        self.once: set[str] = set()
        """What this rank gives for all: see `FromOneRank`."""
        self.seen: dict[int, Leaf | list[Leaf]] = {}
        """Address -> the leaf, or the leaves, whose memory begins there."""
