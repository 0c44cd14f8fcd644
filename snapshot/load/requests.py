"""Read requests: ranges of files, where their bytes belong, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from snapshot.formats.embedded_tensors import EmbeddedLayout
from snapshot.manifest.entries import ObjectEntry, TensorEntry
from snapshot.runtime.arena import Slot
from snapshot.tensors.digest import BLOCK, SIZE, block_digest

Place = Callable[[int, Slot, int, int], None]
"""Called with (position in the stored range, slot, position in the slot, length): the bytes are to be copied from
there."""


class ReadRequest(msgspec.Struct, gc=False):
    """A stored range that is to be read: all of it, or some of its blocks."""

    name: str
    stored: TensorEntry | ObjectEntry
    location: str
    begin: int
    end: int
    address: int = 0
    """Where its first byte belongs; 0 if it is to be placed."""
    place: Place | None = None
    live: bool = False
    """Whether it is an application's own tensor that is written to."""
    check: BlockCheck | None = None
    opens: Callable[[EmbeddedLayout], list[ReadRequest]] | None = None
    """Of a packed tensor: what is wanted of the file itself, once it is known where in the range it is."""


def request_all(
    name: str, stored: TensorEntry | ObjectEntry, address: int = 0, place: Place | None = None, live: bool = False
) -> ReadRequest:
    """Return the request for a whole stored range."""
    begin, end = stored.byte_range
    return ReadRequest(name, stored, stored.location, begin, end, address, place, live)


class BlockCheck:
    """The digests of a long range's blocks, as they come in from several threads.

    With a `table` each block is compared at once; without, all of them make a table when the last one is there.
    """

    __slots__ = ("bad", "digests", "left", "table")

    def __init__(self, nbytes: int, table: bytes | None) -> None:
        self.left = nbytes
        self.table = table
        self.digests = bytearray(-(-nbytes // BLOCK) * SIZE)
        self.bad: str | None = None

    def update(self, at: int, data: memoryview) -> None:
        """Take whole blocks that begin at `at` bytes into the range."""
        first = at // BLOCK
        made = b"".join(block_digest(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))
        if self.table is None:
            self.digests[first * SIZE : first * SIZE + len(made)] = made
        else:
            expected = self.table[first * SIZE : first * SIZE + len(made)]
            if made != expected:
                wrong = next(i for i in range(0, len(made), SIZE) if made[i : i + SIZE] != expected[i : i + SIZE])
                block = first + wrong // SIZE
                self.bad = (
                    f"block {block} (bytes {block * BLOCK} on) is xxh3:{made[wrong : wrong + SIZE].hex()}, "
                    f"and xxh3:{expected[wrong : wrong + SIZE].hex()} was written"
                )
