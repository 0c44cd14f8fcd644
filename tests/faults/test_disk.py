"""Disks that are full, broken, locked or gone: a clear error, nothing committed or left, and the next take works."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, SnapshotExistsError, SnapshotManager, StateDict, StorageError, TakeOptions, events
from snapshot.manifest.document import METADATA
from snapshot.save.transaction import Transaction
from snapshot.storages.file.file_storage import FileStorage
from tests.faults import failing_calls
from tests.faults.failing_calls import AFTER, FAIL, INTERRUPTIBLE, NOTHING, PART, calls_of, fail_at, fail_everywhere
from tests.faults.killed_jobs import check, logged, outcome, prepare
from tests.faults.mounted_disks import disk
from tests.faults.shared_folder import Place, take

pytestmark = [pytest.mark.deadly, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(("verb", "every"), [("take", 15), ("overwrite", 16), ("delete", 9), ("read", 15)])
def test_failed_system_call_is_an_error_and_leaves_no_files(shimmed, tmp_path, verb, every):
    tried, survived = fail_everywhere(shimmed, tmp_path, verb, every=every)
    assert tried - survived >= 3


@pytest.mark.parametrize(("verb", "every"), [("take", 25), ("overwrite", 25), ("read", 10)])
def test_failed_system_call_on_the_portable_path_is_an_error(portable_shimmed, tmp_path, verb, every):
    tried, survived = fail_everywhere(portable_shimmed, tmp_path, verb, every=every)
    assert tried - survived >= 3


@pytest.mark.parametrize("verb", ["overwrite", "read"])
def test_short_write_or_read_on_the_portable_path_is_continued(portable_shimmed, tmp_path, verb):
    place = Place(tmp_path)
    counts = calls_of(portable_shimmed, place, verb)
    assert not {"preadv", "pwritev"} & set(counts), counts
    points = [(name, nth) for name in ("write", "read") for nth in range(1, counts.get(name, 0) + 1)]
    assert len(points) >= 3
    for name, nth in points:
        assert not fail_at(portable_shimmed, place, verb, name, nth, 0, PART, 1 + nth % 2 * 4), (name, nth)


@pytest.mark.parametrize("verb", ["take", "overwrite", "read"])
def test_short_write_or_read_is_continued(shimmed, tmp_path, verb):
    place = Place(tmp_path)
    counts = calls_of(shimmed, place, verb)
    tried = 0
    for name in ("write", "pwritev", "read", "preadv"):
        for nth in range(1, counts.get(name, 0) + 1):
            assert not fail_at(shimmed, place, verb, name, nth, 0, PART, 1 + nth % 2 * 4), (name, nth)
            tried += 1
    assert tried >= 2


def test_write_that_returns_zero_is_an_error(shimmed, tmp_path):
    place = Place(tmp_path)
    for name in ("write", "pwritev"):
        assert fail_at(shimmed, place, "overwrite", name, 1, errno.EIO, NOTHING, 1000)


@pytest.mark.parametrize("verb", ["overwrite", "read"])
def test_interrupted_system_call_is_repeated(shimmed, tmp_path, verb):
    place = Place(tmp_path)
    counts = calls_of(shimmed, place, verb)
    for name in INTERRUPTIBLE:
        if name in counts:
            assert not fail_at(shimmed, place, verb, name, 1, errno.EINTR, FAIL, 2), name


def test_lost_response_of_link_or_rename_is_not_another_take(shimmed, tmp_path):
    place = Place(tmp_path)
    assert not fail_at(shimmed, place, "take", "link", 1, errno.EEXIST, AFTER)
    assert not fail_at(shimmed, place, "overwrite", "rename", 1, errno.ENOENT, AFTER)


def test_failed_fsync_is_not_trusted_the_next_time(shimmed, tmp_path):
    place = Place(tmp_path)
    count = calls_of(shimmed, place, "overwrite")["fsync"]
    for nth in range(1, count + 1):
        fail_at(shimmed, place, "overwrite", "fsync", nth, errno.EIO)


@pytest.mark.parametrize("worker", [False, True])
def test_no_free_file_descriptors_is_an_error_and_leaves_no_files(forker, tmp_path, worker):
    place = Place(tmp_path)
    failed = 0
    for verb in ["async_overwrite"] if worker else ["take", "async_overwrite", "read"]:
        for spare in range(0, 42, 13 if worker else 2):
            prepare(place, verb)
            stood = place.ours()
            found = forker.run(failing_calls.without_descriptors, verb, str(place.path), spare, worker).returned()
            if not found.kind:
                break
            failed += 1
            assert errno.EMFILE in found.errnos, found
            assert found.kind in ("StorageError", *(("SnapshotError", "OSError") if worker else ())), found
            assert not found.leaks, found
            assert place.stands() == (1 if stood else None)
            assert place.ours() == stood, (verb, spare, found)
        else:
            raise AssertionError(f"{verb} never worked")
    assert failed


@pytest.mark.parametrize("verb", ["take", "async_overwrite", "read"])
def test_signals_during_take_and_restore_do_no_harm(forker, tmp_path, verb):
    place = Place(tmp_path)
    prepare(place, verb)
    if verb == "take":
        verb = "overwrite"
    found = forker.run(failing_calls.interrupted, verb, str(place.path)).returned()
    assert not found.kind, found
    assert found.hits > 3
    assert not found.leaks
    place.clean(outcome(verb))


@pytest.mark.parametrize(("verb", "every"), [("take", 2), ("overwrite", 3), ("async_overwrite", 5), ("read", 4)])
def test_snapshot_folder_removed_during_a_take_or_restore(forker, tmp_path, verb, every):
    place = Place(tmp_path / "here", foreign=False)
    prepare(place, verb)
    operations = forker.run(logged, verb, str(place.path)).returned()
    commit = operations.index(("commit", ".snapshot_metadata")) + 1 if verb != "read" else len(operations)
    outcomes = set()
    for what in ("", "data"):
        for nth in range(1, commit + 1, every):
            place.reset()
            prepare(place, verb)
            found = forker.run(failing_calls.removed, verb, str(place.path), nth, what).returned()
            assert not found.leaks, found
            outcomes.add(found.kind)
            if verb == "read":
                pass  # every byte that was handed out has been verified, or there was an error
            elif found.kind:
                assert str(place.path) in found.text
                if what == "" and nth > 1:
                    assert place.stands() is None
                    assert not place.ours(), found
            else:
                assert place.stands() == outcome(verb)
            place.reset()
            take(place.path, 99)
            place.clean(99)
    assert outcomes - {""}


@pytest.mark.parametrize(("kind", "options", "elements"), [("tmpfs", "size=3m", 2_000_000), ("ext4", "", 20_000_000)])
def test_disk_that_is_full_fails_take_and_leaves_no_files(forker, tmp_path, kind, options, elements):
    with disk(kind, tmp_path, options=options) as made:
        place = Place(made.mount / "here")
        take(place.path, 1)
        before = made.used()
        for durable in (True, False):
            found = forker.run(
                failing_calls.filling, str(place.home / "step-2"), elements, {"durable": durable}
            ).returned()
            assert found.kind == "StorageError", found
            assert errno.ENOSPC in found.errnos
            assert "No space left" in found.text
            assert str(place.home) in found.text
            assert not found.leaks
            assert made.used() == before, "space was not given back"
        place.goes_on(place.stands(), by_delete=False)


MB = 1_000_000


def megabytes(step, count):
    return {"s": StateDict(x=torch.full((count * MB // 4,), float(step)))}


@pytest.mark.parametrize(("kind", "options"), [("tmpfs", "size=40m"), ("ext4", "")])
@pytest.mark.parametrize("incremental", [False, True])
def test_disk_that_is_nearly_full_is_said_before_the_take_once_until_it_changes(
    tmp_path, told, caplog, kind, options, incremental
):
    with disk(kind, tmp_path, options=options) as made:
        root = made.mount / "run"

        def said():
            found = [each for each in told if each.name == "nearly_full"]
            lines = [each.getMessage() for each in caplog.records if "nearly full" in each.getMessage()]
            assert len(found) == len(lines)
            return found, lines

        with SnapshotManager(root, signals=(), incremental=incremental) as manager:
            for step in (1, 2):
                manager.take(step, megabytes(step, 8))
            assert said() == ([], [])
            filler = made.mount / "filler"
            filler.write_bytes(b"x" * (free_in(root) - 6 * MB))
            made.sync()
            for _ in range(3):
                with pytest.raises(StorageError, match="No space left"):
                    manager.take(3, megabytes(3, 12))
            [event], [text] = said()
            assert (event.verb, event.path, event.fields["step"]) == ("take", str(root), 2)
            assert 8 * MB <= event.fields["took"] < 9 * MB
            assert 0 < event.fields["free"] < 8 * MB
            assert all(word in text for word in (str(root), "step-2", "MiB free", "7.6 MiB"))
            manager.take(4, megabytes(4, 2))  # it fits, which nobody knew
            manager.take(5, megabytes(5, 2))
            assert len(said()[0]) == 1
        told.clear()
        with SnapshotManager(root, signals=(), incremental=incremental) as manager:
            live = megabytes(0, 2)
            assert manager.restore_latest(live) == 5
            filler.write_bytes(b"x" * (filler.stat().st_size + free_in(root) - MB))
            with suppress(StorageError):  # the reserve of ext4 is root's
                manager.take(7, megabytes(7, 2))
            assert [each.fields["step"] for each in told if each.name == "nearly_full"] == [5]
            filler.unlink()
            for step in (8, 9):
                manager.take(step, megabytes(step, 2))
            filler.write_bytes(b"x" * (free_in(root) - MB))
            with suppress(StorageError):
                manager.take(10, megabytes(10, 2))
            assert [each.fields["step"] for each in told if each.name == "nearly_full"] == [5, 9]


def free_in(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _on_a_full_disk(root):
    heard = []
    events.add_handler(heard.append)
    try:
        with SnapshotManager(root, signals=(), timeout=60) as manager:
            manager.take(1, megabytes(dist.get_rank(), 2))
            if dist.get_rank() == 0:
                Path(root).with_name("filler").write_bytes(b"x" * (free_in(root) - 3 * MB))
            dist.barrier()
            manager.take(2, megabytes(dist.get_rank(), 1))
    finally:
        events.remove_handler(heard.append)
    return [each.fields["took"] // MB for each in heard if each.name == "nearly_full"]


def test_disk_that_is_nearly_full_is_said_by_the_leader_with_the_bytes_of_all_ranks(two, tmp_path):
    with disk("tmpfs", tmp_path, options="size=40m") as made:
        assert two.run(_on_a_full_disk, str(made.mount / "run")) == [[4], []]


def test_disk_that_cannot_be_measured_fails_no_take(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    with SnapshotManager(tmp_path / "run", signals=()) as manager:
        manager.take(1, megabytes(1, 1))
        monkeypatch.setattr(shutil, "disk_usage", refuse)
        manager.take(2, megabytes(2, 1))
        assert manager.steps() == [1, 2]


def test_disk_that_is_read_only_fails_take_and_delete(forker, tmp_path):
    with disk("ext4", tmp_path) as made:
        place = Place(made.mount / "here")
        for verb in ("take", "overwrite", "async_overwrite", "delete"):
            prepare(place, verb)
            stands = place.stands()
            made.remount("ro")
            found = forker.run(failing_calls.removed, verb, str(place.path), 0, "").returned()
            assert errno.EROFS in found.errnos, found
            assert place.stands() == stands
            made.remount("rw")
            check(place, verb, True, False)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_disk_that_fails_during_a_take(forker, tmp_path, kind):
    with disk(kind, tmp_path) as made:
        place = Place(made.mount / "here")
        prepare(place, "overwrite")
        operations = forker.run(logged, "overwrite", str(place.path)).returned()
        for nth in range(1, len(operations), 3):
            prepare(place, "overwrite")
            made.sync()
            found = forker.run(failing_calls.dying, str(place.path), str(made.mount), nth).returned()
            made.again()
            stands = place.stands()
            assert (stands, bool(found.kind)) in ((1, True), (2, False)), (nth, found)
            if found.kind:
                assert errno.EIO in found.errnos, found
            place.goes_on(stands, by_delete=False)


def test_take_whose_files_are_removed_right_after_the_commit_succeeds(tmp_path, monkeypatch):
    publish = FileStorage._publish

    def then_gone(self, aside, path, expect):
        token = publish(self, aside, path, expect)
        if path == METADATA:
            shutil.rmtree(tmp_path / "s")  # as another process's delete would
        return token

    monkeypatch.setattr(FileStorage, "_publish", then_gone)
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(1000))})
    assert not Snapshot(tmp_path / "s").exists()


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_take_whose_data_files_are_removed_before_the_commit_does_not_commit(
    writer_process, tmp_path, monkeypatch, worker
):
    expect_claim = Transaction._expect_claim

    async def gone(transaction):
        for file in (tmp_path / "s" / "data").iterdir():
            file.unlink()
        await expect_claim(transaction)

    monkeypatch.setattr(Transaction, "_expect_claim", gone)
    with pytest.raises(SnapshotExistsError, match="deleted"):
        Snapshot.async_take(
            tmp_path / "s", {"s": StateDict(x=torch.ones(1000))}, options=TakeOptions(worker=worker)
        ).wait()
    assert not [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
