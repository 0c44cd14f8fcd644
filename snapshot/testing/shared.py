"""Contract tests for further names of finished files: `share`, usually from an earlier snapshot beside this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.registry import open_storage
from snapshot.storage import URL, Context, Storage
from snapshot.testing.opened import OpenedStorage, names, on_loop
from snapshot.testing.parts import fetch, part_length, pattern, store
from snapshot.testing.small import ODD_NAMES

MiB = 1 << 20


class SharedFileTests(OpenedStorage):
    """Tests of `share`."""

    @pytest.mark.parametrize("size", [0, 1, 4097, 3 * MiB + 17])
    @on_loop("write", "shares")
    async def test_a_shared_file_has_the_bytes_of_its_source(self, storage: Storage, size: int) -> None:
        data = pattern(size)
        await store(storage, "data/file", data)
        await storage.share(storage.url.join("data/file"), "more/shared")
        assert (await storage.stat("more/shared")).size == size
        for path in ("more/shared", "data/file"):
            assert await fetch(storage, path, 0, [size]) == data

    @on_loop("write", "shares", "delete", "list")
    async def test_a_file_is_shared_with_another_snapshot(
        self, storage: Storage, options: Mapping[str, Any], context: Context
    ) -> None:
        part = part_length(storage.limits, 300_000)
        data = pattern(min(4, storage.limits.most_parts - 1) * part + 12_345)
        for gone, kept in ((0, 1), (1, 0)):
            roots = [storage.url.join(f"run {gone}/step-{step}") for step in (1, 2)]
            async with _opened(roots, options, context) as snapshots:
                await store(snapshots[0], "data/file", data, part=part)
                source = roots[0].join("data/file")
                await snapshots[1].share(source, "data/file", token=(await snapshots[0].stat("data/file")).token)
                await snapshots[1].settle()
                await snapshots[gone].delete(["data/file"])
                assert await snapshots[gone].list() == []
                assert await snapshots[kept].list() == ["data/file"]
                assert await fetch(snapshots[kept], "data/file", 0, [len(data)]) == data

    @on_loop("write", "shares")
    async def test_a_source_is_shared_in_the_expected_version(self, storage: Storage) -> None:
        first = await storage.put("file", b"first")
        second = await storage.put("file", b"other")
        with pytest.raises(StorageConflictError):
            await storage.share(storage.url.join("file"), "folder/shared", token=first)
        with pytest.raises(StorageNotFoundError):
            await storage.stat("folder/shared")
        await storage.share(storage.url.join("file"), "folder/shared", token=second)
        assert await storage.get("folder/shared") == b"other"

    @on_loop("write", "shares")
    async def test_a_missing_source_is_not_found(self, storage: Storage) -> None:
        await storage.put("file", b".")
        for path in ("missing", "missing/file"):
            with pytest.raises(StorageNotFoundError) as caught:
                await storage.share(storage.url.join(path), "folder/shared")
            names(caught, storage, path)
        if storage.capabilities.list:
            assert await storage.list("", recursive=False) == ["file"]

    @on_loop("write", "shares")
    async def test_a_share_overwrites_nothing(self, storage: Storage) -> None:
        await storage.put("file", b"first")
        await storage.put("folder/taken", b"other")
        for path, content in (("folder/taken", b"other"), ("file", b"first")):
            with pytest.raises(StorageConflictError) as caught:
                await storage.share(storage.url.join("file"), path)
            names(caught, storage, path)
            assert await storage.get(path) == content
        assert await storage.get("file") == b"first"

    @on_loop("write", "shares")
    async def test_a_name_that_is_written_anew_leaves_the_others_alone(self, storage: Storage) -> None:
        await store(storage, "file", b"first")
        for path in ("put", "made"):
            await storage.share(storage.url.join("file"), path)
        await storage.put("put", b"other")
        data = pattern(2 * MiB)
        await store(storage, "made", data)
        assert [await storage.get(path) for path in ("file", "put", "made")] == [b"first", b"other", data]
        await storage.share(storage.url.join("file"), "again")
        await storage.put("file", b"third")
        assert await storage.get("again") == b"first"

    @on_loop("write", "shares")
    async def test_names_of_shared_files_are_only_names(
        self, storage: Storage, options: Mapping[str, Any], context: Context
    ) -> None:
        for name in ODD_NAMES:
            async with _opened([storage.url.join(f"root {name}")], options, context) as [earlier]:
                await store(earlier, f"made {name}/{name}", name.encode())
                await storage.share(earlier.url.join(f"made {name}/{name}"), f"shared/{name}")
            assert await storage.get(f"shared/{name}") == name.encode()

    @on_loop("write", "shares")
    async def test_a_source_of_another_storage_is_refused(self, storage: Storage) -> None:
        await storage.put("file", b".")
        with pytest.raises(StorageError):
            await storage.share(URL("nowhere", storage.url.location).join("file"), "shared")
        with pytest.raises(StorageNotFoundError):
            await storage.stat("shared")


@asynccontextmanager
async def _opened(roots: list[URL], options: Mapping[str, Any], context: Context) -> AsyncIterator[list[Storage]]:
    """Open storages below other roots of the same server."""
    storages = [open_storage(root, options, context) for root in roots]
    try:
        yield storages
    finally:
        for each in storages:
            await each.close()
