"""Read requests: ranges of files, with their destination and their verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from snapshot.formats.embedded_tensors import EmbeddedLayout
from snapshot.manifest.entries import ObjectEntry, TensorEntry
from snapshot.plan.coalesce import ReadPart
from snapshot.runtime.arena import Slot
from snapshot.tensors.digest import BLOCK, SIZE, block_digest

Place = Callable[[int, Slot, int, int], None]
"""A function that copies bytes from a slot: (position in the stored range, slot, position in the slot, length)."""


class ReadRequest(msgspec.Struct, gc=False):
    """A stored range to read: all of it, or some of its blocks."""

    name: str
    stored: TensorEntry | ObjectEntry
    location: str
    begin: int
    end: int
    address: int = 0
    """The address of its first byte; 0 if a function places the bytes."""
    place: Place | None = None
    live: bool = False
    """True if the destination is a tensor of the application."""
    check: BlockCheck | None = None
    device: torch.device | None = None
    """The accelerator of its destination, if it is on one."""
    also: tuple[str, ...] = ()
    """Names of further tensors that the range is placed in."""
    opens: Callable[[EmbeddedLayout], list[ReadRequest]] | None = None
    """For a packed tensor: returns the requests for the file itself, once its position in the range is known."""


class SharedRanges:
    """Requests for the same range become one request, also if they are for different tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ReadRequest] = {}

    def join(self, requests: list[ReadRequest], first: int) -> None:
        """Join the requests from a number on with earlier ones."""
        added = requests[first:]
        del requests[first:]
        for request in added:
            if request.address or request.opens is not None or request.place is None:
                requests.append(request)
                continue
            stored = request.stored
            key = (
                request.location,
                request.begin,
                request.end,
                request.live,
                request.device,
                stored.byte_range,
                stored.digest,
                stored.blocks,
            )
            known = self._known.setdefault(key, request)
            if known is request:
                requests.append(request)
            elif isinstance(known.place, _Places):
                known.place.places.append(request.place)
                known.also = (*known.also, request.name) if request.live else ()
            elif known.place is not None:
                known.place = _Places([known.place, request.place])
                known.also = (request.name,) if request.live else ()


class _Places:
    def __init__(self, places: list[Place]) -> None:
        self.places = places

    def __call__(self, start: int, slot: Slot, at: int, length: int) -> None:
        for place in self.places:
            place(start, slot, at, length)


def request_all(
    name: str, stored: TensorEntry | ObjectEntry, address: int = 0, place: Place | None = None, live: bool = False
) -> ReadRequest:
    """Return the request for a whole stored range."""
    begin, end = stored.byte_range
    return ReadRequest(name, stored, stored.location, begin, end, address, place, live)


def slot_bytes(part: ReadPart, requests: Sequence[ReadRequest]) -> int:
    """Return the slot size of a part: its bytes to place, aligned to 16, and its gaps."""
    used, position = 0, part.begin
    for segment in part.segments:
        used += max(0, segment.begin - position)
        if not requests[segment.request].address:
            used = -(-used // 16) * 16 + segment.end - segment.begin
        position = segment.end
    return used


class BlockCheck:
    """Verifies the block digests of a long range, as blocks arrive from several threads.

    With a `table`, each block is compared at once. Without one, the blocks' digests make a table when the last one
    arrived.
    """

    __slots__ = ("bad", "digests", "left", "table")

    def __init__(self, nbytes: int, table: bytes | None) -> None:
        self.left = nbytes
        self.table = table
        self.digests = bytearray(-(-nbytes // BLOCK) * SIZE)
        self.bad: str | None = None

    def update(self, at: int, data: memoryview) -> None:
        """Add whole blocks that begin at `at` bytes into the range."""
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
                    f"block {block} (bytes {block * BLOCK} on): digest must be "
                    f"xxh3:{expected[wrong : wrong + SIZE].hex()}, got xxh3:{made[wrong : wrong + SIZE].hex()}"
                )
