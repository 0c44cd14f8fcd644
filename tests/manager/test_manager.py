"""The manager of one process: steps, metrics, what goes and what stays, when to save, and what it advises."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from snapshot import (
    CommitUnknown,
    CorruptSnapshotError,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLatest,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotManager,
    SnapshotNotFoundError,
    StateDict,
    StorageError,
    TakeOptions,
    events,
)
from snapshot.manager import retention
from snapshot.manager.root import Root
from snapshot.manager.schedule import Measured, daly_interval, lost_share
from snapshot.manager.takes import wait_for_pending
from snapshot.save import transaction
from snapshot.storages.file.file_storage import FileStorage
from snapshot.testing import Fault, Tap, recording, stalling, tapped
from tests.helpers.noted import noted
from tests.helpers.storage_calls import use


def state(value=0.0):
    return {"s": StateDict(x=torch.full((8,), float(value)), value=value)}


def manager_of(root, **options):
    return SnapshotManager(root, signals=(), **options)


class Switch(Tap):
    """A storage that fails as long as it is told to."""

    fault = None

    async def before(self, operation):
        return await self.fault.before(operation) if self.fault else None

    @contextlib.contextmanager
    def __call__(self, **fault):
        self.fault = Fault(**fault)
        yield
        assert self.fault.hits, "the fault never happened"
        self.fault = None


@pytest.fixture
def faulty():
    """`with faulty(on="write", error=...)`: storages opened as `faulty+...` fail meanwhile."""
    switch = Switch()
    with tapped("faulty", switch):
        yield switch


def filled(root, *steps, **options):
    """A root with snapshots of some steps; the manager is closed."""
    with manager_of(root, **options) as manager:
        for step in steps:
            manager.take(step, state(step))
    return manager


def damage(root, step, how="flip"):
    """Damage a step's data: a byte of it, its length, its presence, or its manifest."""
    folder = Path(root, f"step-{step}")
    file = next(folder.glob("data/*.safetensors"))
    if how == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "gone":
        file.unlink()
    elif how == "manifest":
        (folder / ".snapshot_metadata").write_bytes(b"")
    return folder


# Steps and metrics


@pytest.mark.parametrize("where", ["file", "memory"])
def test_manager_steps_are_folders_of_plain_numbers(where, tmp_path):
    root = str(tmp_path) if where == "file" else f"memory://{tmp_path.name}"
    with manager_of(root, keep=KeepLatest(1)) as manager:
        assert manager.steps() == []
        assert manager.latest() is None
        others = ["step-007", "step--1", "step-1.bak", "step-", "step-1e3", "xstep-4", "step-+5"]
        for name in others:
            Snapshot.take(f"{root}/{name}", state())
        for step in (9, 10, 100):
            snapshot = manager.take(step, state(step))
            assert snapshot.read_object("0/s/value") == step
    assert manager.steps() == [100]
    assert manager.latest() == 100
    assert all(Snapshot(f"{root}/{name}").exists() for name in others)
    assert manager.snapshot(100).verify()


def test_manager_metrics_are_exact_and_best_uses_them(tmp_path):
    manager = manager_of(tmp_path, keep=KeepBest("loss") | KeepEvery(1))
    losses = [0.5, math.nan, math.inf, -math.inf, -0.0, 1e-320, 0.1, 7]
    for step, loss in enumerate(losses):
        manager.take(step, state(), metrics={"loss": loss, "f1": np.float32(step), "t": torch.tensor([step])})
    manager.take(8, state(), metadata={"mine": [1]})
    for step, loss in enumerate(losses):
        found = manager.metrics(step)
        assert repr(found["loss"]) == repr(float(loss))
        assert (found["f1"], found["t"]) == (step, step)
    assert manager.metrics(8) == {}
    metadata = manager.snapshot(8).metadata.metadata
    assert metadata["snapshot.manager"].pop("writer")["attempt"]
    assert noted(metadata) == {"mine": [1], "snapshot.manager": {"step": 8, "metrics": {}}}
    assert manager.best() == 3
    assert manager.best("loss", "max") == 2
    assert manager.best("f1", "max") == 7
    assert manager.best("f1") == 0
    assert manager.best("nothing") is None
    with pytest.raises(ValueError, match="has no KeepBest"):
        manager_of(tmp_path).best()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "0.5"}, r"metrics\['loss'\] must be a number, got '0.5'"),
        ({"loss": True}, "must be a number"),
        ({"loss": None}, "must be a number"),
        ({"loss": 1j}, "must be a number"),
        ({"loss": torch.zeros(2)}, r"must be one number, got shape \(2,\)"),
        ({"loss": np.zeros((1, 0))}, "must be one number"),
        ({"loss": torch.empty((), device="meta")}, r"metrics\['loss'\]"),
        ({"loss": 10**400}, "does not fit into a float"),
        ({3: 0.5}, "non-empty str, got 3"),
        ([0.5], "must map names to numbers"),
    ],
)
def test_manager_refuses_invalid_metrics_before_writing(metrics, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        manager_of(tmp_path).take(1, state(), metrics=metrics)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 10**18])
def test_manager_refuses_invalid_steps(step, tmp_path):
    manager = manager_of(tmp_path, every=1)
    for call in (
        lambda: manager.take(step, state()),
        lambda: manager.snapshot(step),
        lambda: manager.should_take(step),
    ):
        with pytest.raises((TypeError, ValueError), match="step"):
            call()
    manager.take(np.int64(3), state())
    assert manager.steps() == [3]


def test_manager_refuses_invalid_arguments(tmp_path):
    for keep in ("3", True, 2.5):
        with pytest.raises(TypeError, match="keep must be a number or a policy"):
            manager_of(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        manager_of(tmp_path, keep=0)
    for every in (0, -1, "0m", "sometimes", timedelta(0)):
        with pytest.raises(ValueError, match="every"):
            manager_of(tmp_path, every=every)
    for every in (2.5, True, [1]):
        with pytest.raises(TypeError, match="every"):
            manager_of(tmp_path, every=every)
    with pytest.raises(ValueError, match="'10m', or 'continuous', got '10 minutes'"):
        manager_of(tmp_path, every="10 minutes")
    for options, error in (
        ({"timeout": 0}, ValueError), ({"timeout": "10"}, TypeError), ({"signals": 15}, TypeError),
        ({"signals": "TERM"}, TypeError), ({"signals": (signal.SIGKILL,)}, ValueError),
        ({"signals": [999]}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match=next(iter(options))):
            SnapshotManager(tmp_path, **options)
    for root, error in ((3, TypeError), (b"x", TypeError), (None, TypeError), ("", ValueError)):
        with pytest.raises(error, match="root must be"):
            manager_of(root)
    with pytest.raises(ValueError, match="was created without `every`"):
        manager_of(tmp_path).should_take(1)
    with pytest.raises(ValueError, match=r"must not have the key 'snapshot\.manager'"):
        manager_of(tmp_path).take(1, state(), metadata={"snapshot.manager": 1})


def test_manager_take_of_an_existing_step_needs_overwrite(tmp_path):
    manager = filled(tmp_path, 5)
    with pytest.raises(SnapshotExistsError, match="step-5"):
        manager.take(5, state(6))
    assert manager.snapshot(5).read_object("0/s/value") == 5
    manager.take(5, state(6), overwrite=True)
    assert manager.snapshot(5).read_object("0/s/value") == 6


def test_manager_take_of_a_step_that_is_being_saved_waits(tmp_path):
    with stalling(on="write", path="*data/*", nth=1, times=1) as stall:
        manager = manager_of(f"stalling+file://{tmp_path}")
        pending = manager.async_take(5, state(5))
        stall.wait_reached()
        stall.release()
        snapshot = manager.take(5, state(6))
        assert pending.done()
        assert snapshot.read_object("0/s/value") == 5
        assert manager.take(5, state(6), overwrite=True).read_object("0/s/value") == 6


def test_manager_take_repeats_a_step_whose_async_take_failed(tmp_path, faulty):
    manager = manager_of(f"faulty+file://{tmp_path}")
    with faulty(on="write", error=OSError(28, "No space left on device")):
        pending = manager.async_take(5, state(5))
        with pytest.raises(StorageError):
            pending.wait()
    assert manager.steps() == []
    assert manager.take(5, state(6)).read_object("0/s/value") == 6


def changed(manager):
    """Something else happened between two takes of one step."""
    return {
        "rolled back": lambda: manager.snapshot(5).restore(state()),
        "fell back": lambda: (damage(manager._url.location, 10, "cut"), manager.restore_latest(state())),
        "deleted": lambda: shutil.rmtree(f"{manager._url.location}/step-10"),
        "replaced": lambda: Snapshot.take(f"{manager._url.location}/step-10", state(1), overwrite=True),
        "another step": lambda: manager.take(11, state()),
        "went on": lambda: [manager.should_stop() for _ in range(3)],
    }


@pytest.mark.parametrize("how", [*changed(None), "nothing"])
def test_manager_take_of_a_step_taken_earlier_is_skipped_only_if_nothing_changed(how, tmp_path):
    manager = manager_of(tmp_path)
    manager.take(5, state(5))
    manager.async_take(10, state(10)).wait()
    changed(manager).get(how, manager.should_stop)()
    if how in ("deleted", "fell back", "nothing"):
        assert manager.take(10, state(12)).read_object("0/s/value") == (10 if how == "nothing" else 12)
    else:
        for take in (manager.take, manager.async_take):
            with pytest.raises(SnapshotExistsError):
                getattr(take(10, state(12)), "wait", list)()


@pytest.mark.parametrize("error", [MemoryError("none left"), CommitUnknown("look again")])
def test_manager_take_after_a_failed_async_take_of_any_kind(error, tmp_path, monkeypatch):
    manager = manager_of(tmp_path)
    pending = manager.async_take(7, state(7))
    pending.wait()

    def failed(timeout=None):
        raise error

    monkeypatch.setattr(pending, "wait", failed)
    if isinstance(error, CommitUnknown):  # it stands
        assert manager.take(7, state(8)).read_object("0/s/value") == 7
    shutil.rmtree(tmp_path / "step-7")
    assert manager.take(7, state(8)).read_object("0/s/value") == 8


# What goes


STRANGE = {
    "notes": b"my own notes",
    "empty": b"",
    "other": b'{"format":"other/1","save_id":"0123456789ab"}',
    "newer": b'{"format":"snapshot/7","version":"9","save_id":"0123456789ab"}',
    "torchsnapshot": b"version: 0.1.0\nworld_size: 1\nmanifest: {}\n",
}


@pytest.fixture
def strange(tmp_path):
    """A folder for each kind of file that is called as a manifest, and is none of ours; two before, some after."""
    filled(tmp_path, 1, 2)
    for step, content in zip(range(3, 8), STRANGE.values(), strict=True):
        (tmp_path / f"step-{step}" / "data").mkdir(parents=True)
        (tmp_path / f"step-{step}" / ".snapshot_metadata").write_bytes(content)
        if content:
            (tmp_path / f"step-{step}" / "data" / "0123456789ab-0-0.bin").write_bytes(b"mine")
    return tmp_path


def test_manager_prune_ignores_folders_with_a_foreign_manifest(strange):
    before = sorted(path for step in range(3, 8) for path in (strange / f"step-{step}").rglob("*"))
    filled(strange, 8, keep=KeepLatest(2))
    assert manager_of(strange).steps() == [2, 3, 4, 5, 6, 7, 8]
    assert sorted(path for step in range(3, 8) for path in (strange / f"step-{step}").rglob("*")) == before


def test_manager_restore_latest_skips_and_take_never_replaces_a_foreign_manifest(strange):
    for step in (5, 6, 7):
        shutil.rmtree(strange / f"step-{step}")
    manager = manager_of(strange)
    assert manager.restore_latest(state()) == 2
    for step in (3, 4):
        with pytest.raises(SnapshotExistsError):
            manager.take(step, state())
    assert (strange / "step-3" / ".snapshot_metadata").read_bytes() == STRANGE["notes"]


def test_manager_prune_does_not_count_or_remove_damaged_steps(tmp_path, caplog):
    filled(tmp_path, 10, 20, 30, 40)
    damage(tmp_path, 30, "gone")
    damage(tmp_path, 40, "cut")
    with manager_of(tmp_path, keep=KeepLatest(2)) as manager:
        manager.take(50, state(50))
        manager._steps.cleaner.close()
        assert manager.steps() == [20, 30, 40, 50]
        manager.take(60, state(60))
        manager._steps.cleaner.close()
        assert manager.steps() == [50, 60]  # they would go if they were whole, too
    assert caplog.text.count("step-30: kept, and ignored by policies: damaged: ") == 1


def test_manager_keep_best_with_an_unknown_metric_removes_nothing_and_logs_once(tmp_path, caplog):
    with manager_of(tmp_path, keep=KeepLatest(1) | KeepBest("val")) as manager:
        for step in range(4):
            manager.take(step, state(), metrics={"val/loss": step})
            manager._steps.cleaner.close()
        assert manager.steps() == [0, 1, 2, 3]
        assert caplog.text.count("no snapshot has the metric 'val'; known metrics: val/loss; nothing was removed") == 1
        manager.take(4, state(), metrics={"val": 1})
    assert manager.steps() == [4]


def between(monkeypatch, name, work):
    """Do something just before a removal, which was decided on by then."""
    remove = getattr(transaction, name)

    async def later(*arguments):
        await work()
        return await remove(*arguments)

    monkeypatch.setattr(transaction, name, later)


def test_manager_prune_keeps_a_step_replaced_since_the_decision(tmp_path, monkeypatch):
    filled(tmp_path, 1)

    async def replaced():
        thread = threading.Thread(target=lambda: Snapshot.take(tmp_path / "step-1", state(2), overwrite=True))
        thread.start()
        await asyncio.to_thread(thread.join)

    between(monkeypatch, "delete_if_unchanged", replaced)
    filled(tmp_path, 2, keep=KeepLatest(1))
    assert manager_of(tmp_path).steps() == [1, 2]
    assert Snapshot(tmp_path / "step-1").read_object("0/s/value") == 2
    assert Snapshot(tmp_path / "step-1").verify()


def test_manager_prune_keeps_a_step_pinned_since_the_decision(tmp_path, monkeypatch):
    manager = filled(tmp_path, 1)
    between(monkeypatch, "delete_if_unchanged", lambda: manager._steps.root.pin(1))
    filled(tmp_path, 2, keep=KeepLatest(1))
    assert manager.pinned() == [1]
    assert manager.snapshot(1).verify()


def test_manager_pin_of_a_step_removed_meanwhile_raises_and_leaves_no_pin(tmp_path, monkeypatch):
    manager = filled(tmp_path, 1)
    put = FileStorage.put

    async def removed(self, path, *arguments, **options):
        (tmp_path / "step-1" / ".snapshot_metadata").unlink()
        return await put(self, path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(FileStorage, "put", removed)
        with pytest.raises(SnapshotNotFoundError, match="removed while it was being pinned"):
            manager.pin(1)
    assert not (tmp_path / "step-1" / ".pinned").exists()
    (tmp_path / "step-1" / ".pinned").touch()  # as one that came too late
    manager.take(1, state())
    assert manager.pinned() == []


def test_manager_keep_removes_other_steps_after_the_next_commit(tmp_path, told):
    with manager_of(tmp_path, keep=KeepLatest(2) | KeepBest("loss") | KeepEvery(40)) as manager:
        for step in range(10, 101, 10):
            take = manager.take if step % 20 else manager.async_take
            take(step, state(step), metrics={"loss": abs(step - 50)})
    assert manager.steps() == [40, 50, 80, 90, 100]
    assert sorted(step for event in told if event.name == "pruned" for step in event.fields["steps"]) == [
        10,
        20,
        30,
        60,
        70,
    ]
    order = [(event.name, event.path) for event in told if event.name in ("committed", "pruned")]
    assert order[0] == ("committed", str(tmp_path / "step-10"))
    assert all(manager.snapshot(step).verify() for step in manager.steps())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{step}" for step in manager.steps())


def test_manager_keep_for_uses_the_time_of_the_take(tmp_path):
    filled(tmp_path, 1, 2)
    time.sleep(0.3)
    filled(tmp_path, 3, keep=KeepFor(0.3))
    assert manager_of(tmp_path).steps() == [3]


def test_manager_without_keep_removes_nothing_and_never_removes_before_a_commit(tmp_path, faulty):
    filled(tmp_path, 1, 2, 3)
    with manager_of(f"faulty+file://{tmp_path}", keep=KeepLatest(1)) as manager:
        with faulty(on="commit", error=OSError(5, "Input/output error")), pytest.raises(StorageError):
            manager.take(4, state())
        with faulty(on="write", error=OSError(28, "No space left on device")):
            pending = manager.async_take(4, state())
            with pytest.raises(StorageError):
                pending.wait()
    assert manager.steps() == [1, 2, 3]


def test_manager_prune_removes_nothing_after_a_take_that_is_not_durable(tmp_path):
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        manager.take(1, state())
        manager.take(2, state(), options=TakeOptions(durable=False))
        manager.async_take(3, state(), options=TakeOptions(durable=False))
    assert manager.steps() == [1, 2, 3]
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        manager.take(4, state())
    assert manager.steps() == [4]


def test_manager_prune_ignores_later_steps(tmp_path):
    filled(tmp_path, 10, 20, 30)
    filled(tmp_path, 15, keep=KeepLatest(1))
    assert manager_of(tmp_path).steps() == [15, 20, 30]


def test_manager_pin_keeps_a_step_for_other_processes_until_unpin(tmp_path):
    manager = filled(tmp_path, 1, 2)
    manager.pin(1)
    assert manager.pinned() == [1]
    with pytest.raises(SnapshotNotFoundError, match="no snapshot to pin"):
        manager.pin(9)
    filled(tmp_path, 3, keep=KeepLatest(1))
    assert manager.steps() == [1, 3]
    manager.take(1, state(11), overwrite=True)
    assert manager.pinned() == [1]
    manager.unpin(1)
    manager.unpin(3)
    filled(tmp_path, 4, keep=KeepLatest(1))
    assert manager.steps() == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_manager_prune_never_removes_checkpoints_of_other_libraries(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(b"somebody's")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / ".snapshot_metadata").write_text("version: 0.1.0\nworld_size: 1\nmanifest: {}\n")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "notes.txt").write_text("mine")
    (tmp_path / "step-4").write_text("a file")
    elsewhere = tmp_path / "elsewhere"
    Snapshot.take(elsewhere, state())
    (tmp_path / "step-5").symlink_to(elsewhere)
    before = sorted(path for path in tmp_path.rglob("*"))
    with manager_of(tmp_path, keep=KeepLatest(1) | KeepBest("loss")) as manager:
        manager.take(6, state(), metrics={"loss": 1})
        manager.take(7, state(), metrics={"loss": 1})
    left = sorted(path for path in tmp_path.rglob("*") if "step-7" not in str(path))
    assert left == before
    assert Snapshot(elsewhere).verify()


def test_manager_prune_logs_a_failed_removal_and_repeats_it(tmp_path, told, caplog, faulty):
    filled(tmp_path, 1, 2)
    with manager_of(f"faulty+file://{tmp_path}", keep=KeepLatest(1)) as manager:
        with faulty(on="delete", path="*snapshot_metadata", times=None, error=OSError(13, "Permission denied")):
            manager.take(3, state())
            manager._steps.cleaner.close()
        assert manager.steps() == [1, 2, 3]
        assert caplog.text.count("removal failed, and is retried later") == 2
        assert [event.verb for event in told if event.name == "failed"] == ["prune"] * 2
        with faulty(on="list", times=None, error=OSError(5, "Input/output error")):
            manager.take(4, state())
            manager._steps.cleaner.close()
        assert "failed to remove old snapshots" in caplog.text
        manager.take(5, state())
    assert manager.steps() == [5]


@pytest.mark.parametrize("nth", [1, 2])
def test_manager_prune_finishes_an_interrupted_removal(tmp_path, nth, faulty):
    filled(tmp_path, 1)
    with manager_of(f"faulty+file://{tmp_path}", keep=KeepLatest(1)) as manager:
        with faulty(on="delete", nth=nth, times=None, error=OSError(5, "Input/output error")):
            manager.take(2, state())
            manager._steps.cleaner.close()
        if 1 in manager.steps():
            assert manager.snapshot(1).verify()
        manager.take(3, state())
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_manager_prune_removes_leftover_data_but_not_that_of_a_possible_take(tmp_path):
    filled(tmp_path, 1, 2, 3, 4)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}" / ".snapshot_metadata").unlink()
    for step in (2, 3):
        save_id = next((tmp_path / f"step-{step}" / "data").iterdir()).name[:12]
        (tmp_path / f"step-{step}" / f".take-{save_id}").touch()
    old = time.time() - transaction.DAY - 60
    os.utime(next((tmp_path / "step-3").glob(".take-*")), (old, old))
    filled(tmp_path, 5, keep=KeepLatest(5))
    assert not (tmp_path / "step-1").exists()  # nobody claims it: it was being removed
    assert len(list((tmp_path / "step-2" / "data").iterdir())) == 1  # it is younger than a day
    assert not (tmp_path / "step-3").exists()
    assert manager_of(tmp_path).steps() == [4, 5]


def test_manager_prune_keeps_a_step_at_which_a_take_may_run(tmp_path):
    filled(tmp_path, 1, 2)
    (tmp_path / "step-1" / ".take-0123456789ab").touch()
    filled(tmp_path, 3, keep=KeepLatest(1))
    assert manager_of(tmp_path).steps() == [1, 3]


def test_manager_prune_keeps_a_step_with_a_damaged_manifest(tmp_path):
    filled(tmp_path, 1, 2)
    manifest = tmp_path / "step-1" / ".snapshot_metadata"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    filled(tmp_path, 3, keep=KeepEvery(5))
    assert manager_of(tmp_path).steps() == [1, 3]


def test_manager_reads_each_manifest_once(tmp_path):
    with recording() as log, manager_of(f"recording+file://{tmp_path}", keep=KeepLatest(3)) as manager:
        for step in range(4):
            manager.take(step, state())
    reads = [each for each in log.operations if each.name == "get" and each.path == ".snapshot_metadata"]
    assert len(reads) <= 6  # each once; and that of the one that goes, to see whether it is still ours
    with recording() as log, manager_of(f"recording+file://{tmp_path}", keep=KeepBest("loss", 9)) as manager:
        for step in range(10, 14):
            manager.take(step, state(), metrics={"loss": step})
            manager._steps.cleaner.close()
    reads = [each for each in log.operations if each.name == "get" and each.path == ".snapshot_metadata"]
    assert len(reads) <= 12


def test_manager_prune_removes_a_step_committed_after_a_later_one(tmp_path):
    with (
        stalling(on="write", path="*data/*", nth=1, times=1) as stall,
        manager_of(f"stalling+file://{tmp_path}", keep=KeepLatest(1)) as manager,
    ):
        late = manager.async_take(2, state(2))
        stall.wait_reached()
        manager.async_take(3, state(3)).wait()
        stall.release()
        late.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_manager_prune_after_a_rollback_treats_an_earlier_step_as_the_newest(tmp_path):
    """A later step that was committed before this take began does not make the new step an old one."""
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        manager.take(30, state(30))
        manager.take(25, state(25))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-25", "step-30"]


def partly_frozen():
    layers = {"frozen": torch.nn.Linear(9, 9).requires_grad_(False), "trained": torch.nn.Linear(2, 2)}
    return {"m": torch.nn.ModuleDict(layers)}


@pytest.fixture
def late(monkeypatch):
    """Return a function that lets a step of the removals wait, and its events: it waits, and it may go on."""

    def hold(what):
        waiting, go_on = threading.Event(), threading.Event()
        real = getattr(retention, what)

        def wait(*arguments, **options):
            waiting.set()
            go_on.wait(30)
            return real(*arguments, **options)

        monkeypatch.setattr(f"snapshot.manager.retention.{what}", wait)
        return waiting, go_on

    return hold


@pytest.mark.parametrize("later", [[30], [15, 30]])
@pytest.mark.parametrize("held", ["survey_steps", "remove_steps"])
@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_manager_prune_that_is_late_keeps_the_step_of_a_rollback_and_its_base(tmp_path, late, later, held, verb):
    app = partly_frozen()
    waiting, go_on = late(held)
    Snapshot.take(tmp_path / "step-10", app)
    Snapshot.take(tmp_path / "step-20", app)
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        for step in later:
            manager.take(step, app)
        assert waiting.wait(30)
        options = TakeOptions(base=str(tmp_path / "step-20"), only="trainable")
        getattr(manager, verb)(25, app, options=options)
        if verb == "async_take":
            wait_for_pending(manager._pendings.of(25))
        go_on.set()
    assert {"step-20", "step-25", "step-30"} >= set(os.listdir(tmp_path)) >= {"step-20", "step-25"}
    again = partly_frozen()
    Snapshot(tmp_path / "step-25").restore(again, options=RestoreOptions(base=str(tmp_path / "step-20")))
    assert again["m"]["frozen"].weight.equal(app["m"]["frozen"].weight)


def test_manager_prune_that_is_late_keeps_the_base_of_a_later_step(tmp_path, late):
    app = partly_frozen()
    waiting, go_on = late("remove_steps")
    Snapshot.take(tmp_path / "step-20", app)
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        manager.take(30, app)
        assert waiting.wait(30)
        manager.take(40, app, options=TakeOptions(base=str(tmp_path / "step-20"), only="trainable"))
        go_on.set()
    assert sorted(os.listdir(tmp_path)) == ["step-20", "step-40"]


def test_manager_prune_keeps_a_rollback_step_committed_before_the_later_one(tmp_path):
    with (
        stalling(on="write", path="*data/*", nth=1, times=1) as stall,
        manager_of(f"stalling+file://{tmp_path}", keep=KeepLatest(1)) as manager,
    ):
        later = manager.async_take(30, state(30))
        stall.wait_reached()
        manager.async_take(25, state(25)).wait()
        stall.release()
        later.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-25", "step-30"]


def test_manager_prune_keeps_a_rollback_step_if_another_commits_late(tmp_path, late):
    waiting, go_on = late("survey_steps")
    with (
        stalling(on="write", path="*data/*", nth=1, times=1) as stall,
        manager_of(f"stalling+file://{tmp_path}", keep=KeepLatest(1)) as manager,
    ):
        slow = manager.async_take(22, state(22))
        stall.wait_reached()
        manager.take(30, state(30))
        assert waiting.wait(30)
        manager.take(25, state(25))
        stall.release()
        slow.wait()
        go_on.set()
    assert sorted(os.listdir(tmp_path)) == ["step-25", "step-30"]


def test_manager_that_is_not_closed_finishes_at_interpreter_exit(tmp_path, warm):
    script = f"""
import torch
from snapshot import KeepLatest, SnapshotManager, StateDict
manager = SnapshotManager({str(tmp_path)!r}, keep=KeepLatest(1))
for step in range(4):
    manager.async_take(step, {{"s": StateDict(x=torch.zeros(100_000))}})
"""
    assert warm.run(script) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


# Restore


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "manifest"])
def test_restore_latest_falls_back_from_a_damaged_step_and_logs_it(how, tmp_path, told, caplog):
    manager = filled(tmp_path, 10, 20, 30)
    damage(tmp_path, 30, how)
    app = state(-1)
    assert manager.restore_latest(app) == 20
    assert app["s"]["value"] == 20
    assert app["s"]["x"].eq(20).all()
    [event] = [event for event in told if event.name == "fell_back"]
    assert (event.fields["step"], list(event.fields["passed"])) == (20, [30])
    assert "step-30: passed over, and step-20 was restored instead" in caplog.text
    assert "may hold wrong data" not in caplog.text  # step 20 was restored over it
    # training comes by step 30 again: what is damaged is replaced, without being asked for it
    manager.take(30, state(31))
    assert manager.snapshot(30).read_object("0/s/value") == 31
    assert manager.restore_latest(app) == 30
    with pytest.raises(SnapshotExistsError):
        manager.take(30, state(32))


def test_manager_prune_does_not_count_steps_found_damaged_by_restore_latest(tmp_path):
    filled(tmp_path, 10, 20, 30)
    damage(tmp_path, 20)
    damage(tmp_path, 30)
    with manager_of(tmp_path, keep=KeepLatest(2)) as manager:
        assert manager.restore_latest(state()) == 10
        manager.take(40, state(40))
    assert manager.steps() == [10, 40]


def test_restore_latest_returns_none_without_steps_and_logs_unfinished_ones(tmp_path, caplog):
    assert manager_of(tmp_path / "none").restore_latest(state()) is None
    assert caplog.text == ""
    (tmp_path / "step-5").mkdir()
    assert manager_of(tmp_path).restore_latest(state()) is None
    assert "there is no finished snapshot in step-5" in caplog.text


def test_restore_latest_with_all_steps_damaged_names_each(tmp_path):
    manager = filled(tmp_path, 10, 20, 30)
    damage(tmp_path, 10, "flip")
    damage(tmp_path, 20, "gone")
    damage(tmp_path, 30, "manifest")
    with pytest.raises(CorruptSnapshotError) as caught:
        manager.restore_latest(state())
    assert [line.partition(":")[0] for line in caught.value.faults] == ["step-30", "step-20", "step-10"]
    assert "is missing" in caught.value.faults[1]
    assert "xxh3:" in caught.value.faults[2]
    assert caught.value.touched == ("s/x",)
    assert "tensors that were written: s/x" in str(caught.value)
    app = state(7)
    with pytest.raises(CorruptSnapshotError) as caught:
        manager.restore_latest(app, options=RestoreOptions(atomic=True))
    assert caught.value.touched == ()
    assert app["s"]["x"].eq(7).all()


def test_restore_latest_does_not_fall_back_for_mismatches_or_storage_errors(tmp_path, faulty):
    manager = filled(f"faulty+file://{tmp_path}", 10, 20)
    app = {"s": StateDict(x=torch.zeros(8), value=0), "more": StateDict(y=1)}
    with pytest.raises(RestoreError, match="more"):
        manager.restore_latest(app)
    with faulty(on="read_into", times=None, error=OSError(5, "Input/output error")), pytest.raises(StorageError):
        manager.restore_latest(state())
    with faulty(on="list", times=None, error=PermissionError(13, "Permission denied")), pytest.raises(StorageError):
        manager.restore_latest(state())


def test_restore_latest_skips_a_step_that_vanishes(tmp_path, monkeypatch):
    manager = filled(tmp_path, 10, 20)
    restore = Snapshot.restore_with

    def removed(self, *arguments, **options):
        if self.path.endswith("20"):
            shutil.rmtree(self.path)
        return restore(self, *arguments, **options)

    monkeypatch.setattr(Snapshot, "restore_with", removed)
    assert manager.restore_latest(state()) == 10


def test_restore_latest_takes_a_newer_step_if_another_process_prunes(tmp_path, monkeypatch):
    manager = filled(tmp_path, 10)
    fault = Root.fault

    async def pruned(self, step, seal, **options):
        if step == 10:
            await asyncio.to_thread(filled, tmp_path, 20, keep=KeepLatest(1))
        return await fault(self, step, seal, **options)

    monkeypatch.setattr(Root, "fault", pruned)
    assert manager.restore_latest(state()) == 20
    assert manager._steps.damaged == set()


def test_restore_latest_skips_a_step_that_cannot_be_read(tmp_path, caplog):
    manager = filled(tmp_path, 10, 20, 30)
    (tmp_path / "step-15" / ".snapshot_metadata").mkdir(parents=True)
    assert manager.steps() == [10, 20, 30]
    assert manager.restore_latest(state()) == 30
    assert "step-15: passed over: cannot be read" in caplog.text
    filled(tmp_path, 40, keep=KeepLatest(2))
    assert manager.steps() == [30, 40]
    (tmp_path / "step-50" / ".snapshot_metadata").mkdir(parents=True)
    assert manager.latest() == 40
    with pytest.raises(StorageError, match="step-50"):
        manager.restore_latest(state())


def test_manager_latest_with_verify_skips_damaged_steps(tmp_path, caplog):
    manager = filled(tmp_path, 10, 20, 30, 40)
    damage(tmp_path, 40, "manifest")
    damage(tmp_path, 30)
    assert manager.latest() == 40
    assert manager.latest(verify=True) == 20
    assert caplog.text.count("verification failed") == 2


def test_manager_on_a_storage_without_listing_raises_but_opens_a_named_step(tmp_path):
    import functools
    import http.server
    import threading

    filled(tmp_path, 10)
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        manager = manager_of(f"http://127.0.0.1:{server.server_port}")
        for call in (manager.steps, manager.latest, manager.pinned):
            with pytest.raises(SnapshotError, match="this storage cannot list files"):
                call()
        with pytest.raises(SnapshotError, match="this storage cannot list files"):
            manager.restore_latest(state())
        assert manager.metrics(10) == {}
        assert manager.snapshot(10).exists()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_manager_on_an_object_store(moto):
    options = {
        "key": moto.key,
        "secret": moto.secret,
        "endpoint_url": moto.url,
        "client_kwargs": {"region_name": moto.region},
    }
    with manager_of(
        f"s3://{moto.bucket()}/run", keep=KeepLatest(2) | KeepBest("loss"), storage_options=options
    ) as manager:
        for step in range(1, 6):
            manager.take(step, state(step), metrics={"loss": step})
        manager.pin(4)
    assert manager.steps() == [1, 4, 5]
    assert manager.pinned() == [4]
    app = state()
    assert manager.restore_latest(app) == 5
    assert app["s"]["value"] == 5


# When


def test_should_take_every_n_steps(tmp_path):
    manager = manager_of(tmp_path, every=10)
    assert [step for step in range(35) if manager.should_take(step) and manager.take(step, state())] == [10, 20, 30]
    manager = manager_of(tmp_path, every=10)
    assert manager.restore_latest(state()) == 30
    assert [step for step in range(30, 60, 7) if manager.should_take(step) and manager.take(step, state())] == [44, 51]
    manager.snapshot(10).restore(state())
    assert [step for step in range(11, 25) if manager.should_take(step)] == [20, 21, 22, 23, 24]
    manager = manager_of(tmp_path, every=10)
    manager.restore_latest(state())
    manager.async_take(58, state()).wait()
    assert not manager.should_take(59)
    assert manager.should_take(60)


def test_should_take_is_true_again_after_a_failed_take(tmp_path, faulty):
    manager = manager_of(f"faulty+file://{tmp_path}", every=10)
    assert manager.should_take(10)
    with faulty(on="write", error=OSError(28, "No space left on device")), pytest.raises(StorageError):
        manager.take(10, state())
    assert manager.should_take(11)


def test_should_take_every_timedelta_and_continuously(tmp_path):
    manager = manager_of(tmp_path, every=timedelta(milliseconds=50))
    step = 0
    assert not manager.should_take(step)
    while not manager.should_take(step):
        step += 1
        time.sleep(0.005)
    manager.take(step, state())
    assert not manager.should_take(step + 1)
    with stalling(on="write", path="*data/*", nth=1, times=1) as stall:
        manager = manager_of(f"stalling+file://{tmp_path / 'c'}", every="continuous")
        assert manager.should_take(1)
        pending = manager.async_take(1, state())
        assert not manager.should_take(2)
        stall.release()
        pending.wait()
        assert manager.should_take(3)


# Advice


def test_daly_interval_loses_least():
    for cost, mtbf in ((60.0, 86400.0), (1.0, 3600.0), (300.0, 7200.0), (0.01, 1e6)):
        best = daly_interval(cost, mtbf)
        losses = {factor: lost_share(best * factor, cost, mtbf, 0.0) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)}
        assert min(losses, key=losses.get) == 1.0
    assert daly_interval(100.0, 10.0) == 10.0


def test_advice_uses_measurements_and_prints_them(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    measured = Measured()
    with pytest.raises(SnapshotError, match="no take of this manager is durable yet"):
        measured.advice("1h")
    for step in range(301):
        measured.at_step(step)
        measured.at_call()
        if step and step % 100 == 0:
            began = now[0]
            now[0] += 50.0 if step == 100 else 2.0  # the first is no measure
            measured.took(began, now[0] - began)
            now[0] += 3.0
            measured.durable(began)
            now[0] -= 3.0
        now[0] += 0.5
    advice = measured.advice(timedelta(hours=10))
    assert advice.blocked == 2.0
    assert advice.durable == 5.0
    assert advice.step == pytest.approx(0.5)
    assert advice.young == pytest.approx(math.sqrt(2 * 2 * 36000))
    assert advice.interval == pytest.approx(daly_interval(2.0, 36000.0))
    assert advice.steps == round(advice.interval / 0.5)
    assert advice.interval_now == pytest.approx(50, abs=30)
    assert advice.lost_now > advice.lost
    lines = str(advice).splitlines()
    assert lines[0].startswith(f"take every {advice.steps} steps (6")
    assert lines[1] == "  a take blocks for 2.00 s and is durable after 5.00 s (mean of 2)"
    assert lines[2] == "  a step takes 500.0 ms"
    with pytest.raises(ValueError, match="mtbf"):
        measured.advice(0)


def test_manager_measures_for_advice(tmp_path):
    manager = manager_of(tmp_path, every=2)
    with pytest.raises(SnapshotError, match="no take of this manager"):
        manager.advice("12h")
    for step in range(7):
        assert not manager.should_stop()
        if manager.should_take(step):
            manager.async_take(step, state()).wait()
    manager.restore_latest(state())
    advice = manager.advice("12h")
    assert advice.takes == 2
    assert 0 < advice.blocked <= advice.durable
    assert advice.restore > 0
    assert advice.step > 0


def test_manager_repr_and_log_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert repr(manager_of(tmp_path)) == f"<SnapshotManager {tmp_path}: keep all>"
        assert (
            repr(manager_of("s3://k:secret@b/run", keep=KeepLatest(2)))
            == "<SnapshotManager s3://k:***@b/run: keep latest 2>"
        )
        filled(tmp_path, 1, 2, keep=KeepLatest(1))
    assert f"prune {tmp_path}: removed step-1" in caplog.text


@pytest.mark.parametrize("wrong", [{"durable": False}, RestoreOptions()])
def test_manager_take_options_of_another_type_raise(tmp_path, wrong):
    with SnapshotManager(tmp_path, signals=()) as manager:
        for take in (manager.take, manager.async_take):
            with pytest.raises(TypeError, match=r"options must be TakeOptions\(...\), got"):
                take(1, state(), options=wrong)
        with pytest.raises(TypeError, match=r"options must be RestoreOptions\(...\), got"):
            manager.restore_latest(state(), options=TakeOptions() if isinstance(wrong, RestoreOptions) else wrong)
        with pytest.raises(TypeError, match=r"no argument 'durable': pass options=TakeOptions\(durable=...\)"):
            manager.take(1, state(), durable=False)
        with pytest.raises(TypeError, match=r"no argument 'select': pass options=RestoreOptions\(select=...\)"):
            manager.restore_latest(state(), select=["**"])
        assert manager.steps() == []


def test_manager_takes_accept_the_arguments_of_snapshot_take(tmp_path):
    seen = []
    live = {"model": torch.nn.Linear(300, 300), "step": StateDict(step=0)}
    every = TakeOptions(exclude=["step/**"], progress=True)
    with SnapshotManager(tmp_path / "run", take_options=every, signals=()) as manager:
        first = manager.take(1, live, progress=seen.append, replicated=["**"], timeout=20)
        assert seen
        manager.take(2, live, base=first)
        assert manager.async_take(3, live, base=manager.snapshot(2), progress=False).wait().exists()
        for step in (1, 2, 3):  # what a call says goes before the options of the manager, and the others stay
            assert "0/step/step" not in manager.snapshot(step).get_manifest()
        for take in (manager.take, manager.async_take):
            with pytest.raises(TypeError, match="globs must be a list"):
                take(4, live, replicated="**")
            with pytest.raises(ValueError, match="timeout"):
                take(4, live, timeout=-1)
            with pytest.raises(TypeError, match="base must be a path"):
                take(4, live, base=3)
        assert manager.steps() == [1, 2, 3]
    files = [list((tmp_path / "run" / f"step-{step}" / "data").iterdir()) for step in (1, 2, 3)]
    largest = [max((each.stat() for each in found), key=lambda stat: stat.st_size) for found in files]
    assert len({each.st_ino for each in largest}) == 1  # shared by all three


def test_restore_latest_searches_from_the_newest_step_down(tmp_path):
    with manager_of(tmp_path) as manager:
        for step in (0, 100):
            manager.take(step, state(step))
    for step in range(1, 100):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}")
    live = state()
    with recording() as log:
        assert manager_of(f"recording+file://{tmp_path}").restore_latest(live) == 100
    assert len(log.of("stat", "step-*/.snapshot_metadata")) == 4
    assert live["s"]["value"] == 100
    for number in range(1, 101):  # none of these was finished
        (tmp_path / f"step-{number}" / ".snapshot_metadata").unlink()
    assert manager_of(tmp_path).restore_latest(live) == 0
    assert live["s"]["value"] == 0


def test_restore_latest_skips_a_damaged_step_that_would_not_fit():
    root = f"memory://{os.urandom(4).hex()}"
    with manager_of(root) as manager:
        manager.take(1, {"m": StateDict(x=torch.ones(1 << 18), y=torch.ones(3))})
        manager.take(2, {"m": StateDict(x=torch.ones(1 << 18))})
    live = torch.nn.Module()
    live.x, live.y = (torch.nn.Parameter(torch.zeros(size)) for size in (1 << 18, 3))
    with pytest.raises(RestoreError):
        manager_of(root).restore_latest({"m": live})

    async def lose(storage):
        await storage.delete([path for path in await storage.list("data/") if path.endswith(".safetensors")])

    use(f"{root}/step-2", None, lose)
    assert manager_of(root).restore_latest({"m": live}) == 1
    assert live.x.eq(1).all()


def test_manager_reports_a_run_without_commits_as_overdue(tmp_path, caplog):
    seen = []

    def handler(event):
        if event.name == "overdue":
            seen.append(event.fields["step"])

    events.add_handler(handler)
    try:
        with SnapshotManager(str(tmp_path), every=10, signals=()) as manager:
            for step in range(1, 100):
                due = manager.should_take(step)
                if due and step <= 30:
                    manager.take(step, state())
    finally:
        events.remove_handler(handler)
    assert seen == [51, 72, 93]
    assert "the last committed step is 30, and the run is at step 51" in caplog.text
