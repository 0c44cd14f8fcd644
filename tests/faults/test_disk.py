"""Disks that are full, broken, locked or gone: a clear error, nothing committed or left, and the next take works."""

import errno
import shutil

import pytest
import torch

from snapshot import Snapshot, SnapshotExistsError, StateDict, TakeOptions
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
