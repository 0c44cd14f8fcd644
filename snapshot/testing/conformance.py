"""The storage contract as tests: every plugin must pass them, and its author only provides a URL.

    class TestMine(StorageTests):
        @pytest.fixture
        def url(self):
            return f"mine://bucket/{secrets.token_hex(8)}"

Declared `capabilities` of the plugin are tested. Undeclared ones must raise StorageError.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.registry import open_storage
from snapshot.storage import ABSENT, ANYTHING, URL, Context, Expect, Storage
from snapshot.testing.bulk import BulkFileTests
from snapshot.testing.opened import names, on_loop
from snapshot.testing.parts import aligned, fetch
from snapshot.testing.shared import SharedFileTests
from snapshot.testing.small import SmallFileTests

MiB = 1 << 20


class StorageTests(BulkFileTests, SmallFileTests, SharedFileTests):
    """Base class of a plugin's tests: provide `url`, and `options` and `context` if needed."""

    @on_loop("write", "delete", "list")
    async def test_a_commit_puts_the_file_and_takes_the_claim_away(self, storage: Storage) -> None:
        await storage.put("claim", b"")
        expect = ABSENT if storage.capabilities.conditional_put else ANYTHING
        token = await storage.commit("claim", "file", b"committed", expect=expect)
        assert await storage.get("file") == b"committed"
        assert (await storage.stat("file")).token == token
        assert await storage.list() == ["file"]

    @on_loop("write", "delete", "list")
    async def test_a_commit_replaces_what_it_expects(self, storage: Storage) -> None:
        before = await storage.put("file", b"before")
        expectations: list[Expect] = [before, ANYTHING]
        for expect in expectations if storage.capabilities.conditional_put else [ANYTHING]:
            await storage.put("claim", b"")
            await storage.commit("claim", "file", b"after", expect=expect)
            assert await storage.get("file") == b"after"
            assert await storage.list() == ["file"]

    @on_loop("write", "delete", "conditional_put")
    async def test_a_commit_fails_where_something_else_is(self, storage: Storage) -> None:
        first = await storage.put("file", b"first")
        await storage.put("file", b"second", expect=first)
        expectations: list[Expect] = [ABSENT, first]
        for expect in expectations:
            await storage.put("claim", b"")
            with pytest.raises(StorageConflictError) as caught:
                await storage.commit("claim", "file", b"committed", expect=expect)
            names(caught, storage, "file")
            assert await storage.get("file") == b"second"

    @on_loop("write", "delete", "list", "guarded_commit")
    async def test_a_commit_fails_without_its_claim(self, storage: Storage) -> None:
        await storage.put("kept", b"kept")
        for path, expect in [("file", ABSENT), ("kept", ANYTHING)]:
            await storage.put("claim", b"")
            await storage.delete(["claim"])
            with pytest.raises((StorageConflictError, StorageNotFoundError)):
                await storage.commit("claim", path, b"committed", expect=expect)
        assert await storage.list() == ["kept"]
        assert await storage.get("kept") == b"kept"

    @on_loop("write")
    async def test_a_sweep_spares_what_is_young(self, storage: Storage) -> None:
        writer = await storage.create("data/file", 4)
        assert list(await storage.sweep("", 3600)) == []
        await writer.write(0, [aligned(b"done", storage.limits.alignment)])
        await writer.finish()
        assert await storage.get("data/file") == b"done"

    @on_loop()
    async def test_what_is_not_declared_raises(self, storage: Storage) -> None:
        attempts: dict[str, Callable[[], Awaitable[object]]] = {
            "write": lambda: storage.create("data/file", 1),
            "conditional_put": lambda: storage.put("file", b".", expect=ABSENT),
            "list": storage.list,
            "delete": lambda: storage.delete(["file"]),
            "shares": lambda: storage.share(storage.url.join("file"), "shared"),
            "ranged_read": lambda: fetch(storage, "file", 1, [1]),
        }
        undeclared = [name for name in attempts if not getattr(storage.capabilities, name)]
        if not undeclared:
            pytest.skip(f"{type(storage).__name__} declares all of them")
        await self.place(storage, "file", b"..")
        for name in undeclared:
            with pytest.raises(StorageError):
                await attempts[name]()

    @on_loop()
    async def test_closing_twice_is_harmless(self, storage: Storage) -> None:
        await self.place(storage, "file", b".")
        await storage.close()
        await storage.close()

    def test_an_unknown_option_is_refused(self, url: str, options: Mapping[str, Any], context: Context) -> None:
        with pytest.raises(ValueError, match="no_such_option"):
            open_storage(URL.parse(url), {**options, "no_such_option": 1}, context)

    def test_no_descriptor_stays_open(self, reopen: Callable[[], Storage]) -> None:
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("there is no /proc/self/fd to count in")

        async def use() -> None:
            storage = reopen()
            await self.place(storage, "data/file", bytes(2 * MiB))
            await fetch(storage, "data/file", 0, [2 * MiB])
            for missing in [storage.stat("missing"), storage.get("missing"), fetch(storage, "missing", 0, [1])]:
                with pytest.raises(StorageNotFoundError):
                    await missing
            if storage.capabilities.write:
                await (await storage.create("data/aborted", 5 * MiB)).abort()
            await storage.close()

        asyncio.run(use())  # create here everything that is created once and kept
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            asyncio.run(use())
        deadline = time.monotonic() + 5
        while len(os.listdir("/proc/self/fd")) > len(before) and time.monotonic() < deadline:
            time.sleep(0.05)  # clients with their own threads close connections a little later
        assert len(os.listdir("/proc/self/fd")) <= len(before)
