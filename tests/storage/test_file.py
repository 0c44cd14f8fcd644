"""Files pass the contract: through the page cache and around it, synced and not; and leave nothing lying about."""

import asyncio
import gc
import itertools
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, URL, Context
from snapshot.storages.file import files, portable
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.file.files import OpenFile
from snapshot.storages.file.portable import JOINED
from snapshot.testing import StorageTests
from snapshot.testing.conformance import aligned, fetch, pattern, store
from tests.storage.direct import require_direct

MiB = 1 << 20


class FileTests(StorageTests):
    capabilities = FileStorage.capabilities

    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "root")


class TestFile(FileTests):
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each


class TestFileUrl(StorageTests):
    capabilities = FileStorage.capabilities
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestFile

    @pytest.fixture
    def url(self, tmp_path):
        return f"{tmp_path.as_uri()}/a%20folder"


class TestFileNotDurable(FileTests):
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestFile

    @pytest.fixture
    def context(self):
        return Context(durable=False)


class TestFileThroughThePageCache(FileTests):
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestFile

    @pytest.fixture
    def context(self):
        return Context(direct_io="never")


class TestFilePortable(FileTests):
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestFile

    @pytest.fixture
    def context(self):
        return Context(file_io="portable")


class TestFileAroundThePageCache(FileTests):
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestFile

    @pytest.fixture
    def context(self, tmp_path):
        require_direct(tmp_path)
        return Context(direct_io="always")


def opened(folder, **context):
    return open_storage(URL.parse(str(folder)), {}, Context(**context))


def files_below(folder):
    return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)


def test_file_storage_writes_ordinary_files(tmp_path):
    data = pattern(3 * MiB + 17)

    async def use():
        storage = opened(tmp_path / "root")
        await store(storage, "data/file", data, seed=1)
        await storage.put("small", b"small")
        await storage.close()

    asyncio.run(use())
    assert (tmp_path / "root/data/file").read_bytes() == data
    assert (tmp_path / "root/small").read_bytes() == b"small"
    assert files_below(tmp_path) == [str(tmp_path / "root/data/file"), str(tmp_path / "root/small")]


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 40_000) | st.just(files.PAGE) | st.just(JOINED), min_size=1, max_size=20),
    st.integers(0, 99),
    st.integers(0, 5),
)
def test_file_storage_portable_path_reads_and_writes_buffers_of_all_lengths(lengths, before, missing):
    """Short buffers are joined. The file may end before the last byte that is read."""
    total = sum(lengths)
    data = pattern(before + total)

    async def use(folder):
        storage = opened(folder, file_io="portable")
        writer = await storage.create("file", len(data))
        edges = list(itertools.accumulate(lengths, initial=before))
        await writer.write(before, [data[begin:end] for begin, end in itertools.pairwise(edges)])
        await writer.write(0, [data[:before]])
        await writer.finish()
        assert await fetch(storage, "file", before, lengths) == data[before:]
        if missing:
            with pytest.raises(CorruptSnapshotError, match=f"ends at byte {len(data)}, but"):
                await fetch(storage, "file", before, [*lengths, missing])
        await storage.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(use(folder))
        assert (Path(folder) / "file").read_bytes() == data


def test_file_storage_portable_path_cancelled_read_waits_for_its_thread(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(pattern(MiB))
    entered, go_on, ended = threading.Event(), threading.Event(), []

    def slow(url, descriptor, token):
        entered.set()
        assert go_on.wait(30)
        ended.append(True)

    monkeypatch.setattr(portable, "expect_token", slow)

    async def use():
        storage = opened(tmp_path, file_io="portable")
        buffer = bytearray(MiB)
        reading = asyncio.create_task(storage.read_into("file", 0, [buffer], token="some"))
        await asyncio.to_thread(entered.wait, 30)
        reading.cancel()
        await asyncio.sleep(0)
        assert not reading.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert ended
        assert bytes(buffer) == pattern(MiB)

    asyncio.run(use())


def test_file_storage_failed_operations_leave_no_files_or_folders(tmp_path):
    async def use():
        storage = opened(tmp_path / "new/root")
        await (await storage.create("data/deep/file", MiB)).abort()
        with pytest.raises(StorageConflictError):
            await storage.put("small/file", b"never", expect="a token that nothing has")
        with pytest.raises(StorageConflictError):
            await storage.commit("claim", "manifest", b"never")
        await storage.close()

    asyncio.run(use())
    assert os.listdir(tmp_path) == []


def test_file_storage_keeps_an_existing_root(tmp_path):
    async def use():
        storage = opened(tmp_path)
        await storage.put("folder/file", b".")
        await storage.delete(["folder/file"])
        await storage.close()

    asyncio.run(use())
    assert os.listdir(tmp_path) == []


def test_file_storage_put_conflict_leaves_no_temporary_file(tmp_path):
    async def use():
        storage = opened(tmp_path)
        first = await storage.put("file", b"first", expect=ABSENT)
        for expect in [ABSENT, first + "0"]:
            with pytest.raises(StorageConflictError):
                await storage.put("file", b"second", expect=expect)
        await storage.put("claim", b"")
        with pytest.raises(StorageConflictError):
            await storage.commit("claim", "file", b"third")
        await storage.delete(["claim"])

    asyncio.run(use())
    assert files_below(tmp_path) == [str(tmp_path / "file")]


def test_file_storage_put_in_several_threads_has_one_winner(tmp_path):
    ready = threading.Barrier(8)
    won = []

    def race(number):
        storage = opened(tmp_path)
        ready.wait(30)
        try:
            asyncio.run(storage.put("file", b"%d" % number, expect=ABSENT))
        except StorageConflictError:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert (tmp_path / "file").read_bytes() == b"%d" % won[0]
    assert files_below(tmp_path) == [str(tmp_path / "file")]


def test_file_storage_truncated_file_is_corrupt(tmp_path):
    (tmp_path / "file").write_bytes(bytes(5 * MiB - 1))

    async def use():
        storage = opened(tmp_path)
        with pytest.raises(CorruptSnapshotError):
            await fetch(storage, "file", 0, [5 * MiB])
        await storage.close()

    asyncio.run(use())


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("size", [MiB, 2 * MiB + 1, 3 * MiB - 4095])
def test_file_storage_direct_io_truncates_a_partial_last_page(tmp_path, mode, size):
    if mode == "always":
        require_direct(tmp_path)
    data = pattern(size)

    async def use():
        storage = opened(tmp_path, direct_io=mode)
        await store(storage, "file", data, seed=3)
        assert await fetch(storage, "file", 1, [size - 1]) == data[1:]
        await storage.close()

    asyncio.run(use())
    assert (tmp_path / "file").read_bytes() == data


def test_file_storage_direct_io_writes_unaligned_parts(tmp_path):
    require_direct(tmp_path)
    data = pattern(4 * MiB)

    async def use():
        storage = opened(tmp_path, direct_io="always")
        writer = await storage.create("file", len(data))
        await writer.write(0, [aligned(data[:MiB])])
        await writer.write(MiB, [data[MiB : MiB + 5]])
        await writer.write(MiB + 5, [aligned(data)[MiB + 5 : 2 * MiB], aligned(data[2 * MiB :])])
        await writer.finish()

    asyncio.run(use())
    assert (tmp_path / "file").read_bytes() == data


def test_file_storage_unwritable_path_error_names_path_and_reason(tmp_path):
    (tmp_path / "in the way").write_bytes(b"a file")

    async def use():
        storage = opened(tmp_path / "in the way" / "root")
        for attempt in [lambda: storage.put("file", b"."), lambda: storage.create("data/file", 1)]:
            with pytest.raises(StorageError, match=r"in the way/root/.*file: Not a directory"):
                await attempt()

    asyncio.run(use())


def test_file_storage_does_not_follow_a_link_out_of_the_root(tmp_path):
    (tmp_path / "outside").write_bytes(b"precious")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/file").symlink_to(tmp_path / "outside")

    async def use():
        storage = opened(tmp_path / "root")
        with pytest.raises(StorageError):
            await storage.create("file", 1)
        await storage.put("file", b"replaces the link")

    asyncio.run(use())
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert not (tmp_path / "root/file").is_symlink()


@pytest.mark.parametrize(
    ("kind", "direct"),
    [("ext4", True), ("xfs", True)]
    + [
        (kind, False)
        for kind in ("nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse", "wekafs", "zfs", "")
    ],
)
def test_file_storage_direct_io_is_for_local_file_systems_unless_always(tmp_path, monkeypatch, kind, direct):
    """Also for the cold reads of files that a local file system wrote."""
    require_direct(tmp_path)
    monkeypatch.setattr(files, "_file_system", lambda device: kind)
    monkeypatch.setattr(files, "is_cold", lambda descriptor, offset: True)
    data = os.urandom(3 << 20)
    (tmp_path / "data").write_bytes(data)
    for mode in ("auto", "always"):
        wanted = direct or mode == "always"
        assert files.is_worthwhile(str(tmp_path), always=mode == "always") == wanted
        reader = OpenFile(str(tmp_path / "data"), mode)
        assert reader.goes_around(0) == wanted
        reader.close()


def opened_in(folder):
    """Return the names of the open files in a folder."""
    gc.collect()
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    found = [os.readlink(each) for each in links if os.path.islink(each)]
    return sorted(os.path.basename(each).split(" ")[0] for each in found if each.startswith(f"{folder}/"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files in /proc")
@pytest.mark.parametrize("portable_path", [False, True])
def test_file_storage_cancelled_create_closes_its_file(tmp_path, monkeypatch, portable_path):
    """An interruption cancels the call, whose thread then returns the new file to nobody."""
    created, go_on, real = threading.Event(), threading.Event(), files.Folders.mark_changed

    def wait(self, folder):
        created.set()
        assert go_on.wait(60)
        return real(self, folder)

    monkeypatch.setattr(files.Folders, "mark_changed", wait)
    context = Context(file_io="portable" if portable_path else "auto")

    async def cancel():
        storage = open_storage(URL.parse(str(tmp_path)), None, context)
        creation = asyncio.ensure_future(storage.create("data/new", 10))
        await asyncio.to_thread(created.wait, 60)
        assert opened_in(tmp_path) == ["new"]
        creation.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await creation
        await storage.close()

    asyncio.run(cancel())
    assert opened_in(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files in /proc")
def test_file_storage_that_is_not_closed_closes_its_files(tmp_path):
    (tmp_path / "a").write_bytes(pattern(100))

    async def read():
        storage = open_storage(URL.parse(str(tmp_path)), None, Context())
        await fetch(storage, "a", 0, [100])
        assert opened_in(tmp_path) == ([] if storage._portable else ["a"])  # that path opens it for each read

    asyncio.run(read())
    assert opened_in(tmp_path) == []
