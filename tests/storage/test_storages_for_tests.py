"""The storages for tests are transparent until they are told not to be; and a fault that never happens is noticed."""

import asyncio
import errno
import itertools
import threading

import pytest

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage, schemes
from snapshot.io.storage import URL, Capabilities, Context, Limits
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.memory import MemoryStorage
from snapshot.testing import (
    Damage,
    Fault,
    Log,
    Stall,
    StorageCall,
    StorageTests,
    TappedStorage,
    faulty,
    recording,
    stalling,
)
from snapshot.testing.conformance import aligned, cut, fetch, part_length, store

_numbers = itertools.count()


def memory():
    return MemoryStorage(URL.parse(f"memory://tapped-{next(_numbers)}"), {}, Context())


def opened(url):
    return open_storage(URL.parse(url), {}, Context())


class TestTappedFile(StorageTests):
    """The whole contract, through taps that do nothing."""

    capabilities = FileStorage.capabilities
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each
    test_a_path_that_is_no_plain_path_is_refused = None  # FileStorage checks it

    @pytest.fixture
    def url(self, tmp_path):
        with recording(), stalling(on="never"):
            yield f"recording+stalling+{(tmp_path / 'a root').as_uri()}"


def collected(**capabilities):
    """Return the names of the tests that apply to a storage, and a class of such tests."""
    declared = {"capabilities": Capabilities(**capabilities)} if capabilities else {}
    made = type("Declared", (StorageTests,), declared)
    return {name for name in dir(made) if name.startswith("test_") and callable(getattr(made, name))}, made


def test_only_tests_that_apply_to_the_declared_capabilities_are_collected():
    every, _ = collected()
    reading, made = collected(write=False, shares="")
    everything, _ = collected(shares="copy", guarded_commit=True)
    assert "test_what_is_not_declared_raises" in reading
    assert not {"test_what_was_put_is_got", "test_a_share_overwrites_nothing"} & reading
    assert everything == every - {"test_what_is_not_declared_raises"}
    again = type("Again", (made,), {"capabilities": Capabilities(), "test_what_was_put_is_got": None})
    assert again.test_what_was_written_is_read is StorageTests.test_what_was_written_is_read
    assert again.test_what_was_put_is_got is None


def test_a_storage_with_other_capabilities_than_its_tests_declare_fails():
    _, made = collected(write=False)
    with pytest.raises(AssertionError, match="Declared: write must be True"):
        made().test_closing_twice_is_harmless(memory())


def test_tapped_storage_has_the_limits_and_capabilities_of_the_inner_one():
    inner = memory()
    tapped = TappedStorage(inner, Log())
    assert (tapped.url, tapped.context) == (inner.url, inner.context)
    assert (tapped.limits, tapped.capabilities) == (inner.limits, inner.capabilities)


def test_fault_on_share_fails():
    async def use():
        storage = memory()
        await storage.put("file", b"content")
        tapped = TappedStorage(storage, Fault(on="share", path="data/*", error=OSError(31, "Too many links")))
        with pytest.raises(StorageError, match="data/shared: Too many links"):
            await tapped.share(storage.url.join("file"), "data/shared")
        await tapped.share(storage.url.join("file"), "data/shared")
        assert await storage.get("data/shared") == b"content"

    asyncio.run(use())


def test_log_records_every_operation_in_order():
    log = Log()

    async def use():
        storage = TappedStorage(memory(), log)
        writer = await storage.create("data/file", 5)
        await writer.write(3, [b"lo"])
        await writer.write(0, [b"h", b"el"])
        await writer.finish()
        await (await storage.create("data/other", 1)).abort()
        await fetch(storage, "data/file", 1, [1, 2])
        await storage.put("claim", b"")
        await storage.commit("claim", "file", b"123")
        await storage.share(storage.url.join("file"), "shared")
        await storage.get("file")
        await storage.stat("file")
        await storage.list("da")
        await storage.delete(["data/file", "shared"])
        await storage.sweep("data/", 0.0)
        await storage.close()

    asyncio.run(use())
    assert log.operations == [
        StorageCall("create", "data/file", 0, 5),
        StorageCall("write", "data/file", 3, 2),
        StorageCall("write", "data/file", 0, 3),
        StorageCall("finish", "data/file"),
        StorageCall("create", "data/other", 0, 1),
        StorageCall("abort", "data/other"),
        StorageCall("read_into", "data/file", 1, 3),
        StorageCall("put", "claim"),
        StorageCall("commit", "file", 0, 3),
        StorageCall("share", "shared"),
        StorageCall("get", "file"),
        StorageCall("stat", "file"),
        StorageCall("list", "da"),
        StorageCall("delete", "data/file"),
        StorageCall("delete", "shared"),
        StorageCall("sweep", "data/"),
        StorageCall("close", ""),
    ]
    assert log.of("write") == log.operations[1:3]
    assert [each.name for each in log.of("[cfa]*", "data/*")] == ["create", "finish", "create", "abort"]
    assert log.nbytes("write") == 5
    log.clear()
    assert repr(log) == "Log(0 operations)"


def test_recording_scheme_exists_only_inside_its_block(tmp_path):
    with recording() as log:
        asyncio.run(opened(f"recording+file://{tmp_path}").put("file", b"."))
    assert log.of("put") == [StorageCall("put", "file", 0, 1)]
    assert (tmp_path / "file").read_bytes() == b"."
    with pytest.raises(StorageError, match="no storage plugin"):
        opened(f"recording+file://{tmp_path}")
    assert "recording+" not in schemes()


def test_tapped_schemes_can_be_nested():
    url = f"memory://tapped-{next(_numbers)}"
    with recording() as log, faulty(on="put", error=OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(StorageError):
            asyncio.run(opened(f"recording+faulty+{url}").put("file", b"."))
        asyncio.run(opened(f"faulty+recording+{url}").put("file", b"."))
    assert len(log.of("put")) == 2


def test_fault_hits_the_selected_operations():
    fault = Fault(on="p*", path="data/*", nth=2, times=2, error=OSError(errno.ENOSPC, "No space left on device"))

    async def use():
        storage = TappedStorage(memory(), fault)
        await storage.put("data/1", b".")
        await storage.put("other", b".")
        for path in ["data/2", "data/3"]:
            with pytest.raises(StorageError, match=f"{storage.url}/{path}: No space left on device") as caught:
                await storage.put(path, b".")
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.__cause__ is fault.error
        await storage.put("data/4", b".")
        assert await storage.list() == ["data/1", "data/4", "other"]

    asyncio.run(use())
    assert (fault.met, fault.hits) == (4, 2)


def test_fault_with_a_base_exception_raises_it_unchanged():
    async def use():
        with pytest.raises(KeyboardInterrupt):
            await TappedStorage(memory(), Fault(on="get", error=KeyboardInterrupt())).get("file")

    asyncio.run(use())


def test_fault_with_times_none_hits_every_time():
    fault = Fault(on="stat", times=None, error=TimeoutError())

    async def use():
        storage = TappedStorage(memory(), fault)
        for _ in range(5):
            with pytest.raises(StorageError):
                await storage.stat("file")

    asyncio.run(use())
    assert fault.hits == 5


@pytest.mark.parametrize("name", ["write", "finish"])
def test_fault_on_a_writer_leaves_it_abortable(name):
    async def use():
        storage = TappedStorage(memory(), Fault(on=name, error=OSError(errno.EIO, "Input/output error")))
        with pytest.raises(StorageError, match="data/file: Input/output error"):
            await store(storage, "data/file", b"content")
        assert await storage.list() == []

    asyncio.run(use())


def test_fault_that_never_happens_fails_the_test():
    with (
        pytest.raises(AssertionError, match="never happened: 1 operations matched"),
        faulty(on="put", nth=2, error=OSError()),
    ):
        asyncio.run(opened(f"faulty+memory://tapped-{next(_numbers)}").put("file", b"."))
    with faulty(on="put", must_happen=False, error=OSError()):
        pass


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, "either an error or damage"),
        ({"error": OSError(), "flip": 0}, "either an error or damage"),
        ({"on": "write", "truncate": 1}, "truncate needs"),
    ],
)
def test_fault_with_invalid_arguments_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        Fault(**fault)


@pytest.mark.parametrize(
    ("damage", "spoilt"),
    [
        (Damage(flip=0), b"abc"),
        (Damage(flip=9), b"``c"),
        (Damage(flip=24), b"abc"),
        (Damage(zero=2), b"`\0\0"),
        (Damage(zero=9), b"\0\0\0"),
        (Damage(truncate=1), b"`b"),
        (Damage(truncate=9), b""),
    ],
)
def test_damage_flips_zeroes_and_truncates_bytes(damage, spoilt):
    assert damage.of(b"`bc") == spoilt
    assert Damage(flip=3).of(b"") == b""


def test_damage_to_a_write_is_stored_and_does_not_change_the_caller_s_bytes():
    async def use():
        inner = memory()
        data = bytearray(b"\0" * 8)
        writer = await TappedStorage(inner, Fault(on="write", flip=8)).create("file", 8)
        await writer.write(0, [memoryview(data)[:4], memoryview(data)[4:]])
        await writer.finish()
        assert await inner.get("file") == b"\0\x01\0\0\0\0\0\0"
        assert data == bytes(8)

    asyncio.run(use())


def test_damage_to_a_read_affects_only_that_read():
    async def use():
        inner = memory()
        await inner.put("file", bytes(8))
        storage = TappedStorage(inner, Fault(on="read_into", flip=8 * 5), Fault(on="get", zero=1, flip=0))
        assert await fetch(storage, "file", 1, [3, 0, 4]) == b"\0\0\0\0\0\x01\0"
        assert await fetch(storage, "file", 1, [3, 0, 4]) == bytes(7)
        assert await storage.get("file") == b"\x01" + bytes(7)
        assert await inner.get("file") == bytes(8)

    asyncio.run(use())


def test_damage_truncate_acts_on_finish():
    async def use():
        inner = memory()
        await store(TappedStorage(inner, Fault(on="finish", truncate=3)), "file", b"content")
        assert await inner.get("file") == b"cont"
        with pytest.raises(CorruptSnapshotError):
            await fetch(inner, "file", 0, [7])

    asyncio.run(use())


def test_fault_on_close_closes_the_inner_storage():
    closed = []

    class Closing(MemoryStorage):
        async def close(self):
            closed.append(self)

    inner = Closing(URL.parse("memory://closing"), {}, Context())
    with pytest.raises(StorageError):
        asyncio.run(TappedStorage(inner, Fault(on="close", error=OSError(errno.EIO, "broken"))).close())
    assert closed == [inner]


def test_stall_holds_an_operation_until_release():
    stall = Stall(on="put", nth=2)
    inner = memory()
    done = threading.Event()

    async def use():
        storage = TappedStorage(inner, stall)
        await storage.put("first", b".")
        await storage.put("second", b".")
        await storage.put("third", b".")

    thread = threading.Thread(target=lambda: (asyncio.run(use()), done.set()))
    thread.start()
    stall.wait_reached()
    assert (stall.waiting, stall.hits) == (1, 1)
    assert asyncio.run(inner.list()) == ["first"]
    assert not done.is_set()
    stall.release()
    assert done.wait(30)
    thread.join()
    assert asyncio.run(inner.list()) == ["first", "second", "third"]
    assert stall.waiting == 0


def test_stall_that_was_released_holds_nothing():
    stall = Stall(on="put", times=None)
    stall.release()
    asyncio.run(TappedStorage(memory(), stall).put("file", b"."))
    assert not stall.reached.is_set()


def test_stall_can_be_cancelled():
    stall = Stall(on="put")
    inner = memory()

    async def use():
        putting = asyncio.create_task(TappedStorage(inner, stall).put("file", b"."))
        while not stall.reached.is_set():
            await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        with pytest.raises(StorageNotFoundError):
            await inner.stat("file")

    asyncio.run(use())
    assert stall.waiting == 0


def test_stall_with_seconds_delays_an_operation():
    with stalling(on="put", times=None, seconds=0.001) as stall:
        asyncio.run(opened(f"stalling+memory://tapped-{next(_numbers)}").put("file", b"."))
    assert stall.hits == 1


def test_stall_wait_reached_times_out():
    with pytest.raises(TimeoutError, match="was not reached"):
        Stall(on="put").wait_reached(timeout=0)


@pytest.mark.parametrize(("size", "length"), [(0, 5), (1, 5), (5, 5), (12, 5)])
def test_conformance_cut_covers_a_file_once(size, length):
    parts = cut(size, length)
    assert b"".join(bytes(size)[offset : offset + long] for offset, long in parts) == bytes(size)
    assert all(long == length for _, long in parts[:-1])


def test_conformance_part_length_respects_the_limits():
    assert part_length(Limits(), 1000) == 1000
    assert part_length(Limits(multiple=4096), 1000) == 4096
    assert part_length(Limits(smallest_part=5000, multiple=4096), 1) == 8192
    assert part_length(Limits(largest_part=10), 1000) == 10
    with pytest.raises(ValueError, match="no part fits"):
        part_length(Limits(smallest_part=5, largest_part=5, multiple=4), 5)


def test_conformance_aligned_refuses_an_invalid_alignment():
    with pytest.raises(ValueError, match="alignment must"):
        aligned(b".", 3)
