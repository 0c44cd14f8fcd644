"""Digests: 128-bit xxh3 over a range, by blocks of 256 KiB for longer ranges.

Blocks are digested in any order, by any thread, while they are in the CPU cache. A partial read verifies only the
blocks that it touches. The digests protect against accidents, not against attackers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
