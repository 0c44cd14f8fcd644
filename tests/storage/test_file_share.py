"""Further names of files: reflinks, links and copies by the kernel, every refusal, and nothing left of one."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL, Context
from snapshot.storages.file import files as links
from snapshot.storages.file.file_storage import FileStorage
from snapshot.testing import StorageTests
from snapshot.testing.conformance import pattern
from tests.faults.mounted_disks import disk, lose_power
from tests.helpers.storage_calls import use

MiB = 1 << 20
DATA = pattern(3 * MiB + 17)
REFUSALS = [
    getattr(errno, name)
    for name in ("EXDEV", "EMLINK", "EPERM", "EACCES", "EOPNOTSUPP", "ENOSYS", "ENOSPC", "EDQUOT", "EROFS", "EIO")
]
NO_COPY = [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOSPC, errno.EIO, errno.EPERM]


@pytest.fixture
def source(tmp_path):
    """A data file of an earlier snapshot."""
    path = tmp_path / "step-1/data/file"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    return path


def share(source, root, path="data/shared", *, token=None, durable=True, settle=True):
    """Share a file with the snapshot at a root, and return its path there."""

    async def work():
        storage = open_storage(URL.parse(str(root)), {}, Context(durable=durable))
        await storage.share(URL.parse(str(source)), path, token=token)
        if settle:
            await storage.settle()
        await storage.close()

    asyncio.run(work())
    return Path(root, path)


def refusing(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def left_below(folder):
    return sorted(os.path.join(root, name) for root, folders, files in os.walk(folder) for name in [*folders, *files])


def is_link(path, source):
    return os.path.samefile(path, source)


@pytest.fixture
def no_reflink(monkeypatch):
    monkeypatch.setattr(fcntl, "ioctl", refusing(errno.EOPNOTSUPP))


# Methods, on real file systems


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def real_disk(request, tmp_path):
    """A file system on an image, which root can mount."""
    kind = request.param
    if not shutil.which(f"mkfs.{kind}", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
        pytest.skip(f"mkfs.{kind} is not installed")
    if kind not in Path("/proc/filesystems").read_text().split():
        pytest.skip(f"the kernel does not know {kind}")
    with disk(kind, tmp_path) as made:
        yield made


def test_file_share_prefers_a_reflink_to_a_link(real_disk):
    source = real_disk.mount / "step-1"
    source.write_bytes(DATA)
    source.chmod(0o640)
    before = real_disk.used()[0]
    shared = share(source, real_disk.mount / "step-2")
    assert shared.read_bytes() == DATA
    assert is_link(shared, source) == (real_disk.kind == "ext4")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o440
    assert real_disk.used()[0] - before < MiB
    if real_disk.kind != "ext4":  # then each may change without the other
        assert stat.S_IMODE(source.stat().st_mode) == 0o640
        source.write_bytes(b"changed")
        assert shared.read_bytes() == DATA


@pytest.mark.parametrize("real_disk", ["ext4", "xfs"], indirect=True)  # btrfs cannot be shut down
def test_file_share_survives_a_power_loss(real_disk):
    """Also if the source was not durable."""
    source = real_disk.mount / "step-1"
    source.write_bytes(DATA)
    share(source, real_disk.mount / "step-2")
    lose_power(real_disk.mount)
    real_disk.again()
    assert (real_disk.mount / "step-2/data/shared").read_bytes() == DATA


def test_file_share_copies_in_the_kernel_if_a_link_is_refused(real_disk, monkeypatch):
    monkeypatch.setattr(os, "link", refusing(errno.EMLINK))
    source = real_disk.mount / "step-1"
    source.write_bytes(DATA)
    shared = share(source, real_disk.mount / "step-2")
    assert shared.read_bytes() == DATA
    assert not is_link(shared, source)


def test_file_share_across_file_systems_is_refused(tmp_path):
    if not os.path.ismount("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("this machine has one file system only")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        source.write(DATA)
        source.flush()
        with pytest.raises(StorageError, match="cannot share") as caught:
            share(source.name, tmp_path / "step-2")
    assert caught.value.errno == errno.EXDEV
    assert left_below(tmp_path) == []


# Refusals


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_file_share_links_if_a_reflink_is_refused(source, tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "ioctl", refusing(number))
    assert is_link(share(source, tmp_path / "step-2"), source)
    assert source.read_bytes() == DATA


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_file_share_copies_if_a_link_is_refused(source, tmp_path, monkeypatch, no_reflink, number):
    monkeypatch.setattr(os, "link", refusing(number))
    shared = share(source, tmp_path / "step-2")
    assert shared.read_bytes() == DATA
    assert not is_link(shared, source)
    assert stat.S_IMODE(shared.stat().st_mode) == stat.S_IMODE(source.stat().st_mode) & 0o555


@pytest.mark.parametrize("number", NO_COPY, ids=errno.errorcode.get)
def test_file_share_raises_if_a_copy_is_refused_and_leaves_no_file(source, tmp_path, monkeypatch, no_reflink, number):
    monkeypatch.setattr(os, "link", refusing(errno.EXDEV))
    monkeypatch.setattr(os, "copy_file_range", refusing(number))
    with pytest.raises(StorageError, match="cannot share") as caught:
        share(source, tmp_path / "step-2")
    assert type(caught.value) is StorageError
    assert str(tmp_path / "step-2/data/shared") in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert not (tmp_path / "step-2").exists()
    assert source.read_bytes() == DATA


def refuse_new_files(monkeypatch, number):
    opens = os.open

    def no_new_files(path, flags, *more, **kwargs):
        if flags & os.O_CREAT:
            refusing(number)()
        return opens(path, flags, *more, **kwargs)

    monkeypatch.setattr(os, "open", no_new_files)


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_file_share_links_if_no_new_file_can_be_created(source, tmp_path, monkeypatch, number):
    refuse_new_files(monkeypatch, number)
    assert is_link(share(source, tmp_path / "step-2"), source)


def test_file_share_copies_in_several_steps(source, tmp_path, monkeypatch, no_reflink):
    copies, steps = os.copy_file_range, []

    def short(origin, target, length, *offsets):
        steps.append(length)
        return copies(origin, target, min(length, 1_000_000), *offsets)

    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(os, "copy_file_range", short)
    assert share(source, tmp_path / "step-2").read_bytes() == DATA
    assert len(steps) == 4


def test_file_share_short_copy_is_an_error(source, tmp_path, monkeypatch, no_reflink):
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    with pytest.raises(StorageError, match=f"0 of {len(DATA)} bytes"):
        share(source, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()


@pytest.mark.parametrize("copying", [False, True])
def test_file_share_failed_fsync_is_an_error_and_leaves_no_file(source, tmp_path, monkeypatch, no_reflink, copying):
    if copying:
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"):
        share(source, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()
    assert source.read_bytes() == DATA
    share(source, tmp_path / "step-2", durable=False)  # syncs nothing


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO])
def test_file_share_link_whose_response_is_lost_was_created(source, tmp_path, monkeypatch, no_reflink, number):
    makes = os.link

    def lost(*arguments, **more):
        makes(*arguments, **more)
        refusing(number)()

    monkeypatch.setattr(os, "link", lost)
    assert is_link(share(source, tmp_path / "step-2"), source)


# Races


@pytest.fixture
def before_link(monkeypatch, no_reflink):
    """A function that sets what happens before the first link."""
    makes = os.link

    def happens(action):
        def link(*arguments, **more):
            monkeypatch.setattr(os, "link", makes)
            action()
            return makes(*arguments, **more)

        monkeypatch.setattr(os, "link", link)

    return happens


def replaced(path):
    path.with_name("other").write_bytes(b"other")
    os.replace(path.with_name("other"), path)


def test_file_share_of_a_replaced_source_is_a_conflict(source, tmp_path, before_link):
    before_link(lambda: replaced(source))
    with pytest.raises(StorageConflictError, match="replaced"):
        share(source, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()
    assert source.read_bytes() == b"other"


def test_file_share_of_a_changed_source_is_a_conflict(source, tmp_path, before_link):
    before_link(lambda: source.write_bytes(b"in place"))
    with pytest.raises(StorageConflictError, match="changed"):
        share(source, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()


def test_file_share_of_a_deleted_source_is_not_found(source, tmp_path, before_link):
    before_link(source.unlink)
    with pytest.raises(StorageNotFoundError, match="step-1"):
        share(source, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()


def test_file_share_creates_a_removed_folder_again(source, tmp_path, before_link):
    before_link(lambda: os.rmdir(tmp_path / "step-2/data"))
    assert is_link(share(source, tmp_path / "step-2"), source)


def test_file_share_cancelled_leaves_no_file(source, tmp_path, before_link):
    reached, go = threading.Event(), threading.Event()

    def wait():
        reached.set()
        go.wait(30)

    async def work(storage):
        task = asyncio.ensure_future(storage.share(URL.parse(str(source)), "data/shared"))
        await asyncio.to_thread(reached.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.01, go.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    before_link(wait)
    use(str(tmp_path / "step-2"), {}, work)
    assert not (tmp_path / "step-2").exists()
    assert source.read_bytes() == DATA


# What is shared, and where


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_file_share_accepts_only_regular_files(source, tmp_path, kind):
    other = tmp_path / "other"
    {"link": lambda: other.symlink_to(source), "folder": other.mkdir, "pipe": lambda: os.mkfifo(other)}[kind]()
    with pytest.raises(StorageError) as caught:
        share(other, tmp_path / "step-2")
    assert type(caught.value) is StorageError
    assert str(other) in str(caught.value)
    assert not (tmp_path / "step-2").exists()


@pytest.mark.parametrize("way", ["folder", "file"])
def test_file_share_does_not_write_through_a_link(source, tmp_path, way):
    (tmp_path / "outside").mkdir()
    (tmp_path / "step-2").mkdir()
    target = tmp_path / "step-2/data"
    if way == "file":
        target.mkdir()
        target /= "shared"
    target.symlink_to(tmp_path / "outside" / ("" if way == "folder" else "file"))
    with pytest.raises(StorageError, match="symbolic link" if way == "folder" else "already exists"):
        share(source, tmp_path / "step-2")
    assert os.listdir(tmp_path / "outside") == []
    assert target.is_symlink()


@pytest.mark.parametrize("failing", [False, True])
def test_file_share_under_its_own_name_is_refused(source, monkeypatch, failing):
    if failing:  # else the clean-up would remove the source
        refuse_new_files(monkeypatch, errno.EMFILE)
        monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    for alias in (source.parent, source.parent.parent / "again"):
        if not alias.exists():
            alias.symlink_to(source.parent)
        with pytest.raises(StorageConflictError):
            share(source, alias, "file")
    assert source.read_bytes() == DATA


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o400, 0o755])
@pytest.mark.parametrize("copying", [False, True])
def test_file_share_result_is_read_only_and_its_mode_never_wider(
    source, tmp_path, monkeypatch, no_reflink, copying, mode
):
    if copying:
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    source.chmod(mode)
    shared = share(source, tmp_path / "step-2")
    assert stat.S_IMODE(shared.stat().st_mode) == mode & (0o444 if copying else 0o555)
    assert stat.S_IMODE(source.stat().st_mode) == (mode if copying else mode & 0o555)


def test_file_share_ignores_a_mode_that_cannot_be_changed(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fchmod", refusing(errno.EPERM))
    assert share(source, tmp_path / "step-2").read_bytes() == DATA


def test_file_share_files_are_expected_and_synced_by_a_commit(source, tmp_path, monkeypatch):
    synced = []
    syncs = os.fsync

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        syncs(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "step-2"

    async def work(storage):
        await storage.put("claim", b"")
        synced.clear()
        await storage.share(URL.parse(str(source)), "data/shared")
        assert len(synced) == 1
        assert os.path.basename(synced[0]) in ("file", "shared")
        await storage.commit("claim", "manifest", b"first")
        assert {str(root / "data"), str(root)} <= set(synced)
        await storage.put("claim", b"")
        (root / "data/shared").unlink()
        with pytest.raises(StorageConflictError, match="data/shared"):
            await storage.commit("claim", "more", b"second")

    use(str(root), {}, work)


@contextlib.contextmanager
def as_nobody():
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("own", [True, False])
def test_file_share_without_privileges_works(own):
    """The kernel may refuse links to files of others (`fs.protected_hardlinks`)."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        source = Path(folder, "step-1")
        source.write_bytes(DATA)
        if own:
            os.chown(source, 65534, 65534)

        async def work(storage):
            token = (await storage.stat("step-1")).token
            for path in ("shared", "again"):
                await storage.share(URL.parse(str(source)), path, token=token)
                assert await storage.get(path) == DATA
                assert not os.access(path, os.W_OK, effective_ids=True)
            await storage.drop_caches(["shared"])
            await storage.delete(["step-1", "shared"])
            assert await storage.get("again") == DATA
            await storage.delete(["again"])
            assert await storage.list() == []

        with as_nobody():
            use(folder, {}, work)


class TestCopiesByTheKernel(StorageTests):
    """The contract without reflinks and links."""

    capabilities = FileStorage.capabilities
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each

    @pytest.fixture
    def url(self, tmp_path, monkeypatch):
        monkeypatch.setattr(links, "_link", lambda *_: refusing(errno.EXDEV)())
        return str(tmp_path / "root")
