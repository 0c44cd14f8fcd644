"""Files that the processes of a host hand on to each other."""

import asyncio
import fcntl
import hashlib
import os
import signal
import tempfile

import pytest

from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.io import host_share
from snapshot.io.host_share import PREFIX, HostShare
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import Capabilities, StorageWrapper
from snapshot.io.url import URL


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def get(share, path, data=b"read", reads=None):
    async def read():
        if reads is not None:
            reads.append(path)
        return data

    return asyncio.run(share.get(path, read))


def folder_of(temporary, token):
    return temporary / f"{PREFIX}{os.getuid()}-{token}"


def test_host_share_second_process_gets_what_the_first_read(temporary):
    first, second, other = HostShare("a"), HostShare("a"), HostShare("b")
    reads = []
    assert get(first, "data/x", b"x" * 99, reads) == b"x" * 99
    assert get(second, "data/x", b"y", reads) == b"x" * 99
    assert get(second, "../etc/\udcff", b"z", reads) == b"z"
    assert get(other, "data/x", b"y", reads) == b"y"
    assert reads == ["data/x", "../etc/\udcff", "data/x"]
    assert folder_of(temporary, "a").stat().st_mode & 0o777 == 0o700
    first.close()
    assert get(second, "more", b"m") == b"m"
    second.close()
    assert not folder_of(temporary, "a").exists()
    other.close()
    assert not list(temporary.iterdir())


def test_host_share_damaged_bytes_are_read_again(temporary):
    first, second = HostShare("a"), HostShare("a")
    get(first, "x", b"damaged")
    assert get(second, "x", b"whole") == b"damaged"
    assert get(second, "x", b"whole") == b"whole"


def test_host_share_failed_read_is_repeated_by_the_next_process(temporary):
    first, second = HostShare("a"), HostShare("a")

    async def fail():
        raise ValueError("no network")

    with pytest.raises(ValueError, match="no network"):
        asyncio.run(first.get("x", fail))
    assert get(second, "x", b"whole") == b"whole"


def test_host_share_stopped_process_does_not_block_others(temporary, monkeypatch):
    monkeypatch.setattr(host_share, "PATIENCE", 10_000)  # longer than the time limit of a test
    share = HostShare("a", timeout=0.1)
    lock = folder_of(temporary, "a") / f"{hashlib.sha256(b'x').hexdigest()}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert get(share, "x", b"own") == b"own"
    assert get(HostShare("a"), "x", b"next") == b"next"


def test_host_share_child_forked_during_a_failed_read_does_not_block_others(temporary, monkeypatch):
    monkeypatch.setattr(host_share, "PATIENCE", 10_000)  # longer than the time limit of a test
    first, second = HostShare("a", 10_000), HostShare("a", 10_000)
    ours, theirs = os.pipe()
    children = []

    async def fail():
        children.append(os.fork())
        if not children[0]:
            os.close(theirs)
            os.read(ours, 1)  # until the parent closes its end
            os._exit(0)
        raise ValueError("no network")

    try:
        with pytest.raises(ValueError, match="no network"):
            asyncio.run(first.get("x", fail))
        assert get(second, "x", b"whole") == b"whole"
    finally:
        os.close(theirs)
        os.waitpid(children[0], 0)
        os.close(ours)


def test_host_share_without_disk_space_reads_in_each_process(temporary, monkeypatch):
    def full(self, data):
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    first, second = HostShare("a"), HostShare("a")
    assert get(first, "x", b"one") == b"one"
    assert get(second, "x", b"two") == b"two"


@pytest.mark.parametrize("kind", ["open", "link", "file", "missing", "none"])
def test_host_share_foreign_folder_is_not_used(temporary, monkeypatch, kind):
    folder = folder_of(temporary, "a")
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    elif kind == "file":
        folder.write_bytes(b"")
    elif kind == "none":  # as on a full disk
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(temporary / "missing")])
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    first, second = HostShare("a"), HostShare("a")
    assert get(first, "x", b"one") == b"one"
    assert get(second, "x", b"two") == b"two"
    first.close()
    second.close()


def test_host_share_folders_of_killed_processes_are_deleted(temporary):
    used = HostShare("used")
    get(used, "x")
    child = os.fork()
    if not child:
        get(HostShare("killed"), "x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(temporary.iterdir())) == 2
    HostShare("next").close()
    assert [path.name.rpartition("-")[2] for path in temporary.iterdir()] == ["used"]
    used.close()
    assert not list(temporary.iterdir())


def test_host_share_leaves_no_files_after_many_processes(temporary):
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                for number in range(40):
                    share = HostShare("a")
                    assert get(share, f"x{number}", b"bytes") == b"bytes"
                    share.close()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert not list(temporary.iterdir())


class Read:
    """Reads that fail or give bytes, in their order."""

    def __init__(self, *outcomes):
        self.outcomes, self.count = list(outcomes), 0

    async def __call__(self):
        self.count += 1
        found = self.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize(
    ("local", "places", "outcomes", "count"),
    [
        (True, 0, ["x"], 1),
        (True, 0, [CorruptSnapshotError("bad")], 1),
        (True, 1, [CorruptSnapshotError("bad"), "x"], 2),
        (True, 1, [CorruptSnapshotError("bad")] * 2, 2),
        (False, 0, [CorruptSnapshotError("bad"), "x"], 2),
        (False, 0, [CorruptSnapshotError("bad")] * 2, 2),
        (False, 2, [CorruptSnapshotError("bad")] * 3, 3),
        (False, 0, [StorageError("gone")], 1),
    ],
)
def test_read_twice_looks_in_other_places_and_once_more_over_a_network(local, places, outcomes, count, told):
    session, read, left = Session(URL.parse("memory://read-twice"), None), Read(*outcomes), [True] * places

    class Place(StorageWrapper):
        def switch_source(self, path):
            assert path == "file"
            return bool(left) and left.pop()

    session.storage = Place(session.storage)
    session.storage.capabilities = Capabilities(local=local)
    if isinstance(outcomes[-1], Exception):
        with pytest.raises(type(outcomes[-1]), match=str(outcomes[-1])):
            run(session.read_twice("file", read))
    else:
        assert run(session.read_twice("file", read)) == "x"
    assert read.count == count
    assert [(each.name, each.verb) for each in told] == [("retry", "read")] * (count - 1)


def test_read_once_on_host_reads_itself_or_takes_what_another_has_read(temporary):
    session, other = (Session(URL.parse("memory://read-once"), None) for _ in range(2))
    assert run(session.read_once_on_host("x", Read(b"own"))) == b"own"
    assert session.choose_first(5) == 0
    session._share, other._share = HostShare("once"), HostShare("once")
    assert run(session.read_once_on_host("x", Read(b"first"))) == b"first"
    assert run(other.read_once_on_host("x", Read(b"second"))) == b"first"
    assert run(other.read_once_on_host("x", Read(b"again"))) == b"again"
    assert {session.choose_first(3) for _ in range(200)} == {0, 1, 2}
    assert session.choose_first(0) == 0
    for each in (session, other):
        each._share.close()
