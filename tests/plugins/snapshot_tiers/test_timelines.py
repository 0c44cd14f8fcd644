"""One truth about a run: near and far agree on its line, whatever fails while jobs begin, end or overlap."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
from dataclasses import replace

import msgspec
import pytest

from snapshot import KeepEvery, KeepLatest, Snapshot, SnapshotError, SnapshotManager, StorageError
from snapshot import events as happening
from snapshot.cli import main
from snapshot.errors import RunDeletedError, RunForkedError
from snapshot.storages.file.file_storage import FileStorage
from snapshot_tiers import Near, tier_set, tiered_steps
from snapshot_tiers.control import ControlRequest
from snapshot_tiers.facts import read_copy
from snapshot_tiers.uploader_process import ensure_uploader
from tests.plugins.snapshot_tiers.jobs import (
    ask,
    data_files,
    flip_keeping_time,
    holds,
    is_dead,
    is_unlocked,
    manager_of,
    runs_in,
    state,
    stop_uploaders,
    until,
)
from tests.plugins.snapshot_tiers.timeline_steps import delete, down, facts_in, restored, take_until_far

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(moto, proxy):
    """The far root, and the options with which it is reached through the proxy."""
    region = {"region_name": moto.region}
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, "client_kwargs": region}
    return f"s3://{moto.bucket()}/run", {**options, "timeout": 1, "deadline": 1}


# A root that cannot be read


def test_far_root_that_fails_once_does_not_split_the_run(bucket, proxy, hosts):
    """The faulty job joined on a host without near steps. It began a new run, and restored from the old one."""
    far, options = bucket[0], {"storage_options": bucket[1], "upload": 1}
    with manager_of(far, hosts("a"), **options) as manager:
        take_until_far(manager, 10)
    with manager_of(far, hosts("b"), **options) as manager:
        fault = proxy.fault(times=None, status=503)
        with pytest.raises(StorageError):
            manager.restore_latest(state(-1))
        with pytest.raises(StorageError, match="no host has a near step"):
            manager.restore_latest(state(-1), offline=True)  # "no step" is not known
        proxy.drop(fault)
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 30, 40)
    assert len(runs_in(hosts("b"))) <= 2  # that of the join without the root has no steps
    assert restored(far, hosts("c"), **options) == 40


def test_run_forked_error_after_takes_without_the_far_root(tmp_path, hosts, capsys):
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("b"), grace=0, keep_near=None) as manager:
        manager.take(30, state(30))
        pending = manager.async_take(40, state(40))
        pending.wait()
        up()
        with pytest.raises(RunForkedError, match="the run has forked: attempt") as caught:
            pending.wait("far", timeout=300)
        assert manager.where(40)["far"] == "forked"
        until(lambda: _raises_fork(lambda: manager.take(50, state(50))))
    alone = runs_in(hosts("b"))[0]
    tip, mine = facts_in(far).tip, read_copy(str(alone)).pending[0]
    assert tip.name in str(caught.value)
    assert mine.name in str(caught.value)
    assert {path.name for path in alone.glob("step-*")} >= {"step-30", "step-40"}  # nothing is deleted
    assert not list(far.glob("step-40"))
    with manager_of(far, hosts("b")) as manager, pytest.raises(RunForkedError, match=mine.name):
        manager.restore_latest(state(-1))
    assert restored(far, hosts("a")) == 10  # a job without those near steps goes on
    assert main(["attempts", str(far), "--near", str(hosts("b"))]) == 1
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["number", "attempt", "host", "began", "with", "steps"]
    host, first = socket.gethostname(), facts_in(far).published[0].name
    assert rows[0] == ["1", first, host, "on", "the", "line", "up", "to", "10"]
    assert rows[-1] == [str(mine.number), mine.name, host, "forked"]
    assert main(["attempts", str(far), "--near", str(hosts("b")), "--choose", mine.name]) == 0
    live = state(-1)
    with manager_of(far, hosts("b")) as manager:
        assert manager.restore_latest(live) == 40
        assert holds(live, 40)
        take_until_far(manager, 60)
    assert restored(far, hosts("a")) == 60


def test_cli_attempts_choose_of_the_other_side_of_a_fork(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("b"), grace=0) as manager:
        manager.take(30, state(30))
    up()
    tip = facts_in(far).tip.name
    assert main(["attempts", str(far), "--near", str(hosts("b")), "--choose", tip]) == 0
    assert restored(far, hosts("b")) == 10
    stop_uploaders(hosts("b"))
    assert main(["upload", str(hosts("b")), str(far), "--all"]) == 0
    assert not list(hosts("b").glob("*/step-30"))  # it is off the line now
    assert not (far / "step-30").exists()


def _raises_fork(work):
    try:
        work()
    except RunForkedError:
        return True
    return False


def test_far_root_that_is_back_gets_the_steps_taken_without_it(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("a"), keep_near=None) as manager:
        with pytest.raises(StorageError):
            manager.restore_latest(state(-1))
        assert manager.restore_latest(state(-1), offline=True) == 10
        for step in (15, 25):
            manager.take(step, state(step))
        up()
        until(lambda: manager.where(25)["far"] == "whole")
    assert restored(far, hosts("c")) == 25


def test_near_job_that_ended_without_the_far_root_is_continued_by_the_next(tmp_path, hosts):
    """Its uploader ended, too. The join publishes what it had begun."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 10
        manager.take(20, state(20))
    stop_uploaders(hosts("a"))
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 20
        manager.take(30, state(30))
    stop_uploaders(hosts("a"))
    up()
    with manager_of(far, hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 30
        take_until_far(manager, 40)
    numbers = [each.number for each in facts_in(far).published]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4


def test_attempt_without_a_take_is_not_a_fork(tmp_path, hosts):
    """It stayed on the host when another one got its number. Without the root, no job could begin there any more."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), grace=0) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 10
    stop_uploaders(hosts("a"))
    up()
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 20)
    stop_uploaders(hosts("a"))
    up = down(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 20
        manager.take(30, state(30))
        assert manager.restore_latest(state(-1), offline=True) == 30
    stop_uploaders(hosts("a"))
    up()
    assert restored(far, hosts("a")) == 30


@pytest.mark.parametrize("how", ["step", "far", "lost"])
def test_attempt_fact_that_is_damaged_does_not_hide_its_steps(tmp_path, hosts, how):
    """One bit in the only copy of it made a restore ignore committed steps, or remove those before them."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=1, keep_near=None) as manager:
        take_until_far(manager, 10, 12)
    up = down(far)
    with manager_of(far, hosts("a"), grace=0, keep_near=None) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 12
        manager.take(20, state(20))
    stop_uploaders(hosts("a"))
    up()
    [folder] = runs_in(hosts("a"))
    [attempt] = read_copy(str(folder)).pending
    path = folder / f".run/{attempt.name}.json"
    if how == "lost":
        path.unlink()
    else:
        flip_keeping_time(path, path.read_bytes().index(b",12," if how == "step" else b"/far") + 2)
    with manager_of(far, hosts("a"), upload=1, keep_near=None) as manager:
        assert manager.restore_latest(state(-1)) == 20
        assert manager.steps() == [10, 12, 20]
        take_until_far(manager, 30)
    assert facts_in(far).find(attempt.name) == attempt


@pytest.mark.parametrize("near", [True, False])
def test_far_root_that_is_a_file_is_an_error(tmp_path, hosts, near):
    (tmp_path / "far").write_text("")
    options = {"near": Near(hosts("a"), grace=0)} if near else {}
    with SnapshotManager(tmp_path / "far", signals=(), **options) as manager:
        for call in (lambda: manager.restore_latest(state(-1)), manager.steps):
            with pytest.raises(StorageError):
                call()


@pytest.mark.parametrize("until", ["Far", "bucket", ""])
def test_wait_until_an_unknown_tier_is_refused(tmp_path, hosts, until):
    """It returned as soon as the step was committed near."""
    with manager_of(tmp_path / "far", hosts("a"), grace=0) as manager:
        pending = manager.async_take(10, state(10))
        with pytest.raises(ValueError, match="until must be 'near', 'far'"):
            pending.wait(until)
        pending.wait("near")


# Jobs that overlap


def test_near_trainer_that_was_replaced_cannot_restore_its_facts(tmp_path, hosts):
    """It starts the uploader again, without the far root, with what it knew before it was replaced."""
    far = tmp_path / "far"
    with (
        manager_of(far, hosts("a"), grace=0, keep_near=None) as zombie,
        manager_of(far, hosts("a"), grace=0, keep_near=None) as main_job,
    ):
        take_until_far(zombie, 10, 20)
        shutil.rmtree(far / "step-20")
        shutil.rmtree(runs_in(hosts("a"))[0] / "step-20")
        assert main_job.restore_latest(state(-1)) == 10
        attempt = main_job._steps.joined.member.attempt.name
        up = down(far)
        stop_uploaders(hosts("a"))
        with contextlib.suppress(StorageError):  # it may look into the far root
            zombie.where(10)  # starts the uploader
        [folder] = runs_in(hosts("a"))
        assert read_copy(str(folder)).has(attempt)
        with pytest.raises(SnapshotError, match="from step 10"):
            zombie.take(30, state(31))
        main_job.take(30, state(30))
        pending = main_job.async_take(40, state(40))
        pending.wait()
        up()
        pending.wait("far", timeout=300)
    live = state(-1)
    with manager_of(far, hosts("a")) as manager:
        assert manager.restore_latest(live) == 40
        assert holds(live, 40)


def test_near_step_of_a_replaced_trainer_does_not_stop_a_take(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), grace=0, upload=None, keep_near=None) as zombie:
        zombie.async_take(10, state(10)).wait("far", timeout=300)
        with manager_of(far, hosts("a"), grace=0, upload=None, keep_near=None) as main_job:
            shutil.copytree(runs_in(hosts("a"))[0] / "step-10", tmp_path / "ten")
            zombie.take(30, state(31))
            step = runs_in(hosts("a"))[0] / "step-30"
            step.rename(tmp_path / "thirty")
            assert main_job.restore_latest(state(-1)) == 10
            stop_uploaders(hosts("a"))
            (tmp_path / "thirty").rename(step)  # as if it was committed a moment later
            main_job.take(30, state(30))
            live = state(-1)
            main_job.snapshot(30).restore(live)
            assert holds(live, 30)


@pytest.fixture
def left(tmp_path, hosts):
    """A root with steps 10, 20 and 40 on the line, and 30 of an attempt that was left at 20."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=1, keep_near=None) as manager:
        take_until_far(manager, 10, 20, 30)
    stop_uploaders(hosts("a"))
    shutil.rmtree(hosts("a"))
    held = (far / "step-30").rename(tmp_path / "held")
    with manager_of(far, hosts("b"), upload=1, keep_near=None) as manager:
        assert manager.restore_latest(state(-1)) == 20
        take_until_far(manager, 40)
    stop_uploaders(hosts("b"))
    shutil.rmtree(hosts("b"))
    held.rename(far / "step-30")
    return far


@pytest.mark.parametrize("plain", [True, False])
def test_abandoned_step_below_a_good_one_is_not_restored(left, hosts, plain):
    """One rotten bit in the newest step must not lead to a timeline that the run has left."""
    for path in (left / "step-40/data").iterdir():
        flip_keeping_time(path)
    live, options = state(-1), {} if plain else {"near": hosts("c")}
    with SnapshotManager(left, signals=(), **options) as manager:
        assert manager.steps() == [10, 20, 40]
        assert manager.restore_latest(live) == 20
        assert holds(live, 20)


@pytest.mark.parametrize("plain", [True, False])
def test_abandoned_step_does_not_count_for_keep(left, hosts, plain):
    options = {} if plain else {"near": Near(hosts("c"), upload=1)}
    with SnapshotManager(left, signals=(), keep=KeepLatest(3), **options) as manager:
        assert manager.restore_latest(state(-1)) == 40
        manager.async_take(50, state(50)).wait("far" if not plain else None)
    assert {path.name for path in left.glob("step-*")} == {"step-20", "step-40", "step-50"}


def test_cli_prune_and_ls_follow_the_line_of_the_run(left, hosts, capsys):
    assert main(["prune", str(left), "--keep-latest", "3", "--json", "--yes"]) == 0
    told = capsys.readouterr().out
    assert {path.name for path in left.glob("step-*")} == {"step-10", "step-20", "step-40"}, told
    assert "off the line" in told


def test_near_root_that_is_full_beside_an_abandoned_far_step_is_a_degraded_take(left, hosts, monkeypatch):
    with SnapshotManager(left, near=Near(hosts("c"), grace=0), signals=()) as manager:
        assert manager.restore_latest(state(-1)) == 40
        tiers = manager._steps.joined
        monkeypatch.setattr(type(tiers), "free_bytes", lambda self: 0)
        tiers.last_bytes = 1
        manager.take(30, state(33))
    live = state(-1)
    Snapshot(str(left / "step-30")).restore(live)
    assert holds(live, 33)


# Roots and folders that change


@pytest.mark.parametrize("begun", [True, False])
def test_far_root_that_was_deleted_is_not_recreated(tmp_path, hosts, begun):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=1, keep_near=None, grace=0) as manager:
        take_until_far(manager, 10)
        stop_uploaders(hosts("a"))
        if begun:
            manager._steps.joined.options = replace(manager._steps.options, rate=4e5)
            manager.take(20, state(20, 400_000))
            until(lambda: list(far.glob("step-20/**/*.aside")))
        else:
            up = down(far)
            manager.take(20, state(20))
            up()
            stop_uploaders(hosts("a"))
        delete(far)
        until(lambda: manager.where(20)["far"] == "deleted")
        with pytest.raises(RunDeletedError, match="the run was deleted there"):
            manager.async_take(30, state(30)).wait("far", timeout=300)
        [folder] = runs_in(hosts("a"))
        pid = ask(folder).pid
    until(lambda: is_dead(pid))
    assert not [path for path in far.rglob("*") if path.is_file()]
    assert restored(far, hosts("a")) is None


def test_upload_that_does_not_advance_is_reported(tmp_path, hosts, monkeypatch, caplog):
    monkeypatch.setattr(tiered_steps, "STALLS", 0.5)
    far, told, steps = tmp_path / "far", [], itertools.count(20)
    happening.add_handler(told.append)
    try:
        with manager_of(far, hosts("a"), upload=1, keep_near=KeepLatest(2)) as manager:
            take_until_far(manager, 10)
            up = down(far)

            def stalled():
                step = next(steps)
                manager.take(step, state(step))
                return [each for each in told if each.name == "stalled"]

            [event] = until(stalled)[:1]
            assert min(event.fields["steps"]) >= 20
            assert str(far) in event.path
            assert f"the uploads of step-{event.fields['steps'][0]}" in caplog.text
            up()
            step = next(steps)
            take_until_far(manager, step)
    finally:
        happening.remove_handler(told.append)


def test_fact_that_is_damaged_is_not_replaced_by_one_of_a_deleted_run(tmp_path, hosts):
    """The copy of the deleted run had a higher number. It was written into the root, and its steps were restored."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), grace=0) as manager:
        take_until_far(manager, 10)
        assert manager.restore_latest(state(-1)) == 10
        take_until_far(manager, 40)
    stop_uploaders(hosts("a"))
    shutil.rmtree(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1)) is None
        take_until_far(manager, 5)
    stop_uploaders(hosts("a"))
    flip_keeping_time(far / ".run/00000001.json", 30)
    assert restored(far, hosts("a")) == 5


def test_uploader_whose_root_has_another_run_ends(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), grace=0) as manager:
        take_until_far(manager, 10)
        delete(far)
        with manager_of(far, hosts("b")) as other:
            take_until_far(other, 5)
        manager.take(20, state(20))
        until(lambda: manager.where(20)["far"] == "deleted")
        pid = ask(runs_in(hosts("a"))[0]).pid
    until(lambda: is_dead(pid))
    assert {path.name for path in far.glob("step-*")} == {"step-5"}


def test_near_root_of_another_user_is_not_read(tmp_path, hosts):
    """A planted fact would reach the bucket, and every restore would return None."""
    if os.geteuid():
        pytest.skip("only root can make folders of others")
    far, planted = tmp_path / "far", tmp_path / "planted"
    with manager_of(far, hosts("a")) as manager:
        take_until_far(manager, 10)
    up = down(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 10
        manager.take(20, state(20))
    stop_uploaders(hosts("a"))
    hosts("a").rename(planted)
    [folder] = runs_in(planted)
    [attempt] = read_copy(str(folder)).pending
    up()
    for owner, mode in ((65534, 0o700), (0, 0o777)):
        os.chown(planted, owner, 0)
        planted.chmod(mode)
        with manager_of(far, planted, grace=0) as manager:
            assert manager.restore_latest(state(-1)) == 10
        assert not facts_in(far).has(attempt.name)
        assert main(["upload", str(planted)]) == 2
        assert main(["ls", str(far), "--near", str(planted)]) == 2
        assert main(["attempts", str(far), "--near", str(planted)]) == 2
    os.chown(planted, 0, 0)
    assert not list(far.glob("step-20"))


def test_near_step_with_a_damaged_manifest_is_removed(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), keep_near=KeepLatest(2)) as manager:
        take_until_far(manager, 10)
        manifest = runs_in(hosts("a"))[0] / "step-10/.snapshot_metadata"
        manifest.chmod(0o644)
        manifest.write_bytes(b"damaged")
        take_until_far(manager, 20, 30, 40)
    assert {path.name for path in runs_in(hosts("a"))[0].glob("step-*")} == {"step-30", "step-40"}


def test_near_step_with_a_damaged_manifest_between_kept_steps_is_removed(tmp_path, hosts):
    policy = KeepLatest(2) | KeepEvery(100)
    with manager_of(tmp_path / "far", hosts("a"), keep_near=policy) as manager:
        take_until_far(manager, 100, 110, 200)
        for step in (110, 200):
            flip_keeping_time(runs_in(hosts("a"))[0] / f"step-{step}/.snapshot_metadata")
        take_until_far(manager, 210, 220, 230)
    left = {path.name for path in runs_in(hosts("a"))[0].glob("step-*")}
    assert left == {"step-100", "step-200", "step-220", "step-230"}  # other hosts may have the manifest of step 200


@pytest.mark.parametrize("at", [30, -40])
def test_near_step_with_a_damaged_manifest_is_taken_again(tmp_path, hosts, at):
    """Each job restored the step before it, and then failed at this one."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=None, grace=0, keep_near=None) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        manager.take(20, state(20))
        stop_uploaders(hosts("a"))
    stop_uploaders(hosts("a"))
    shutil.rmtree(far / "step-20", ignore_errors=True)
    flip_keeping_time(runs_in(hosts("a"))[0] / "step-20/.snapshot_metadata", at)
    with manager_of(far, hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 10
        manager.take(20, state(22))
        live = state(-1)
        assert manager.restore_latest(live) == 20
        assert holds(live, 22)


def test_run_record_of_an_earlier_version_is_converted(tmp_path, hosts):
    """Its attempts become facts. The steps that it calls abandoned stay so."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=1, keep_near=None) as manager:
        take_until_far(manager, 10, 20, 30)
    stop_uploaders(hosts("a"))
    [folder] = runs_in(hosts("a"))
    attempt = facts_in(far).tip
    for place in (far, folder):
        shutil.rmtree(place / ".run")
        record = {
            "run": folder.name,
            "attempts": [[1, attempt.name, None], [2, "0123456789ab", 20]],
            "far": str(far),
            "published": place == folder,
        }
        (place / ".run.json").write_bytes(msgspec.json.encode(record))
    with manager_of(far, hosts("a"), upload=1) as manager:
        assert manager.restore_latest(state(-1)) == 20
        take_until_far(manager, 25)
    assert [each.name for each in facts_in(far).published][:2] == [attempt.name, "0123456789ab"]
    assert restored(far, hosts("c")) == 25


def test_far_root_without_conditional_puts_logs_that_it_needs_one_writer(tmp_path, hosts, monkeypatch, caplog):
    monkeypatch.setattr(FileStorage, "capabilities", replace(FileStorage.capabilities, conditional_put=False))
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
        manager.take(20, state(20))
    assert restored(tmp_path / "far", hosts("a")) == 20
    assert "only one job at a time may write there" in caplog.text


# An uploader that hangs


def test_wait_is_not_longer_than_its_timeout_if_the_uploader_is_stopped(tmp_path, hosts, told):
    """A stopped uploader is named, and replaced."""
    with manager_of(tmp_path / "far", hosts("a"), upload=None) as manager:
        manager.take(10, state(10))
        [folder] = runs_in(hosts("a"))
        pid = ask(folder).pid
        os.kill(pid, signal.SIGSTOP)
        pending = manager.async_take(20, state(20))
        pending.wait()
        with pytest.raises(TimeoutError, match=rf"its uploader( \(process {pid}\))? did not answer within"):
            pending.wait("far", timeout=1)
        found = manager.where(10)  # without the uploader: what is in the folder, and in the root
        assert (found["near"], found["far"]) == ("whole", "absent")
        pending.wait("far", timeout=300)
        assert [each.fields["pid"] for each in told if each.name == "replaced"] == [pid]
        assert is_dead(pid)
        assert ask(folder).pid != pid


def test_uploader_that_is_stopped_does_not_delay_the_next_job(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), grace=0) as manager:
        take_until_far(manager, 10)
        pid = ask(runs_in(hosts("a"))[0]).pid
        os.kill(pid, signal.SIGSTOP)
        with manager_of(tmp_path / "far", hosts("a")) as other:
            assert other.restore_latest(state(-1)) == 10
            take_until_far(other, 20)
        assert is_dead(pid)


def test_near_steps_with_missing_files_are_not_damaged_if_far_is_unreadable(tmp_path, hosts):
    """They may be whole there. An application that was told that all steps are damaged began again."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), keep_near=None) as manager:
        take_until_far(manager, 10, 20)
    stop_uploaders(hosts("a"))
    for step in (10, 20):
        for path in data_files(hosts("a"), step):
            path.unlink()
    up = down(far)
    with manager_of(far, hosts("a"), grace=0) as manager:
        with pytest.raises(StorageError, match="steps 10, 20"):
            manager.restore_latest(state(-1), offline=True)
        up()
        assert manager.restore_latest(state(-1), offline=True) == 20


def test_uploader_that_is_stopped_does_not_delay_a_job_on_several_hosts(tmp_path):
    """It was started for a job on one host. The join gave it up after 30 seconds, and the steps were not found."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with contextlib.closing(ensure_uploader(str(folder), None)[0]) as client:
        pid = client.ask(ControlRequest("status")).pid
        os.kill(pid, signal.SIGSTOP)
    client, address = ensure_uploader(str(folder), "127.0.0.1")
    with contextlib.closing(client):
        assert address.startswith("127.0.0.1:")
        assert is_dead(pid)
        client.ask(ControlRequest("stop"))
    until(lambda: is_unlocked(folder))


def test_take_waits_for_the_far_root_no_longer_than_the_manager_timeout(tmp_path, hosts, monkeypatch):
    """It asked for the steps there, for 20 seconds, although the join had found that it does not answer."""
    find = FileStorage.list

    async def find_near(storage, *args, **options):
        if str(tmp_path / "far") in storage.url.location:
            await asyncio.sleep(3600)  # the test has less
        return await find(storage, *args, **options)

    monkeypatch.setattr(FileStorage, "list", find_near)
    with manager_of(tmp_path / "far", hosts("a"), grace=0, timeout=2) as manager:
        manager.take(10, state(10))


def test_far_root_that_hangs_later_does_not_delay_a_wait_or_restore(tmp_path, hosts, monkeypatch):
    """A look for a step that is not near any more, and the publication after a restore, waited for 20 seconds."""
    far, hangs = tmp_path / "far", False

    def hang(name):
        call = getattr(FileStorage, name)

        async def called(storage, *args, **options):
            if hangs and str(far) in storage.url.location:
                await asyncio.sleep(3600)  # the test has less
            return await call(storage, *args, **options)

        monkeypatch.setattr(FileStorage, name, called)

    for name in ("list", "get", "stat", "put"):
        hang(name)
    begin = tier_set.begin_attempt

    def begin_later(*args, **options):
        nonlocal hangs
        hangs = True
        begun = begin(*args, **options)
        hangs = False
        return begun

    with manager_of(far, hosts("a"), grace=0, upload=None, timeout=2) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        pending = manager.async_take(20, state(20))
        pending.wait()
        [folder] = runs_in(hosts("a"))
        (folder / "step-20/.snapshot_metadata").unlink()
        hangs = True
        with pytest.raises(TimeoutError, match="step-20: not in"):
            pending.wait("far", timeout=1)
        hangs = False
        monkeypatch.setattr(tier_set, "begin_attempt", begin_later)
        assert manager.restore_latest(state(-1)) == 10
