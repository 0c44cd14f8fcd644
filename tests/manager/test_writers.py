"""Plain managers that write to one root at once: none adopts or prunes the steps of another in silence."""

import shutil
import socket

import pytest

from snapshot import KeepLatest, Snapshot, SnapshotError, SnapshotManager, StateDict
from snapshot.manager.root import Root
from snapshot.manager.step_metadata import writer_of


def state(value=0):
    return {"s": StateDict(value=value)}


def manager_of(root, keep=2, **options):
    return SnapshotManager(root, keep=None if keep is None else KeepLatest(keep), signals=(), **options)


def take(manager, *steps):
    """Take steps, each with its removals."""
    for step in steps:
        manager.take(step, state(step))
        manager._steps.cleaner.close()


def steps_in(root):
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_other_writer_error_stops_two_managers_from_pruning_each_other(tmp_path, caplog):
    one, other = manager_of(tmp_path), manager_of(tmp_path)
    take(one, 10)
    take(other, 20)
    take(one, 30)  # its removals find step 20
    assert steps_in(tmp_path) == [10, 20, 30]
    name = writer_of(Snapshot(tmp_path / "step-20").metadata.metadata).attempt
    with pytest.raises(SnapshotError, match=f"another job writes to the same root: attempt {name} on") as caught:
        one.take(40, state(40))
    assert socket.gethostname() in str(caught.value)
    assert steps_in(tmp_path) == [10, 20, 30]
    assert "another job writes" in caplog.text
    one.close(), other.close()


def test_manager_owns_steps_taken_before_it_began(tmp_path):
    with manager_of(tmp_path) as one:
        take(one, 10, 20)
    with manager_of(tmp_path) as other:
        take(other, 30, 40)
    assert steps_in(tmp_path) == [30, 40]


@pytest.mark.parametrize("how", ["restore_latest", "snapshot"])
def test_manager_restore_takes_over_a_run(tmp_path, how):
    with manager_of(tmp_path) as one, manager_of(tmp_path) as other:
        take(one, 10)
        if how == "snapshot":
            other.snapshot(10).restore(state())
        else:
            assert other.restore_latest(state()) == 10
        take(other, 20, 30)
        assert steps_in(tmp_path) == [20, 30]
        before = writer_of(Snapshot(tmp_path / "step-30").metadata.metadata)
        take(one, 40)
        with pytest.raises(SnapshotError, match=f"has taken this run over: attempt {before.attempt}"):
            one.take(50, state(50))
        assert one.restore_latest(state()) == 40  # it has the run again
        take(one, 60)
        assert writer_of(Snapshot(tmp_path / "step-60").metadata.metadata).ancestors[-1] != before.attempt


def test_manager_restore_of_one_step_takes_over_a_run_of_its_own_job(tmp_path):
    with manager_of(tmp_path) as one:
        take(one, 10)
        with manager_of(tmp_path) as other:
            assert other.restore_latest(state()) == 10
            take(other, 20)
        one.snapshot(20).restore(state())
        take(one, 30, 40)
    assert steps_in(tmp_path) == [30, 40]


def test_other_writer_error_stops_a_new_job_if_the_replaced_one_still_writes(tmp_path):
    with manager_of(tmp_path) as zombie, manager_of(tmp_path) as new:
        take(zombie, 10)
        assert new.restore_latest(state()) == 10
        zombie.take(20, state(20))
        take(new, 30)
        assert steps_in(tmp_path) == [10, 20, 30]
        with pytest.raises(SnapshotError, match="another job writes to the same root"):
            new.take(40, state(40))
        assert new.restore_latest(state()) == 30
        take(new, 40)
        assert steps_in(tmp_path) == [30, 40]


def test_manager_restores_its_own_steps_without_other_writer_error(tmp_path):
    with manager_of(tmp_path) as manager:
        take(manager, 10, 20)
        assert manager.restore_latest(state()) == 20
        take(manager, 30)
        assert manager.restore_latest(state()) == 30
        take(manager, 40)
    assert steps_in(tmp_path) == [30, 40]


def test_manager_without_keep_lists_nothing(tmp_path, monkeypatch):
    with manager_of(tmp_path, keep=None) as one, manager_of(tmp_path, keep=None) as other:
        monkeypatch.setattr(Root, "folders", None)
        one.take(10, state(10))
        other.take(20, state(20))
        one.take(30, state(30))


def test_manager_restore_writes_nothing_and_a_copied_root_has_no_live_writer(tmp_path):
    root, copy = tmp_path / "run", tmp_path / "copy"
    with manager_of(root) as one:
        take(one, 10)
        before = sorted(path.relative_to(root) for path in root.rglob("*"))
        with manager_of(root) as reader:
            assert reader.restore_latest(state()) == 10
            assert reader.snapshot(10).verify()
        assert sorted(path.relative_to(root) for path in root.rglob("*")) == before
        take(one, 20)
        shutil.copytree(root, copy)
        with manager_of(copy) as other:
            take(other, 30, 40)
        take(one, 30)
    assert (steps_in(root), steps_in(copy)) == ([20, 30], [30, 40])
