"""Digests of bytes: XXH3 for each range, and SHA-256 trees over files, for signatures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from snapshot.io.storage import Buffer

BLOCK = 256 << 10
SIZE = 16
"""Length of one digest in bytes."""

block_digest = xxhash.xxh3_128_digest
_hex = xxhash.xxh3_128_hexdigest


def digest_range(data: Buffer) -> str:
    """Return the digest of a range of at most one block, or of a document.

    >>> digest_range(b"")
    'xxh3:99aa06d3014798d86001c324468d497f'
    """
    return "xxh3:" + _hex(data)


def digest_table(table: Buffer) -> str:
    """Return the digest of a longer range, from the table of its blocks' digests."""
    return "xxh3:" + _hex(table)


def digest_bytes(data: Buffer) -> str:
    """Return the digest of a range of any length."""
    view = memoryview(data).cast("B")
    if len(view) <= BLOCK:
        return digest_range(view)
    return digest_table(b"".join(block_digest(view[begin : begin + BLOCK]) for begin in range(0, len(view), BLOCK)))


def split_digests(joined: bytes) -> list[bytes]:
    """Return concatenated digests as a list."""
    return [joined[at : at + SIZE] for at in range(0, len(joined), SIZE)]


def count_blocks(nbytes: int) -> int:
    """Return the number of blocks in a range's table; 0 if it needs no table."""
    return -(-nbytes // BLOCK) if nbytes > BLOCK else 0


class RunningDigest:
    """Digest of one range whose bytes arrive in order, in pieces of any length."""

    __slots__ = ("_compared", "_open", "_open_bytes", "_table")

    def __init__(self) -> None:
        self._table: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0
        self._compared = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes; whole blocks are digested in place, and a partial block is carried over."""
        position = 0
        if self._open_bytes:
            position = min(BLOCK - self._open_bytes, len(data))
            self._carry(data[:position])
        whole = position + (len(data) - position) // BLOCK * BLOCK
        self._table += [block_digest(data[begin : begin + BLOCK]) for begin in range(position, whole, BLOCK)]
        if whole < len(data):
            self._carry(data[whole:])

    def _carry(self, data: memoryview) -> None:
        self._open.update(data)
        self._open_bytes += len(data)
        if self._open_bytes == BLOCK:
            self._table.append(self._open.digest())
            self._open.reset()
            self._open_bytes = 0

    def begins(self, table: bytes) -> bool:
        """Return True if the digests of the whole blocks since the last call are those at the same place in a table."""
        begin, self._compared = self._compared, len(self._table)
        return b"".join(self._table[begin:]) == table[begin * SIZE : len(self._table) * SIZE]

    def finish(self) -> tuple[str, bytes]:
        """Return the digest of all bytes, and the table of block digests (empty for a single block)."""
        table: Sequence[bytes] = self._table
        if self._open_bytes or not table:
            table = [*table, self._open.digest()]
        if len(table) == 1:
            return "xxh3:" + table[0].hex(), b""
        joined = b"".join(table)
        return digest_table(joined), joined


# SHA-256 trees over files: leaves over blocks, and a root over the leaves.
#
# A range is verified by the blocks that it touches and by the leaves of its file. Leaves and roots are hashed with
# different prefixes, so neither can pass for the other. A root includes the size of its file.

LEAF = 256 << 10
"""Bytes of a leaf's block."""
HASH_SIZE = 32
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
