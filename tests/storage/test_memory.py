"""Memory passes the contract, and keeps what is stored for as long as the process lives."""

import asyncio
import itertools
import os

import pytest

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL, Context
from snapshot.storages.memory import MemoryStorage
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, store

_numbers = itertools.count()


class TestMemory(StorageTests):
    capabilities = MemoryStorage.capabilities

    @pytest.fixture
    def url(self):
        return f"memory://conformance-{next(_numbers)}"


class TestMemoryBelowAName(StorageTests):
    capabilities = MemoryStorage.capabilities
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestMemory

    @pytest.fixture
    def url(self):
        return f"memory://conformance-{next(_numbers)}/deep/folder/"


@pytest.fixture
def name():
    return f"memory://test-{next(_numbers)}"


def opened(url):
    return open_storage(URL.parse(url), {}, Context())


def test_memory_storage_paths_are_nested(name):
    async def use():
        await opened(f"{name}/step-1").put("file", b"here")
        assert await opened(name).list() == ["step-1/file"]
        assert await opened(name).list("", recursive=False) == ["step-1/"]
        assert await opened(f"{name}/step-1").get("file") == b"here"
        assert await opened(f"{name}/step-10").list() == []

    asyncio.run(use())


def test_memory_storage_file_is_invisible_before_finish(name):
    async def use():
        storage = opened(name)
        writer = await storage.create("file", 4)
        await writer.write(0, [b"done"])
        assert await storage.list() == []
        await writer.finish()
        assert await storage.get("file") == b"done"

    asyncio.run(use())


def test_memory_storage_file_with_a_hole_cannot_be_finished(name):
    async def use():
        storage = opened(name)
        writer = await storage.create("file", 10)
        await writer.write(6, [b"tail"])
        await writer.write(0, [b"head"])
        with pytest.raises(StorageError, match=f"{name}/file: nothing was written at byte 4 of 10"):
            await writer.finish()
        with pytest.raises(StorageNotFoundError):
            await storage.stat("file")
        await writer.write(4, [b"--"])
        await writer.finish()
        assert await storage.get("file") == b"head--tail"

    asyncio.run(use())


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_memory_storage_writer_after_finish_or_abort_refuses_writes(name, end):
    async def use():
        writer = await opened(name).create("file", 0)
        await getattr(writer, end)()
        with pytest.raises(ValueError, match="already finished or aborted"):
            await writer.write(0, [b""])

    asyncio.run(use())


def test_memory_storage_read_is_unaffected_by_a_replacement(name):
    async def use():
        storage = opened(name)
        size = 32 << 20
        await store(storage, "file", b"a" * size, part=size)
        reading = asyncio.create_task(fetch(storage, "file", 0, [size]))
        await asyncio.sleep(0)
        await store(storage, "file", b"b" * size, part=size)
        assert set(await reading) == {ord("a")}

    asyncio.run(use())


@pytest.mark.parametrize("url", ["memory://", "memory://a/../b", "memory://name?query=1", "memory:///rooted"])
def test_memory_storage_invalid_url_is_refused(url):
    with pytest.raises(ValueError, match=r"memory|path"):
        opened(url)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_memory_storage_forked_child_has_a_copy(name):
    from snapshot.storages import memory

    asyncio.run(opened(name).put("file", b"before"))
    with memory._tree.get().lock:  # as if another thread held it at the moment of the fork
        child = os.fork()
        if not child:
            try:
                asyncio.run(opened(name).put("file", b"by the child"))
                os._exit(0 if asyncio.run(opened(name).get("file")) == b"by the child" else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(opened(name).get("file")) == b"before"
