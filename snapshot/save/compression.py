"""Compression of data files in memory: a storage must know the size of a file before it is created."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from snapshot.errors import StorageError
from snapshot.io.aio import in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.session import Session
from snapshot.io.storage import Buffer
from snapshot.io.system import allocate
from snapshot.plan.layout import FilePlan, MiB
from snapshot.save.pace import compression_pays
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import BLOCK, block_digest, digest_range, digest_table
from snapshot.tensors.packed_files import CODEC, PAGE, RECORD, PackedResult
from snapshot.tensors.split_zstd import (
    cut_blocks,
    encode_table,
    kind_of,
    load_zstd,
    sum_stored,
    thread_codec,
)
from snapshot.text import size_text

LARGEST_PACKED = 256 * MiB
SMALLEST_PACKED = MiB
"""Bounds of a compressed file's length before compression."""
WORTH_A_FILE = 32 * MiB
FILES = 32
"""Number of files from which on they may be longer than WORTH_A_FILE."""
ARGUMENT = (None, "zstd", "auto")
"""Values of the argument `compression`."""
NOTICE = "compressed; restore it, or convert it with `snapshot convert`"
_JSON = msgspec.json.Encoder()
Layout = Callable[[FilePlan], tuple[int, Iterable[tuple[int, int]]]]
"""A function that returns the length of a file's header, and the length and the kind of each range after it."""
Publish = Callable[["PackedResult | None"], Coroutine[Any, Any, None]]
"""A function that gets the stored form of a file before it is written; None for one that is not compressed."""


def expect_compression(value: object) -> None:
    """Raise `ValueError` for a wrong value of the argument, and `MissingExtraError` if zstd is not installed."""
    if value not in ARGUMENT:
        raise ValueError(f"compression must be None, 'zstd' or 'auto', got {value!r}")
    if value is not None:
        load_zstd()


@dataclass(frozen=True, slots=True)
class Packing:
    """The compression of an operation's data files."""

    memory: MemoryBudget
    """Memory of the files that are compressed or written. It is apart from the budget of staged parts, which wait for
    it."""
    layout: Layout
    at_once: int = 4
    """Maximum number of files that are compressed at once; others are written meanwhile."""
    spill: str = ""
    """A folder for temporary files, for files that are longer than the memory."""
    publish: Publish | None = None

    def kinds(self, file: FilePlan) -> bytes:
        """Return the kind of each range of a file."""
        return bytes(kind for _, kind in self.layout(file)[1])

    def longest_file(self, total: int) -> int:
        """Return the length of files that are compressed in this memory, each on a core, while one is written.

        Files of a short state are shorter: a link waits until the first one is compressed.
        """
        room = self.memory.limit // (self.at_once + 1) // MiB * MiB
        return max(SMALLEST_PACKED, min(LARGEST_PACKED, room, max(WORTH_A_FILE, total // FILES // MiB * MiB)))

    def packer(self, file: FilePlan, room: memoryview) -> FilePacker:
        """Return what compresses a file into `room`, which is as long as the file and a page."""
        return FilePacker(*self.layout(file), room)

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Yield room for a file: memory of the budget, or for a long one a temporary file."""
        if self.spill and arena_bytes(nbytes) > self.memory.limit:
            with tempfile.TemporaryFile(prefix=".packing-", dir=self.spill) as file:
                try:
                    await in_thread(allocate, file.fileno(), nbytes)  # a full disk is an error only here
                except OSError as error:
                    raise StorageError(
                        f"{self.spill}: a temporary file of {size_text(nbytes)} cannot be created: {error}"
                    ) from error
                memory = mmap.mmap(file.fileno(), nbytes)  # stays mapped until the end
                yield memoryview(memory)
            return
        async with self.memory.slot(arena_bytes(nbytes)) as slot:
            yield slot.view


def pack_leaves(session: Session, leaves: Sequence[Leaf]) -> Packing:
    """Return the compression of data files with these leaves, in half of the session's budget."""
    memory = session.budget.set_aside(session.budget.total // 2)
    return Packing(memory, _layout_of_leaves(leaves), session.settings.lane_count())


def choose_packing(compression: str, session: Session, leaves: Sequence[Leaf]) -> Packing | None:
    """Return the compression of a take's data files; None if it would take longer than writing all bytes."""
    if compression == "auto" and not compression_pays(session, leaves):
        return None
    return pack_leaves(session, leaves)


def _layout_of_leaves(leaves: Sequence[Leaf]) -> Layout:
    """Return a function that returns the layout of a planned file with some of these leaves."""

    def ranges(file: FilePlan) -> Iterable[tuple[int, int]]:
        kinds: dict[str, int] = {}
        for extent in file.extents:
            dtype = leaves[extent.leaf].dtype
            if dtype not in kinds:
                kinds[dtype] = kind_of(dtype)
            yield extent.end - extent.begin, kinds[dtype]

    return lambda file: (len(file.header), ranges(file))


class FilePacker:
    """Compresses a file whose bytes arrive in order."""

    def __init__(self, header: int, ranges: Iterable[tuple[int, int]], out: memoryview) -> None:
        """`header`: bytes before the first range. `out` has room for the whole file and a page."""
        self._blocks = iter(cut_blocks(header, ranges))
        self._header = header
        self._out = out
        self._used = PAGE
        self._size = 0
        self._records: list[tuple[int, int, int, int]] = [(PAGE, 0, 0, 0)]
        self._digests: list[bytes] = []
        self._digested = 0
        self._open = bytearray(BLOCK)
        self._filled = 0
        self._length, self._kind = next(self._blocks, (0, 1))

    def feed(self, buffers: Sequence[Buffer]) -> None:
        """Add the next bytes, in pieces of any length."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            position = 0
            while position < len(view):
                if not self._filled and len(view) - position >= self._length:
                    self._add(view[position : position + self._length])
                    position += self._records[-1][1]
                    continue
                taken = min(self._length - self._filled, len(view) - position)
                self._open[self._filled : self._filled + taken] = view[position : position + taken]
                self._filled += taken
                position += taken
                if self._filled == self._length:
                    self._filled = 0
                    self._add(memoryview(self._open)[: self._length])

    def _add(self, block: memoryview) -> None:
        length, begin = len(block), self._used
        if self._size < self._header:  # the header is never compressed
            self._out[begin : begin + length] = block
            stored = length
        else:
            stored = thread_codec().encode(block, self._kind, self._out[begin : begin + length])
        self._used += stored
        self._digest_blocks()
        self._size += length
        self._records.append((stored, length, self._kind, sum_stored(self._out[begin : begin + stored])))
        self._length, self._kind = next(self._blocks, (0, 1))

    def finish(self) -> PackedResult | None:
        """Complete the stored file in `out`. Return None if nothing is gained: then the file is there after a page."""
        if self._used + RECORD * len(self._records) >= self._size:
            self._unpack()
            return None
        data = self._used - PAGE
        text = _JSON.encode(
            {
                "__metadata__": {"format": CODEC, "snapshot": NOTICE},
                f"data[{CODEC}]": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]},
            }
        )
        page = (PAGE - 8).to_bytes(8, "little") + text.ljust(PAGE - 8)
        self._out[:PAGE] = page
        self._records[0] = (PAGE, 0, 0, sum_stored(page))
        return PackedResult(self._used, encode_table(self._records), self._finish_digest())

    def _unpack(self) -> None:
        """Decompress all blocks in place. The last one is first, since each moves towards the end."""
        stored, begin = self._used, PAGE + self._size
        for length, size, kind, _ in reversed(self._records[1:]):
            stored, begin = stored - length, begin - size
            target = self._out[begin : begin + size]
            if length == size:
                self._open[:size] = self._out[stored : stored + length]
            else:
                thread_codec().decode(self._out[stored : stored + length], kind, memoryview(self._open)[:size])
            target[:] = memoryview(self._open)[:size]

    def _digest_blocks(self) -> None:
        """Digest stored bytes while they are in a CPU cache; the first block waits for its header."""
        while self._used - self._digested >= BLOCK:
            begin = self._digested
            self._digests.append(block_digest(self._out[begin : begin + BLOCK]) if begin else b"")
            self._digested += BLOCK

    def _finish_digest(self) -> str:
        if not self._digests:
            return digest_range(self._out[: self._used])
        self._digests[0] = block_digest(self._out[:BLOCK])
        if self._digested < self._used:
            self._digests.append(block_digest(self._out[self._digested : self._used]))
        return digest_table(b"".join(self._digests)) if len(self._digests) > 1 else digest_range(self._out[:BLOCK])
