"""What others may have put into a snapshot's folder: links, pipes, devices and locks neither lead nor hold us."""

import asyncio
import errno
import fcntl
import mmap
import os

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, URL, Context
from snapshot.storages.file import files
from snapshot.testing.conformance import fetch


def use(folder, attempt):
    async def work():
        storage = open_storage(URL.parse(str(folder)), {}, Context())
        try:
            return await attempt(storage)
        finally:
            await storage.close()

    return asyncio.run(work())


@pytest.fixture
def linked(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"precious")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/data").symlink_to(tmp_path / "outside")
    return tmp_path


def test_file_storage_does_not_write_through_a_linked_folder(linked):
    for attempt in [
        lambda storage: storage.create("data/new", 1),
        lambda storage: storage.put("data/new", b"."),
        lambda storage: storage.put("data/deep/new", b"", expect=ABSENT),
        lambda storage: storage.delete(["data/file"]),
    ]:
        with pytest.raises(StorageError, match="root/data is a symbolic link"):
            use(linked / "root", attempt)
    assert os.listdir(linked / "outside") == ["file"]


def test_file_storage_does_not_list_through_a_linked_folder(linked):
    assert use(linked / "root", lambda storage: storage.list("data/")) == []
    assert use(linked / "root", lambda storage: storage.list()) == ["data"]


def test_file_storage_reads_a_linked_folder_and_writes_a_linked_root(linked):
    assert use(linked / "root", lambda storage: storage.get("data/file")) == b"precious"
    assert use(linked / "root", lambda storage: fetch(storage, "data/file", 0, [8])) == b"precious"
    (linked / "link").symlink_to(linked / "outside")
    use(linked / "link", lambda storage: storage.put("data/new", b"."))
    assert use(linked / "link", lambda storage: storage.list("data/")) == ["data/new"]
    use(linked / "link", lambda storage: storage.delete(["data/new"]))
    assert os.listdir(linked / "outside") == ["file"]


def test_file_storage_reads_only_regular_files(tmp_path):
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ["zero", "pipe"]:
        with pytest.raises(StorageError, match="not a regular file"):
            use(tmp_path, lambda storage, name=name: storage.get(name, limit=100))
        with pytest.raises(StorageError, match="not a regular file"):
            use(tmp_path, lambda storage, name=name: fetch(storage, name, 0, [10]))
        with pytest.raises(StorageError, match="not a file"):
            use(tmp_path, lambda storage, name=name: storage.stat(name))


def test_file_storage_lock_that_is_never_released_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="locked by another process"):
            use(tmp_path, lambda storage: storage.put("file", b"."))
    finally:
        os.close(folder)
    assert os.listdir(tmp_path) == []
    use(tmp_path, lambda storage: storage.put("file", b"."))


def test_file_storage_empty_claim_never_has_another_name(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("an interruption here would leave a file that nobody knows")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    token = use(tmp_path, lambda storage: storage.put(".take-1", b"", expect=ABSENT))
    assert use(tmp_path, lambda storage: storage.stat(".take-1")).token == token
    with pytest.raises(StorageConflictError):
        use(tmp_path, lambda storage: storage.put(".take-1", b"", expect=ABSENT))
    assert os.listdir(tmp_path) == [".take-1"]


def test_file_storage_file_that_vanishes_is_not_found(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b".")
    real = os.stat

    def vanishing(path, *rest, **options):
        found = real(path, *rest, **options)
        if str(path) == str(tmp_path / "file"):
            os.unlink(path)
        return found

    monkeypatch.setattr(os, "stat", vanishing)
    assert use(tmp_path, lambda storage: storage.stat("file")).size == 1
    with pytest.raises(StorageNotFoundError):
        use(tmp_path, lambda storage: storage.stat("file"))


@pytest.mark.parametrize(("done", "answers"), [(0, [22]), (4096, [4096, 22]), (4096, [4096, 0]), (5000, [5000])])
def test_write_aligned_that_is_refused_midway_writes_nothing(tmp_path, monkeypatch, done, answers):
    written = iter(answers)

    def write(descriptor, buffers, offset):
        answer = next(written)
        if answer == errno.EINVAL:
            raise OSError(errno.EINVAL, "not aligned")
        return answer

    monkeypatch.setattr(files.os, "pwritev", write)
    with mmap.mmap(-1, 3 * 4096) as memory:
        assert not files.write_aligned(0, 0, [memory], 3 * 4096)
    assert next(written, None) is None


def test_write_aligned_raises_an_error_that_is_not_about_alignment(monkeypatch):
    def write(descriptor, buffers, offset):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "pwritev", write)
    with mmap.mmap(-1, 4096) as memory, pytest.raises(OSError, match="full"):
        files.write_aligned(0, 0, [memory], 4096)


@pytest.mark.parametrize("count", [0, 1, files.SHORT, files.SHORT + 1])
def test_list_short_folder_never_lists_a_part(tmp_path, count):
    (tmp_path / "many").mkdir()
    for number in range(count):
        os.mknod(tmp_path / "many" / str(number))
    found = files.list_short_folder(str(tmp_path / "many"))
    if count > files.SHORT:
        assert found is None
    else:
        assert sorted(found) == sorted(map(str, range(count)))


def test_list_short_folder_of_no_folder_and_of_a_file(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert sorted(files.list_short_folder(str(tmp_path))) == ["file", "folder/"]
    assert files.list_short_folder(str(tmp_path / "none")) == []
    assert files.list_short_folder(str(tmp_path / "file")) is None


def test_deletion_may_not_be_synced_above_the_root_but_must_be_below(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "kept").mkdir(parents=True)
    (root / "kept" / "file").touch()

    def refuse(folder):
        raise PermissionError(errno.EACCES, "unreadable", folder)

    monkeypatch.setattr(files, "sync_folder", refuse)
    synced = files.Folders(str(root), durable=True)
    synced.sync_removed({str(tmp_path / "gone")})  # the nearest existing folder is above the root
    with pytest.raises(PermissionError):
        synced.sync_removed({str(root / "kept" / "gone")})
