"""What others may have put into a snapshot's folder: links, pipes, devices and locks neither lead nor hold us."""

import asyncio
import fcntl
import os

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, URL, Context
from snapshot.plugins.file import files
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
