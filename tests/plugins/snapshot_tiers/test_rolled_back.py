"""A root that lacks facts which a host has seen published, though the run was not deleted: a person must choose."""

import shutil

import pytest

from snapshot import Snapshot
from snapshot.cli import main
from snapshot.errors import CorruptSnapshotError, RunForkedError
from tests.plugins.snapshot_tiers.jobs import (
    flip_keeping_time,
    holds,
    manager_of,
    runs_in,
    state,
    stop_uploaders,
    until,
)
from tests.plugins.snapshot_tiers.timeline_steps import delete, facts_in, restored, take_until_far

pytestmark = pytest.mark.slow


@pytest.fixture
def rolled(tmp_path, hosts):
    """A root that was put back after a job had taken step 20 near, and the name of that job's attempt."""
    far, backup = tmp_path / "far", tmp_path / "backup"
    with manager_of(far, hosts("a"), upload=None) as manager:
        manager.take(10, state(10))
    stop_uploaders(hosts("a"))
    shutil.copytree(far, backup)
    with manager_of(far, hosts("a"), upload=None, keep_near=None, grace=0) as manager:
        assert manager.restore_latest(state(-1)) == 10
        manager.take(20, state(20))
    stop_uploaders(hosts("a"))
    name = facts_in(far).tip.name
    delete(far)
    backup.rename(far)
    return far, name


def attempts(far, near, *more):
    return main(["attempts", str(far), "--near", str(near), *more])


def test_rolled_back_root_is_refused_if_a_near_step_was_committed(rolled, hosts, capsys):
    far, lost = rolled
    for _ in range(2):
        with manager_of(far, hosts("a")) as manager, pytest.raises(RunForkedError, match="was rolled back") as caught:
            manager.restore_latest(state(-1))
        assert lost in str(caught.value)
        with manager_of(far, hosts("a")) as manager, pytest.raises(RunForkedError, match="was rolled back"):
            manager.take(30, state(30))
    assert (runs_in(hosts("a"))[0] / "step-20").exists()
    assert facts_in(far).number == 1  # nothing is published without a person
    assert attempts(far, hosts("a")) == 1
    assert "rolled back" in next(line for line in capsys.readouterr().out.splitlines() if lost in line)
    assert attempts(far, hosts("a"), "--choose", lost) == 0
    live = state(-1)
    with manager_of(far, hosts("a")) as manager:
        assert manager.restore_latest(live) == 20
        assert holds(live, 20)
        take_until_far(manager, 30)
    assert restored(far, hosts("b")) == 30


def test_rolled_back_root_is_accepted_with_cli_attempts_choose(rolled, hosts):
    far, _ = rolled
    assert attempts(far, hosts("a"), "--choose", facts_in(far).tip.name) == 0
    assert restored(far, hosts("a")) == 10
    until(lambda: not (runs_in(hosts("a"))[0] / "step-20").exists())  # it is off the line now


@pytest.mark.parametrize("more", [1, 4])
def test_rolled_back_root_continued_by_another_host_is_refused(rolled, hosts, more):
    """With as many facts as it has seen, or with more."""
    far, lost = rolled
    with manager_of(far, hosts("b")) as manager:
        for step in range(10, 10 + more):
            assert manager.restore_latest(state(-1)) == step
            manager.take(step + 1, state(step + 1))
    with manager_of(far, hosts("a")) as manager, pytest.raises(RunForkedError, match="was rolled back"):
        manager.restore_latest(state(-1))
    assert attempts(far, hosts("a"), "--choose", lost) == 0
    assert restored(far, hosts("a")) == 20


def test_rolled_back_root_is_refused_by_a_running_job(tmp_path, hosts):
    far, backup = tmp_path / "far", tmp_path / "backup"
    with manager_of(far, hosts("a"), upload=None) as manager:
        manager.take(10, state(10))
    stop_uploaders(hosts("a"))
    shutil.copytree(far, backup)
    with manager_of(far, hosts("a"), upload=1, keep_near=None, grace=0) as manager:
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 20)
        delete(far)
        backup.rename(far)
        with pytest.raises(RunForkedError, match="was rolled back"):
            manager.async_take(30, state(30)).wait("far", timeout=300)
        assert manager.where(30)["far"] == "forked"
        name = manager._steps.joined.member.attempt.name
    assert attempts(far, hosts("a"), "--choose", name) == 0
    assert restored(far, hosts("a")) == 30


def test_facts_deleted_by_a_bucket_rule_are_noticed(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=None, grace=0) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        manager.take(20, state(20))
    stop_uploaders(hosts("a"))
    name = facts_in(far).tip.name
    shutil.rmtree(far / ".run")
    with manager_of(far, hosts("a")) as manager, pytest.raises(RunForkedError, match="has none"):
        manager.restore_latest(state(-1))
    assert attempts(far, hosts("a"), "--choose", name) == 0
    assert restored(far, hosts("a")) == 20
    stop_uploaders(hosts("a"))
    delete(far)  # all of it: the run is deleted
    assert restored(far, hosts("a")) is None


def test_fact_that_is_damaged_and_deleted_is_noticed_by_a_host_that_saw_it(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=1) as manager:
        take_until_far(manager, 10)
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 20)
    stop_uploaders(hosts("a"))
    newest = max((far / ".run").iterdir())
    flip_keeping_time(newest, 30)
    with manager_of(far, hosts("b")) as manager, pytest.raises(CorruptSnapshotError, match="delete the file"):
        manager.restore_latest(state(-1))
    newest.unlink()
    with manager_of(far, hosts("b")) as manager:
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 15)
    with manager_of(far, hosts("a")) as manager, pytest.raises(RunForkedError, match="was rolled back"):
        manager.restore_latest(state(-1))
    assert Snapshot(far / "step-20").exists()


def test_rolled_back_root_is_refused_after_a_later_job_on_the_host(tmp_path, hosts):
    far, backup = tmp_path / "far", tmp_path / "backup"
    with manager_of(far, hosts("a"), upload=None, keep_near=None, grace=0) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        shutil.copytree(far, backup)
        with manager_of(far, hosts("a"), upload=None, keep_near=None, grace=0) as later:
            assert later.restore_latest(state(-1)) == 10
            later.take(20, state(20))
        delete(far)
        backup.rename(far)
        with pytest.raises(RunForkedError, match="was rolled back"):
            manager.restore_latest(state(-1))
