"""Contract tests for small files and names: atomic puts, compare-and-swap, list and delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from snapshot.errors import StorageConflictError, StorageError
from snapshot.storage import ABSENT, ANYTHING, Storage
from snapshot.testing.opened import OpenedStorage, names, on_loop
from snapshot.testing.parts import fetch, pattern, store

ODD_NAMES = ["with space", "ünïcödé-名", "a+b", "%41", "A", "a#b", "a?b=c", "a&b", "quote'\"", "tilde~", "dots..in.it"]
BAD_PATHS = ["", "/absolute", "a//b", "a/", ".", "..", "../up", "a/../b", "./a", "a/.", "zero\0byte"]


class SmallFileTests(OpenedStorage):
    """Tests of `put`, `get`, `stat`, `list` and `delete`."""

    @pytest.mark.parametrize("size", [0, 1, 100_000])
    @on_loop("write")
    async def test_what_was_put_is_got(self, storage: Storage, size: int) -> None:
        data = pattern(size)
        token = await storage.put("folder/file", data)
        assert await storage.get("folder/file") == data
        assert (await storage.stat("folder/file")).token == token

    @on_loop()
    async def test_get_refuses_what_is_over_its_limit(self, storage: Storage) -> None:
        await self.place(storage, "file", bytes(100))
        assert await storage.get("file", limit=100) == bytes(100)
        with pytest.raises(StorageError) as caught:
            await storage.get("file", limit=99)
        names(caught, storage, "file")

    @on_loop("write")
    async def test_a_put_replaces_what_is_there(self, storage: Storage) -> None:
        await storage.put("file", b"a longer content", expect=ANYTHING)
        await storage.put("file", b"short", expect=ANYTHING)
        assert await storage.get("file") == b"short"

    @on_loop("write")
    async def test_every_content_has_a_token_of_its_own(self, storage: Storage) -> None:
        tokens = [await storage.put("file", b"%03d" % i) for i in range(20)]
        assert len(set(tokens)) == 20

    @on_loop("write", "conditional_put")
    async def test_a_put_that_expects_nothing_fails_where_something_is(self, storage: Storage) -> None:
        await storage.put("file", b"first", expect=ABSENT)
        with pytest.raises(StorageConflictError) as caught:
            await storage.put("file", b"other", expect=ABSENT)
        names(caught, storage, "file")
        assert await storage.get("file") == b"first"

    @on_loop("write", "conditional_put")
    async def test_a_put_that_expects_a_token_fails_where_another_is(self, storage: Storage) -> None:
        first = await storage.put("file", b"first")
        second = await storage.put("file", b"second", expect=first)
        assert await storage.get("file") == b"second"
        with pytest.raises(StorageConflictError):
            await storage.put("file", b"third", expect=first)
        with pytest.raises(StorageConflictError):
            await storage.put("missing", b"third", expect=second)
        assert await storage.get("file") == b"second"

    @pytest.mark.parametrize("expects", ["absent", "token"])
    @on_loop("write", "conditional_put", "concurrent", "list")
    async def test_one_of_several_writers_wins(
        self, storage: Storage, reopen: Callable[[], Storage], expects: str
    ) -> None:
        expect = await storage.put("file", b"before") if expects == "token" else ABSENT
        writers = [reopen() for _ in range(8)]
        outcomes = await asyncio.gather(
            *(writer.put("file", b"by %d" % i, expect=expect) for i, writer in enumerate(writers)),
            return_exceptions=True,
        )
        won = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        assert len(won) == 1
        assert sum(isinstance(outcome, StorageConflictError) for outcome in outcomes) == 7
        assert await storage.get("file") == b"by %d" % won[0]
        assert (await storage.stat("file")).token == outcomes[won[0]]
        assert await storage.list("") == ["file"]
        for writer in writers:
            await writer.close()

    # Names

    @on_loop()
    async def test_a_file_has_a_size_and_a_time(self, storage: Storage) -> None:
        await self.place(storage, "file", bytes(123))
        found = await storage.stat("file")
        assert found.size == 123
        assert abs(found.mtime - time.time()) < 600
        assert found.token == (await storage.stat("file")).token

    @on_loop("list")
    async def test_list_finds_what_begins_with_a_prefix(self, storage: Storage) -> None:
        paths = [".hidden", "a", "b/1", "b/2/x", "b-1", "b/10"]
        for path in paths:
            await self.place(storage, path, b".")
        assert await storage.list() == sorted(paths)
        assert await storage.list("b/") == ["b/1", "b/10", "b/2/x"]
        assert await storage.list("b/1") == ["b/1", "b/10"]
        assert await storage.list("b") == ["b-1", "b/1", "b/10", "b/2/x"]
        assert await storage.list("c/") == []
        assert await storage.list("missing/folder/") == []

    @on_loop("list")
    async def test_list_shows_one_level_with_its_folders(self, storage: Storage) -> None:
        for path in ["a", "b/1", "b/2/x", "b/2/y", "b-1"]:
            await self.place(storage, path, b".")
        assert await storage.list("", recursive=False) == ["a", "b-1", "b/"]
        assert await storage.list("b/", recursive=False) == ["b/1", "b/2/"]
        assert await storage.list("b", recursive=False) == ["b-1", "b/"]

    @on_loop("list")
    async def test_an_empty_place_lists_nothing(self, storage: Storage) -> None:
        assert await storage.list() == []
        assert await storage.list("", recursive=False) == []

    @on_loop("write", "delete", "list")
    async def test_delete_removes_what_is_there_and_minds_nothing_else(self, storage: Storage) -> None:
        for path in ["a/1", "a/2", "b"]:
            await storage.put(path, b".")
        await storage.delete(["a/1", "a/missing", "missing"])
        assert await storage.list() == ["a/2", "b"]
        await storage.delete(["a/1", "a/2"])
        assert await storage.list("", recursive=False) == ["b"]
        await storage.delete([])
        await storage.delete(["b"])
        assert await storage.list("", recursive=False) == []

    @on_loop("write")
    async def test_odd_names_are_only_names(self, storage: Storage) -> None:
        for name in ODD_NAMES:
            await storage.put(f"put {name}/{name}", name.encode())
            await store(storage, f"made {name}/{name}", name.encode())
        for name in ODD_NAMES:
            assert await storage.get(f"put {name}/{name}") == name.encode()
            assert await fetch(storage, f"made {name}/{name}", 0, [len(name.encode())]) == name.encode()
        if storage.capabilities.list:
            assert await storage.list("put ") == sorted(f"put {name}/{name}" for name in ODD_NAMES)

    @pytest.mark.parametrize("path", BAD_PATHS)
    @on_loop()
    async def test_a_path_that_is_no_plain_path_is_refused(self, storage: Storage, path: str) -> None:
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: storage.get(path),
            lambda: storage.stat(path),
            lambda: storage.read_into(path, 0, [bytearray(1)]),
        ]
        if storage.capabilities.write:
            attempts += [lambda: storage.put(path, b"."), lambda: storage.create(path, 1)]
        if storage.capabilities.shares:
            attempts += [lambda: storage.share(storage.url.join("file"), path)]
        if storage.capabilities.delete:
            attempts += [lambda: storage.delete([path])]
        for attempt in attempts:
            with pytest.raises(ValueError, match="path"):
                await attempt()
