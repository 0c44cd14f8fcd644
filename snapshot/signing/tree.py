"""SHA-256 trees over files: leaves over blocks, a root over the leaves, and the signed statement over all roots.

A range is verified by the blocks that it touches and by the leaves of its file. Leaves and roots are hashed with
different prefixes, so neither can pass for the other. A root includes the size of its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from snapshot.storage import Buffer

LEAF = 256 << 10
"""Bytes of a leaf's block."""
SIZE = 32
"""Length of one hash in bytes."""
_LEAF_MARK = b"snapshot leaf\0"
_ROOT_MARK = b"snapshot file\0"


def count_leaves(nbytes: int) -> int:
    """Return the number of leaves of a file."""
    return -(-nbytes // LEAF)


def hash_root(nbytes: int, leaves: Buffer) -> bytes:
    """Return the root of a file with this size and these leaves."""
    made = hashlib.sha256(_ROOT_MARK)
    made.update(nbytes.to_bytes(8, "little"))
    made.update(leaves)
    return made.digest()


@dataclass(frozen=True, slots=True)
class FileTree:
    """The tree of one file."""

    size: int
    leaves: bytes

    @property
    def root(self) -> bytes:
        """The hash over the size and all leaves."""
        return hash_root(self.size, self.leaves)


class RunningTree:
    """The tree of a file whose bytes arrive in order, in pieces of any length."""

    __slots__ = ("_filled", "_leaves", "_open", "_size")

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._open = hashlib.sha256(_LEAF_MARK)
        self._filled = 0
        self._size = 0

    def update(self, buffers: Iterable[Buffer]) -> None:
        """Add the next bytes."""
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue
            view, position = view.cast("B"), 0
            while position < len(view):
                taken = min(LEAF - self._filled, len(view) - position)
                self._open.update(view[position : position + taken])
                position += taken
                self._filled += taken
                if self._filled == LEAF:
                    self._close_leaf()

    def _close_leaf(self) -> None:
        self._leaves.append(self._open.digest())
        self._size += self._filled
        self._open, self._filled = hashlib.sha256(_LEAF_MARK), 0

    def finish(self) -> FileTree:
        """Return the tree of all bytes."""
        if self._filled:
            self._close_leaf()
        return FileTree(self._size, b"".join(self._leaves))


def tree_of(*buffers: Buffer) -> FileTree:
    """Return the tree of bytes that are in memory.

    >>> tree_of(b"ab", b"c") == tree_of(b"abc")
    True
    """
    running = RunningTree()
    running.update(buffers)
    return running.finish()


def signature_path(save_id: str) -> str:
    """Return the path of a snapshot's signature."""
    return f"data/{save_id}.signature"


def leaves_path(location: str) -> str:
    """Return the path of the file with the leaves of a data file: one for all files of a rank.

    >>> leaves_path("data/0123456789ab-3-1.safetensors")
    'data/0123456789ab-3.sha256'
    """
    save_id, rank = location.partition(".")[0].split("-")[:2]
    return f"{save_id}-{rank}.sha256"


def join_leaves(trees: Mapping[str, FileTree]) -> dict[str, bytes]:
    """Return the content of each file of leaves. A file with one leaf needs none: its root shows the leaf."""
    made: dict[str, list[bytes]] = {}
    for location in sorted(trees):
        if len(trees[location].leaves) > SIZE:
            made.setdefault(leaves_path(location), []).append(trees[location].leaves)
    return {path: b"".join(parts) for path, parts in made.items()}


def place_leaves(sizes: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """Return where the leaves of each file with several leaves are: a file, begin and end."""
    places: dict[str, tuple[str, int, int]] = {}
    used: dict[str, int] = {}
    for location in sorted(sizes):
        nbytes = count_leaves(sizes[location]) * SIZE
        if nbytes > SIZE:
            path = leaves_path(location)
            begin = used.get(path, 0)
            used[path] = begin + nbytes
            places[location] = path, begin, begin + nbytes
    return places
