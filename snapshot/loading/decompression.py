"""Compressed files, read as if they were not: only the blocks of a range are read and decompressed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from snapshot.errors import CorruptSnapshotError
from snapshot.events import emit
from snapshot.io.aio import in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.manifest.document import FileEntry
from snapshot.tensors.digest import BLOCK, digest_range
from snapshot.tensors.packed_files import PAGE
from snapshot.tensors.split_zstd import BlockTable, load_zstd, sum_stored, thread_codec

HOT = 1 << 20
"""Stored bytes that one thread reads and decompresses at once, from a `blocking` storage: they stay in a CPU cache."""
LARGEST = 8 << 20
"""Maximum stored bytes that are read at once."""


class _Wanted:
    """A range of a file, and where its bytes are to be."""

    def __init__(self, begin: int, views: Sequence[memoryview]) -> None:
        self.begin = begin
        self._views = views
        self._begins = list(accumulate(map(len, views[:-1]), initial=begin))
        self.end = self._begins[-1] + len(views[-1])

    def parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the places of the bytes [begin, end) of the file, which are wanted."""
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            first, view = self._begins[number], self._views[number]
            yield view[begin - first : end - first]
            begin, number = first + len(view), number + 1


class _Run(NamedTuple):
    """Blocks that are read together: their stored bytes, from `begin` on."""

    blocks: range
    begin: int
    stored: memoryview


class Packed:
    """The derivation of a compressed file from the stored file of the same name."""

    def __init__(self, path: str, file: FileEntry) -> None:
        assert file.packed is not None
        self.sources = (path,)
        self._path = path
        self._size = file.size
        self._packed = file.packed
        self._table: BlockTable | None = None

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Fill the views with decompressed bytes. Damaged ones are read again: from another place, or once more."""
        again = not storage.capabilities.local
        while True:
            damaged = self._packed.index[0]
            try:
                if self._table is None:  # readers that need it at the same time read it each
                    self._table = await self._read_table(storage)
                damaged = self._path
                await self._read(storage, self._table, _Wanted(offset, views), memory, token)
                return
            except CorruptSnapshotError as error:
                if not (storage.switch_source(damaged) or again):
                    raise
                again = False
                emit("retry", "read", str(storage.url.join(damaged)), attempt=1, error=str(error), pause=0.0)

    async def _read_table(self, storage: Storage) -> BlockTable:
        location, begin, end = self._packed.index
        data = bytearray(end - begin)
        await storage.read_into(location, begin, [data])
        actual = digest_range(data)
        if actual != self._packed.index_digest:
            raise CorruptSnapshotError(
                f"{self._path}: its table of blocks in {location}[{begin}:{end}]: digest must be "
                f"{self._packed.index_digest}, got {actual}"
            )
        try:
            return BlockTable(data, self._size, self._packed.size)
        except CorruptSnapshotError as error:
            raise CorruptSnapshotError(f"{self._path}: {error}") from error

    async def _read(
        self, storage: Storage, table: BlockTable, wanted: _Wanted, memory: MemoryBudget, token: str | None
    ) -> None:
        first = PAGE if wanted.begin == 0 else 0  # the stored file's header is verified with the file's beginning
        at_once = HOT if storage.capabilities.blocking else memory.limit // max(1, storage.limits.parallel_parts)
        at_once = max(2 * BLOCK, min(at_once, LARGEST, memory.limit // 2))
        for blocks in _groups(table, table.find(wanted.begin, wanted.end), at_once):
            begin = int(table.places[blocks.start - 1]) - first
            nbytes = int(table.places[blocks.stop - 1]) - begin
            async with memory.slot(arena_bytes(nbytes)) as slot:
                stored = slot.view[:nbytes]
                await storage.read_into(self._path, begin, [stored], token=token)
                await in_thread(self._unpack, table, _Run(blocks, begin, stored), wanted)
            first = 0

    def _unpack(self, table: BlockTable, run: _Run, wanted: _Wanted) -> None:
        """Decompress blocks into those parts of the wanted bytes that they have."""
        stored = run.stored
        base = int(table.places[run.blocks.start - 1])
        if run.begin < base and sum_stored(stored[: base - run.begin]) != table.sums[0]:
            raise CorruptSnapshotError(f"{self._path}: its header does not match its checksum")
        codec, base = thread_codec(), run.begin
        for number in run.blocks:
            held = stored[int(table.places[number - 1]) - base : int(table.places[number]) - base]
            low, high = int(table.ends[number - 1]), int(table.ends[number])
            begin, stop = max(low, wanted.begin), min(high, wanted.end)
            parts = list(wanted.parts(begin, stop))
            whole = len(parts) == 1 and stop - begin == high - low
            target = parts[0] if whole else _scratch()[: high - low]
            try:
                if sum_stored(held) != table.sums[number]:
                    raise CorruptSnapshotError("its bytes do not match their checksum")
                codec.decode(held, int(table.kinds[number]), target)
            except CorruptSnapshotError as error:
                raise CorruptSnapshotError(f"{self._path}: block {number} (bytes {low} to {high}): {error}") from error
            if not whole:
                position = begin - low
                for part in parts:
                    part[:] = target[position : position + len(part)]
                    position += len(part)


def unpacking(files: Mapping[str, FileEntry]) -> dict[str, Packed]:
    """Return the derivations of the compressed ones among some files."""
    load_zstd()
    return {location: Packed(location, file) for location, file in files.items() if file.packed is not None}


def _groups(table: BlockTable, blocks: range, most: int) -> Iterator[range]:
    """Split blocks into runs of at most `most` stored bytes, or one block."""
    first = blocks.start
    for number in blocks:
        if number > first and table.places[number] - table.places[first - 1] > most:
            yield range(first, number)
            first = number
    yield range(first, blocks.stop)


_local = threading.local()


def _scratch() -> memoryview:
    """Return this thread's memory for one block."""
    if not hasattr(_local, "block"):
        _local.block = memoryview(bytearray(BLOCK))
    return _local.block  # type: ignore[no-any-return]
