"""The storage contract as tests: every plugin must pass them, and its author only provides a URL."""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, ANYTHING, Capabilities, Context, Expect, Limits, Storage
from snapshot.io.url import URL

# Whole files through a storage, in parts within its limits: a minimal write engine for tests.


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes in which any shift, swap or loss is detected."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - a pattern, not a secret


def aligned(data: bytes, alignment: int = mmap.PAGESIZE) -> memoryview:
    """Return a copy of the bytes at an address that is a multiple of `alignment`, in whole pages of memory."""
    if mmap.PAGESIZE % alignment:
        raise ValueError(f"alignment must divide the page size of {mmap.PAGESIZE}, got {alignment}")
    if not data:
        return memoryview(b"")
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


def part_length(limits: Limits, wanted: int) -> int:
    """Return a part length near `wanted` within the limits."""
    length = max(limits.smallest_part, min(wanted, limits.largest_part))
    length += -length % limits.multiple
    if length > limits.largest_part:
        raise ValueError(f"no part fits {limits}")
    return length


def cut(size: int, length: int) -> list[tuple[int, int]]:
    """Return offset and length of each part of a file; only the last one is shorter."""
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


async def store(storage: Storage, path: str, data: bytes, *, part: int = 1 << 20, seed: int | None = None) -> None:
    """Write a file: parts concurrently as far as the limits allow, in an order that the seed shuffles.

    Abort the file on a failure, as the write engine would.
    """
    limits = storage.limits
    parts = cut(len(data), part_length(limits, part))
    if seed is not None and not limits.in_order:
        random.Random(seed).shuffle(parts)  # noqa: S311 - an order, not a secret
    free = asyncio.Semaphore(1 if limits.in_order else limits.parallel_parts)
    writer = await storage.create(path, len(data))

    async def write(offset: int, length: int) -> None:
        async with free:
            await writer.write(offset, [aligned(data[offset : offset + length], limits.alignment)])

    try:
        for outcome in await asyncio.gather(*(write(*each) for each in parts), return_exceptions=True):
            if outcome is not None:
                raise outcome
        await writer.finish()
    except BaseException:
        await writer.abort()
        raise


async def fetch(storage: Storage, path: str, offset: int, lengths: Sequence[int], *, token: str | None = None) -> bytes:
    """Read a range into buffers of the given lengths, and return their joined contents."""
    buffers = [memoryview(bytearray(b"\xee" * length)) for length in lengths]
    await storage.read_into(path, offset, buffers, token=token)
    return b"".join(buffers)


# A storage for one test: opened, used and closed on the test's own event loop.

DEADLINE = 60.0
"""Timeout of one test in seconds."""

Test = Callable[..., Coroutine[Any, Any, None]]


TESTED = ("write", "list", "delete", "ranged_read", "conditional_put", "concurrent", "shares", "guarded_commit")
"""Capabilities that decide which tests apply to a storage."""
UNDECLARED_RAISE = ("write", "list", "delete", "ranged_read", "conditional_put", "shares")
"""Capabilities without which a method raises."""


def on_loop(*needed: str, unless_all: Sequence[str] = ()) -> Callable[[Test], Callable[..., None]]:
    """Run an asynchronous test on its own event loop, on which its storage is closed, too.

    The test applies to a storage with all capabilities in `needed`, but not to one with all of those in `unless_all`.
    """

    def why_not(capabilities: Capabilities) -> str:
        """Return why the test does not apply, or an empty text if it does."""
        for name in needed:
            if not getattr(capabilities, name):
                return f"does not declare {name!r}"
        if unless_all and all(getattr(capabilities, name) for name in unless_all):
            return "declares all of them"
        return ""

    def wrap(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(self: OpenedStorage, storage: Storage, **fixtures: Any) -> None:
            if self.capabilities is not None:
                for name in TESTED:
                    declared, found = getattr(self.capabilities, name), getattr(storage.capabilities, name)
                    assert bool(declared) == bool(found), f"{type(self).__name__}: {name} must be {found!r}"
            elif reason := why_not(storage.capabilities):
                pytest.skip(f"{type(storage).__name__} {reason}")

            async def body() -> None:
                try:
                    await asyncio.wait_for(test(self, storage, **fixtures), DEADLINE)
                finally:
                    await storage.close()

            asyncio.run(body())

        run.why_not = why_not  # type: ignore[attr-defined]
        return run

    return wrap


class _NotCollected:
    """Placeholder of a test that does not apply to a storage. Pytest collects only what can be called."""


NOT_COLLECTED = _NotCollected()


def names(error: pytest.ExceptionInfo[BaseException], storage: Storage, path: str) -> None:
    """Assert that an error names its file."""
    assert str(storage.url.join(path)) in str(error.value)


class OpenedStorage:
    """Fixtures of the conformance tests: a plugin's tests override `url`, and others if needed."""

    capabilities: ClassVar[Capabilities | None] = None
    """Capabilities of the storage under test, usually `MyStorage.capabilities`.

    Then tests that do not apply to the storage are not collected, and a storage with other capabilities fails. If None,
    such tests are skipped when they run.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in {name for base in cls.__mro__ for name in vars(base) if name.startswith("test_")}:
            found = (vars(base)[name] for base in cls.__mro__ if name in vars(base))
            test = next(each for each in found if each is not NOT_COLLECTED)
            why_not = getattr(test, "why_not", None)
            if why_not is not None and cls.capabilities is not None and why_not(cls.capabilities):
                setattr(cls, name, NOT_COLLECTED)
            elif getattr(cls, name) is NOT_COLLECTED:  # a base class has other capabilities
                setattr(cls, name, test)

    @pytest.fixture
    def url(self) -> str:
        """Return a new, empty place for each test."""
        raise NotImplementedError("the tests of a storage must define a fixture `url`")

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """Return the `storage_options` for opening."""
        return {}

    @pytest.fixture
    def context(self) -> Context:
        """Return the context of the operation."""
        return Context()

    @pytest.fixture
    def reopen(self, url: str, options: Mapping[str, Any], context: Context) -> Callable[[], Storage]:
        """Return a function that opens the same place again, as another process would."""
        return lambda: open_storage(URL.parse(url), options, context)

    @pytest.fixture
    def storage(self, reopen: Callable[[], Storage]) -> Storage:
        """Return the storage under test, not connected yet."""
        return reopen()

    async def place(self, storage: Storage, path: str, data: bytes) -> None:
        """Write a file to be read. A plugin that cannot write overrides this."""
        await store(storage, path, data)


# Contract tests for bulk data: files written in parts, and ranged reads.

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


# Contract tests for small files and names: atomic puts, compare-and-swap, list and delete.

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


# Contract tests for further names of finished files: `share`, usually from an earlier snapshot beside this one.


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


# The storage contract as tests: every plugin must pass them, and its author only provides a URL.
#
# class TestMine(StorageTests): @pytest.fixture def url(self): return f"mine://bucket/{secrets.token_hex(8)}"
#
# Declared `capabilities` of the plugin are tested. Undeclared ones must raise StorageError.


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

    @on_loop(unless_all=UNDECLARED_RAISE)
    async def test_what_is_not_declared_raises(self, storage: Storage) -> None:
        attempts: dict[str, Callable[[], Awaitable[object]]] = {
            "write": lambda: storage.create("data/file", 1),
            "conditional_put": lambda: storage.put("file", b".", expect=ABSENT),
            "list": storage.list,
            "delete": lambda: storage.delete(["file"]),
            "shares": lambda: storage.share(storage.url.join("file"), "shared"),
            "ranged_read": lambda: fetch(storage, "file", 1, [1]),
        }
        await self.place(storage, "file", b"..")
        for name in UNDECLARED_RAISE:
            if getattr(storage.capabilities, name):
                continue
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
