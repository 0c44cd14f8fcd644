"""Contract tests for bulk data: files written in parts, and ranged reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.storage import Storage
from snapshot.testing.opened import OpenedStorage, names, on_loop
from snapshot.testing.parts import aligned, fetch, part_length, pattern, store

MiB = 1 << 20


class BulkFileTests(OpenedStorage):
    """Tests of `create` and its writer, and of `read_into`."""

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * MiB])
    @on_loop("write")
    async def test_what_was_written_is_read(self, storage: Storage, size: int) -> None:
        data = pattern(size)
        await store(storage, "data/file", data)
        assert await fetch(storage, "data/file", 0, [size]) == data
        assert (await storage.stat("data/file")).size == size

    @pytest.mark.parametrize("seed", [None, 1, 2])
    @on_loop("write")
    async def test_parts_come_in_any_order_that_the_limits_allow(self, storage: Storage, seed: int | None) -> None:
        part = part_length(storage.limits, 300_000)
        data = pattern(min(4, storage.limits.most_parts - 1) * part + 12_345)
        await store(storage, "data/file", data, part=part, seed=seed)
        assert await fetch(storage, "data/file", 0, [len(data)]) == data

    @on_loop("write")
    async def test_one_write_takes_thousands_of_buffers(self, storage: Storage) -> None:
        if storage.limits.alignment > 1:
            pytest.skip("aligned parts are one buffer each")
        pieces = [pattern(i % 700, seed=i) for i in range(2000)]
        data = b"".join(pieces)
        writer = await storage.create("data/file", len(data))
        await writer.write(0, [memoryview(piece) for piece in pieces])
        await writer.finish()
        assert await fetch(storage, "data/file", 0, [len(data)]) == data

    @on_loop("write", "concurrent")
    async def test_several_files_are_written_side_by_side(self, storage: Storage) -> None:
        files = {f"data/{i}": pattern(400_000 + i, seed=i) for i in range(4)}
        await asyncio.gather(*(store(storage, path, data, part=100_000) for path, data in files.items()))
        for path, data in files.items():
            assert await fetch(storage, path, 0, [len(data)]) == data

    @on_loop("write")
    async def test_a_finished_file_is_there_for_others(self, storage: Storage, reopen: Callable[[], Storage]) -> None:
        await store(storage, "data/file", b"whole")
        other = reopen()
        assert await fetch(other, "data/file", 0, [5]) == b"whole"
        await other.close()

    @on_loop("write", "list")
    async def test_an_aborted_file_leaves_nothing(self, storage: Storage) -> None:
        part = part_length(storage.limits, 100_000)
        writer = await storage.create("data/deep/file", 2 * part)
        await writer.write(0, [aligned(pattern(part), storage.limits.alignment)])
        await writer.abort()
        assert await storage.list("") == []
        assert await storage.list("", recursive=False) == []
        with pytest.raises(StorageNotFoundError):
            await storage.stat("data/deep/file")

    @on_loop("write", "list")
    async def test_an_abort_spares_other_files(self, storage: Storage) -> None:
        await store(storage, "data/kept", b"kept")
        writer = await storage.create("data/file", 4)
        await writer.abort()
        assert await storage.list("") == ["data/kept"]

    @on_loop("write")
    async def test_a_write_outside_of_the_file_is_refused(self, storage: Storage) -> None:
        writer = await storage.create("data/file", 100)
        with pytest.raises(StorageError) as caught:
            await writer.write(0, [aligned(bytes(101), storage.limits.alignment)])
        names(caught, storage, "data/file")
        await writer.abort()

    # Reading

    @pytest.mark.parametrize(("offset", "lengths"), [(0, [1]), (1, [4096]), (4095, [2, 0, 3]), (99_999, [1]), (7, [0])])
    @on_loop("ranged_read")
    async def test_any_range_is_read_exactly(self, storage: Storage, offset: int, lengths: list[int]) -> None:
        data = pattern(100_000)
        await self.place(storage, "data/file", data)
        assert await fetch(storage, "data/file", offset, lengths) == data[offset : offset + sum(lengths)]

    @on_loop("ranged_read")
    async def test_a_long_range_at_an_odd_offset_is_read_exactly(self, storage: Storage) -> None:
        data = pattern(3 * MiB)
        await self.place(storage, "data/file", data)
        assert await fetch(storage, "data/file", 4097, [MiB + 1, 1, MiB - 1]) == data[4097 : 4098 + 2 * MiB]

    @on_loop("ranged_read")
    async def test_one_read_fills_thousands_of_buffers(self, storage: Storage) -> None:
        lengths = [i % 97 for i in range(2000)]
        data = pattern(sum(lengths) + 5)
        await self.place(storage, "data/file", data)
        assert await fetch(storage, "data/file", 5, lengths) == data[5:]

    @on_loop("ranged_read", "concurrent")
    async def test_reads_go_side_by_side(self, storage: Storage) -> None:
        data = pattern(200_000)
        await self.place(storage, "data/file", data)
        reads = await asyncio.gather(*(fetch(storage, "data/file", 1000 * i + 1, [999]) for i in range(100)))
        assert reads == [data[1000 * i + 1 : 1000 * i + 1000] for i in range(100)]

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (99, 2), (5000, 1), (0, 3 * MiB)])
    @on_loop("ranged_read")
    async def test_a_file_that_ends_too_early_is_corrupt(self, storage: Storage, offset: int, length: int) -> None:
        await self.place(storage, "data/file", pattern(100))
        with pytest.raises(CorruptSnapshotError) as caught:
            await fetch(storage, "data/file", offset, [length])
        names(caught, storage, "data/file")

    @pytest.mark.parametrize("verb", ["read_into", "get", "stat"])
    @on_loop()
    async def test_a_missing_file_is_not_found(self, storage: Storage, verb: str) -> None:
        await self.place(storage, "data/file", b"there")
        verbs: dict[str, Callable[[str], Awaitable[object]]] = {
            "read_into": lambda path: fetch(storage, path, 0, [1]),
            "get": storage.get,
            "stat": storage.stat,
        }
        for path in ["data/missing", "missing/file"]:
            with pytest.raises(StorageNotFoundError) as caught:
                await verbs[verb](path)
            names(caught, storage, path)

    @on_loop("ranged_read")
    async def test_a_read_pinned_to_what_stands_there_succeeds(self, storage: Storage) -> None:
        await self.place(storage, "data/file", b"content")
        token = (await storage.stat("data/file")).token
        assert await fetch(storage, "data/file", 0, [7], token=token) == b"content"

    @on_loop("write", "ranged_read")
    async def test_a_read_pinned_to_what_was_replaced_fails(self, storage: Storage) -> None:
        token = await storage.put("file", b"first")
        await storage.put("file", b"other")
        with pytest.raises(StorageConflictError) as caught:
            await fetch(storage, "file", 0, [5], token=token)
        names(caught, storage, "file")

    @on_loop("write", "delete")
    async def test_a_read_sees_what_stands_there_now(self, storage: Storage, reopen: Callable[[], Storage]) -> None:
        await storage.put("file", b"first")
        assert await fetch(storage, "file", 0, [5]) == b"first"
        other = reopen()
        token = await other.put("file", b"other")
        assert await fetch(storage, "file", 0, [5], token=token) == b"other"
        assert await fetch(storage, "file", 0, [5]) == b"other"
        await other.delete(["file"])
        await other.close()
        with pytest.raises(StorageNotFoundError):
            await fetch(storage, "file", 0, [5])
