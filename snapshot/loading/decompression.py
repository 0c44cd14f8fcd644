"""Compressed files, read as if they were not: only the blocks of a range are read and decompressed.

Everything above a storage counts the bytes of a compressed file as those that it has decompressed. So readers,
comparisons and copies of tensors know nothing of compression.
"""

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
from snapshot.io.storage import Buffer, Storage, StorageWrapper
from snapshot.manifest.document import FileEntry, PackedFile
from snapshot.tensors.digest import BLOCK, digest_range
from snapshot.tensors.split_zstd import PAGE, BlockTable, load_zstd, sum_stored, thread_codec

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


class DecompressingStorage(StorageWrapper):
    """Another storage, whose compressed files are read decompressed. All other calls see the stored files."""

    def __init__(self, inner: Storage, files: Mapping[str, FileEntry], memory: MemoryBudget) -> None:
        load_zstd()
        super().__init__(inner)
        self._files = {location: file for location, file in files.items() if file.packed is not None}
        self._memory = memory
        self._tables: dict[str, BlockTable] = {}
        at_once = HOT if inner.capabilities.blocking else memory.limit // max(1, inner.limits.parallel_parts)
        self._at_once = max(2 * BLOCK, min(at_once, LARGEST, memory.limit // 2))

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers with decompressed bytes. Damaged ones are read again: from another place, or once more."""
        file = self._files.get(path)
        if file is None or file.packed is None:
            await self.inner.read_into(path, offset, buffers, token=token)
            return
        again = not self.capabilities.local
        while True:
            damaged = file.packed.index[0]
            try:
                table = await self._table(path, file, file.packed)
                damaged = path
                await self._read(path, table, offset, buffers, token)
                return
            except CorruptSnapshotError as error:
                if not (self.inner.switch_source(damaged) or again):
                    raise
                again = False
                emit("retry", "read", str(self.url.join(damaged)), attempt=1, error=str(error), pause=0.0)

    async def _table(self, path: str, file: FileEntry, packed: PackedFile) -> BlockTable:
        """Return the table of a file's blocks. Readers that need it at the same time read it each."""
        table = self._tables.get(path)
        if table is None:
            table = self._tables[path] = await self._read_table(path, file, packed)
        return table

    async def _read_table(self, path: str, file: FileEntry, packed: PackedFile) -> BlockTable:
        location, begin, end = packed.index
        data = bytearray(end - begin)
        await self.inner.read_into(location, begin, [data])
        actual = digest_range(data)
        if actual != packed.index_digest:
            raise CorruptSnapshotError(
                f"{path}: its table of blocks in {location}[{begin}:{end}]: digest must be {packed.index_digest}, "
                f"got {actual}"
            )
        try:
            return BlockTable(data, file.size, packed.size)
        except CorruptSnapshotError as error:
            raise CorruptSnapshotError(f"{path}: {error}") from error

    async def _read(
        self, path: str, table: BlockTable, offset: int, buffers: Sequence[Buffer], token: str | None
    ) -> None:
        views = [view for view in (memoryview(each).cast("B") for each in buffers) if len(view)]
        if not views:
            return
        wanted = _Wanted(offset, views)
        if wanted.end > table.ends[-1]:
            raise CorruptSnapshotError(f"{self.url.join(path)}: ends before {wanted.end:,}")
        first = PAGE if offset == 0 else 0  # the stored file's header is verified with the file's beginning
        for blocks in _groups(table, table.find(offset, wanted.end), self._at_once):
            begin = int(table.places[blocks.start - 1]) - first
            nbytes = int(table.places[blocks.stop - 1]) - begin
            async with self._memory.slot(arena_bytes(nbytes)) as slot:
                stored = slot.view[:nbytes]
                await self.inner.read_into(path, begin, [stored], token=token)
                await in_thread(self._unpack, path, table, _Run(blocks, begin, stored), wanted)
            first = 0

    def _unpack(self, path: str, table: BlockTable, run: _Run, wanted: _Wanted) -> None:
        """Decompress blocks into those parts of the wanted bytes that they have."""
        stored = run.stored
        base = int(table.places[run.blocks.start - 1])
        if run.begin < base and sum_stored(stored[: base - run.begin]) != table.sums[0]:
            raise CorruptSnapshotError(f"{path}: its header does not match its checksum")
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
                raise CorruptSnapshotError(f"{path}: block {number} (bytes {low} to {high}): {error}") from error
            if not whole:
                position = begin - low
                for part in parts:
                    part[:] = target[position : position + len(part)]
                    position += len(part)


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
