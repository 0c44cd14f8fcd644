"""The stored form of compressed files, as manifests describe it: a page with a header, and blocks of `split+zstd`."""

from __future__ import annotations

from dataclasses import dataclass

CODEC = "split+zstd"
MOST_TIMES = 256
"""Maximum ratio of a block. A shorter one is filled with zeros, so no small file can claim a huge tensor."""
TINY = 4096
"""Bytes of a range below which it shares blocks with ranges of other kinds, so that most blocks are longer."""
PAGE = 4096
"""Bytes of a stored file before its first block: a header."""
RECORD = 16
"""Bytes that describe one block in a table."""


@dataclass(frozen=True, slots=True)
class PackedResult:
    """A compressed file, as the manifest describes it."""

    size: int
    """Bytes of the stored file."""
    table: bytes
    digest: str


def longest_table(size: int) -> int:
    """Return the maximum length of the table of a file: blocks shorter than TINY are next to longer ones."""
    return RECORD * (4 + 2 * size // TINY)
