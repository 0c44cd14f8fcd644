"""SHA-256 trees over files, for signatures: leaves over blocks, and a root over the leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from snapshot.io.storage import Buffer

# SHA-256 trees over files: leaves over blocks, and a root over the leaves.
#
# A range is verified by the blocks that it touches and by the leaves of its file. Leaves and roots are hashed with
# different prefixes, so neither can pass for the other. A root includes the size of its file.

LEAF = 256 << 10
"""Bytes of a leaf's block."""
SIZE = 32
"""Length of one hash in bytes."""
_LEAF_MARK = b"snapshot leaf\0"
_ROOT_MARK = b"snapshot file\0"
Root = tuple[int, str]
"""Size and root of a file; the root is in hexadecimal."""


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


def root_of(tree: FileTree) -> Root:
    """Return the size and the root of a tree."""
    return tree.size, tree.root.hex()
