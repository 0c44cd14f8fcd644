"""The folder of a run on one host: its steps, their files, what is removed from it, and copies that are verified."""

import os

import pytest

from snapshot import Snapshot
from snapshot.errors import CorruptSnapshotError, StorageNotFoundError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, decode_document
from snapshot.runs.facts import PINNED
from snapshot.runs.timeline import NO_ORIGIN, Attempt, Origin
from snapshot_tiers.control import StepStatus, UploadState
from snapshot_tiers.near_steps import (
    FRESH,
    PULLED,
    NearFolder,
    StepView,
    aside_of,
    copy_verified,
    describe_files,
    is_intact,
    rank_of,
    remove_asides,
    view_of,
)
from snapshot_tiers.tiered_steps import STALLS, UploadWatch
from tests.plugins.snapshot_tiers.noted_steps import RUN, A, take

OTHER = Attempt("b" * 12, "d" * 12, 1)


def files_in(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


@pytest.fixture
def near(tmp_path):
    return NearFolder(str(tmp_path))


def test_near_folder_lists_committed_steps_of_a_run(near, tmp_path):
    assert NearFolder(f"{tmp_path}/missing").steps() == {}
    take(tmp_path, 20, order=20)
    take(tmp_path, 3, order=3)
    take(tmp_path, 4, of=OTHER)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-06").mkdir()
    (tmp_path / "other").mkdir()
    assert list(near.steps()) == [3, 4, 20]
    assert list(near.steps_of(RUN)) == [3, 20]
    assert sorted(near.folders()) == [3, 4, 5, 20]
    assert near.steps()[3].origin == Origin(RUN, 1, A.name, 3)
    assert near.steps()[3].save_id == Snapshot(tmp_path / "step-3").metadata.save_id
    take(tmp_path, 3, value=1, overwrite=True)
    assert near.steps()[3].save_id == Snapshot(tmp_path / "step-3").metadata.save_id
    (tmp_path / "step-3" / METADATA).unlink()
    assert list(near.steps()) == [4, 20]


def test_near_folder_files_are_those_of_saves_with_their_sizes(near, tmp_path):
    take(tmp_path, 3)
    step = near.steps()[3]
    (name,) = step.head.sizes()
    assert near.files(3) == step.head.sizes()
    (tmp_path / "step-3/data/notes.txt").write_bytes(b"x")
    assert near.files(3) == step.head.sizes()
    assert near.is_whole(step)
    data = (tmp_path / "step-3" / name).read_bytes()
    (tmp_path / "step-3" / name).unlink()
    assert not near.is_whole(step)
    (tmp_path / "step-3" / name).write_bytes(data[:-1])
    assert not near.is_whole(step)
    assert near.files(9) == {}


def test_near_folder_remove_deletes_one_save_of_a_step(near, tmp_path):
    take(tmp_path, 3)
    old = near.steps()[3]
    (tmp_path / "step-3" / PINNED).touch()
    (tmp_path / "step-3" / PULLED).touch()
    (tmp_path / f"step-3/data/.{old.save_id}-0-0.safetensors.x.aside").touch()
    other = tmp_path / "step-3/data/0123456789ab-0-0.safetensors"
    other.write_bytes(b"of a take that begins")
    near.remove(3, "ba9876543210")
    assert near.steps()[3].save_id == old.save_id
    near.remove(3, old.save_id)
    assert files_in(tmp_path / "step-3") == [PINNED, PULLED, "data/0123456789ab-0-0.safetensors"]
    near.remove(3, "0123456789ab")
    assert not (tmp_path / "step-3").exists()
    near.remove(3, old.save_id)


@pytest.mark.parametrize(("age", "is_removed"), [(FRESH + 100, True), (FRESH - 100, False)])
def test_near_folder_remove_leftovers_of_interrupted_takes_before_a_step(near, tmp_path, age, is_removed):
    take(tmp_path, 1)
    now = (tmp_path / "step-1" / METADATA).stat().st_mtime
    for step in (2, 3, 4, 5):
        data = tmp_path / f"step-{step}/data"
        data.mkdir(parents=True)
        for name in ("data/0123456789ab-0-0.safetensors", ".snapshot_claim-0123456789ab"):
            (tmp_path / f"step-{step}" / name).write_bytes(b"x")
            os.utime(tmp_path / f"step-{step}" / name, (now - age, now - age))
    (tmp_path / "step-0/data").mkdir(parents=True)
    near.remove_leftovers(4, lambda step: step == 3)
    left = {step: bool(list((tmp_path / f"step-{step}").glob("data/*"))) for step in (2, 3, 4, 5)}
    assert left == {2: not is_removed, 3: True, 4: True, 5: True}
    assert list(near.steps()) == [1]


def test_near_folder_damaged_steps_are_removed_unless_pinned_or_newer(near, tmp_path):
    take(tmp_path, 1, 2, 3, 4)
    for step in (2, 3):
        path = tmp_path / f"step-{step}" / METADATA
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    (tmp_path / "step-4" / METADATA).write_bytes(b'{"format":"snapshot/999","more":1}')
    assert list(near.steps()) == [1]
    assert sorted(near.damaged()) == [2, 3]
    (tmp_path / "step-3" / PINNED).touch()
    assert [near.is_pinned(step) for step in (2, 3)] == [False, True]
    for step in (1, 2, 3, 4):
        near.remove_damaged(step, "of a test")
    assert sorted(near.folders()) == [1, 3, 4]


def test_view_of_a_host_has_steps_with_and_without_a_manifest(near, tmp_path):
    take(tmp_path, 2, 1)
    (tmp_path / "step-3/data").mkdir(parents=True)
    (tmp_path / "step-3/data/0123456789ab-1-0.safetensors").write_bytes(b"xyz")
    (tmp_path / "step-4").mkdir()
    found = view_of(near, "key")
    assert found.key == "key"
    assert [each.step for each in found.steps] == [1, 2, 3]
    assert found.steps[2] == StepView(3, "", (*NO_ORIGIN,), {"data/0123456789ab-1-0.safetensors": 3})
    first = near.steps()[1]
    assert found.steps[0] == StepView(1, first.save_id, (*first.origin,), first.head.sizes())


def test_names_of_ranks_and_files_aside():
    assert [rank_of(each) for each in ("data/0123456789ab-12-3.safetensors", "data/0123456789ab-7.json")] == ["12", "7"]
    one, other = aside_of("data/x.bin"), aside_of("data/x.bin")
    assert one != other
    assert (one.startswith("data/.x.bin."), one.endswith(".aside")) == (True, True)


def test_copy_verified_gives_a_file_its_name_only_if_it_is_whole(tmp_path):
    take(tmp_path, 1, compression="zstd")
    path = tmp_path / "step-1"
    document = decode_document((path / METADATA).read_bytes(), path)
    names = sorted(document.own_files)
    source, target = Session(URL("file", str(path)), None), Session(URL("file", str(tmp_path / "copy")), None)
    try:
        files = run(describe_files(source, document, names))
        assert [each.location for each in files] == names
        assert all(run(is_intact(source.storage, each)) for each in files)
        sent = []
        run(copy_verified(source, target, files, sent.append))
        assert files_in(tmp_path / "copy") == names
        assert sum(sent) == sum(each.size for each in files)
        data = bytearray((tmp_path / "copy" / names[0]).read_bytes())
        for at in (0, len(data) // 2, len(data) - 1):
            wrong = bytearray(data)
            wrong[at] ^= 1
            (tmp_path / "copy" / names[0]).write_bytes(wrong)
            assert not run(is_intact(target.storage, files[0]))
        (tmp_path / "copy" / names[0]).unlink()
        with pytest.raises(StorageNotFoundError):
            run(is_intact(target.storage, files[0]))
        (path / names[0]).chmod(0o644)
        (path / names[0]).write_bytes(wrong)
        with pytest.raises(CorruptSnapshotError):
            run(copy_verified(source, target, files[:1]))
        assert not (tmp_path / "copy" / names[0]).exists()
        (tmp_path / "copy/data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy/data/.x.aside").touch()
        run(remove_asides(target.storage))
        assert files_in(tmp_path / "copy") == names[1:]
    finally:
        run(source.close())
        run(target.close())


# Uploads that do not advance


def status(far, sent=0):
    return StepStatus("s", far, sent)


@pytest.mark.parametrize(
    ("second", "third", "found"),
    [
        ({10: status(UploadState.QUEUED)}, {10: status(UploadState.UPLOADING)}, [10]),
        ({10: status(UploadState.UPLOADING, 5)}, {10: status(UploadState.UPLOADING, 5)}, []),  # it has advanced
        ({10: status(UploadState.QUEUED)}, {10: status(UploadState.WHOLE)}, []),
        ({10: status(UploadState.QUEUED)}, {20: status(UploadState.FORKED), 10: status(UploadState.QUEUED)}, [10, 20]),
        ({10: status(UploadState.KEPT)}, {10: status(UploadState.KEPT)}, []),
        ({10: status(UploadState.WHOLE), 20: status(UploadState.QUEUED)}, {20: status(UploadState.QUEUED)}, []),
        ({10: status(UploadState.QUEUED)}, {20: status(UploadState.QUEUED)}, [20]),
    ],
)
def test_upload_watch_reports_steps_that_do_not_advance(second, third, found):
    watch = UploadWatch()
    assert watch.look({10: status(UploadState.QUEUED)}, 1000.0) == []
    assert watch.look(second, 1001.0) == []
    assert watch.look(third, 1000.0 + STALLS) == found
    if found:
        assert watch.look(third, 1000.0 + 2 * STALLS - 1) == []
        assert watch.look(third, 1000.0 + 2 * STALLS) == found


def test_upload_watch_counts_the_most_bytes_that_were_sent():
    watch = UploadWatch()
    for at, sent in enumerate((50, 10, 40, 20)):  # it begins again and again
        assert watch.look({10: status(UploadState.UPLOADING, sent)}, 100.0 + at) == []
    assert watch.look({10: status(UploadState.UPLOADING, 50)}, 100.0 + STALLS) == [10]
    assert watch.look({10: status(UploadState.UPLOADING, 51)}, 100.0 + 2 * STALLS) == []
    assert watch.look({}, 100.0 + 9 * STALLS) == []
