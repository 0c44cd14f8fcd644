"""A run that changes: other jobs at its root, restores in the middle, plain managers, lost hosts without replicas."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from snapshot import KeepLatest, Snapshot, SnapshotError, SnapshotExistsError, SnapshotManager, TakeOptions
from snapshot import events as happening
from snapshot.errors import CorruptSnapshotError
from snapshot.runs.timeline import decode_record
from snapshot_tiers.tier_set import TierSet
from tests.plugins.snapshot_tiers.host_steps import restore
from tests.plugins.snapshot_tiers.jobs import (
    ask,
    data_files,
    flip_keeping_time,
    holds,
    manager_of,
    rank,
    runs_in,
    state,
    stop_uploaders,
    until,
)

pytestmark = pytest.mark.slow


def _lone(far, near, names, steps):
    """Take steps on hosts without replicas, until all of them are far."""
    with manager_of(far, f"{near}/{names[rank()]}", upload=1, keep_near=None) as manager:
        for step in steps:
            manager.take(step, state(step), options=TakeOptions(replicated=["same/**"]))
            until(lambda step=step: manager.where(step)["far"] == "whole")
        dist.barrier()


def test_far_root_restores_a_lost_host_without_replicas(two, tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a").parent
    hosts("b"), hosts("c")
    two.run(_lone, far, near, "ab", [10, 20], timeout=300)
    stop_uploaders(hosts("a"), hosts("b"))
    found = two.run(restore, far, near, "ac", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[1][3]["far"] > 0


def test_near_take_of_a_job_that_was_replaced_raises_snapshot_error(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=None) as one:
        one.take(10, state(10))
        until(lambda: one.where(10)["far"] == "whole")
        with manager_of(tmp_path / "far", hosts("a")) as other:
            assert other.restore_latest(state(-1)) == 10

            def told():
                try:
                    one.take(20 + len(happened), state(20))
                except SnapshotError as error:
                    return str(error)
                happened.append(1)
                return ""

            happened = []
            assert "another job has continued this run from step 10" in until(told)


def test_near_restores_during_a_run_lose_no_steps(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
        for turn in range(4):
            pending = manager.async_take(15 + turn, state(15 + turn))
            live = state(-1)
            assert manager.restore_latest(live) == 15 + turn
            assert holds(live, 15 + turn)
            pending.wait()
            assert manager.where(15 + turn)["near"] == "whole"


def test_near_files_of_a_running_take_are_kept_by_another_job(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as one:
        one.take(10, state(10))
        folder = runs_in(hosts("a"))[0] / "step-30"
        (folder / "data").mkdir(parents=True)
        running = folder / "data/0123456789ab-0-0.safetensors"
        running.write_bytes(b"being written")
        with manager_of(tmp_path / "far", hosts("a")) as other:
            assert other.restore_latest(state(-1)) == 10
            assert running.exists()
            other.take(40, state(40))
            until(lambda: other.where(40)["far"] == "whole")
            assert running.exists()
    os.utime(running, (0, 0))
    with manager_of(tmp_path / "far", hosts("a")) as alone:
        alone.take(50, state(50))
    assert not folder.exists()  # after some minutes, it is a leftover


def test_near_run_owns_steps_of_a_plain_manager(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        manager.take(100, state(100))
    with manager_of(far, hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 100
    with SnapshotManager(str(far), signals=()) as plain:
        plain.take(200, state(200))
        plain.take(300, state(300))
    with manager_of(far, hosts("a")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 300
        assert holds(live, 300)
        with pytest.raises(SnapshotExistsError):
            manager.take(200, state(201))
        manager.take(200, state(202), overwrite=True)
        until(lambda: manager.where(200)["far"] == "whole")
    live = state(-1)
    Snapshot(str(far / "step-200")).restore(live)
    assert holds(live, 202)


def test_upload_of_an_older_step_that_is_overwritten(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload="latest", keep_near=KeepLatest(1)) as manager:
        for step in (10, 20, 30):
            manager.take(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
        manager.take(20, state(21), overwrite=True)
        for step in (40, 50):
            manager.take(step, state(step))
        until(lambda: manager.where(20)["far"] == "whole")
    live = state(-1)
    Snapshot(str(tmp_path / "far/step-20")).restore(live)
    assert holds(live, 21)


def test_near_run_used_last_is_chosen_without_the_far_root(tmp_path, hosts):
    far = tmp_path / "far"
    for value in (50, 10):
        with manager_of(far, hosts("a")) as manager:
            manager.take(value, state(value))
        shutil.rmtree(far)
    far.write_text("down")
    with manager_of(far, hosts("a"), grace=0) as manager:
        assert manager.restore_latest(state(-1), offline=True) == 10


def _is_gone(folder):
    """Remove a folder in which the trainer may just start an uploader again."""
    stop_uploaders(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_near_root_that_vanishes_does_not_stop_the_run(tmp_path, hosts):
    told = []
    happening.add_handler(told.append)
    try:
        with manager_of(tmp_path / "far", hosts("a"), grace=5) as manager:
            manager.take(1, state(1))
            until(lambda: _is_gone(hosts("a")))
            hosts("a").write_text("a file")
            for step in (2, 3):
                manager.take(step, state(step))
            manager.async_take(4, state(4)).wait()
    finally:
        happening.remove_handler(told.append)
    assert {2, 3, 4} <= {each.fields["step"] for each in told if each.name == "degraded"}
    live = state(-1)
    Snapshot(str(tmp_path / "far/step-4")).restore(live)
    assert holds(live, 4)


def test_uploader_adopted_by_a_job_gets_its_new_options(moto, tmp_path, hosts):
    far = f"s3://{moto.bucket()}/run"
    options = {"key": moto.key, "secret": moto.secret, "client_kwargs": {"region_name": moto.region}}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        wrong = f"http://127.0.0.1:{closed.getsockname()[1]}"
    old = {**options, "endpoint_url": wrong, "timeout": 1, "deadline": 1}
    with manager_of(far, hosts("a"), storage_options=old, grace=0) as manager:
        manager.take(10, state(10))
        with manager_of(far, hosts("a"), storage_options={**options, "endpoint_url": moto.url}) as other:
            assert other.restore_latest(state(-1)) == 10
            until(lambda: other.where(10)["far"] == "whole")


def _one_waits(far, near):
    with manager_of(far, f"{near}/{'ab'[rank()]}", upload=None, grace=0) as manager:
        pending = manager.async_take(10, state(10))
        pending.wait()
        if rank() == 1:
            pending.wait("far", timeout=300)
        dist.barrier()
        return manager.where(10)["far"]


def test_wait_far_on_one_rank_waits_for_the_uploads_of_all(two, tmp_path, hosts):
    hosts("a"), hosts("b")
    assert two.run(_one_waits, tmp_path / "far", tmp_path / "hosts", timeout=300) == ["whole", "whole"]


def _all_wait(far, near):
    with manager_of(far, f"{near}/{'aabb'[rank()]}") as manager:
        for step in range(6):
            manager.async_take(step, state(step)).wait("far", timeout=300)
        dist.barrier()


def test_wait_far_on_all_ranks_of_a_host(four, tmp_path, hosts):
    hosts("a"), hosts("b")
    four.run(_all_wait, tmp_path / "far", tmp_path / "hosts", timeout=300)
    assert Snapshot(str(tmp_path / "far/step-5")).verify()


def _taken(far, near):
    with manager_of(far, f"{near}/{'ab'[rank()]}", upload=None, grace=0) as manager:
        manager.take(10, state(10))
        dist.barrier()


def _again(far, near):
    with manager_of(far, f"{near}/{'ab'[rank()]}") as manager:
        step = manager.restore_latest(state(-1))
        until(lambda: manager.where(10)["far"] == "whole")
        dist.barrier()
        return step


def test_near_host_that_missed_the_manifest_receives_it(two, tmp_path, hosts):
    far, near = tmp_path / "far", tmp_path / "hosts"
    hosts("a"), hosts("b")
    two.run(_taken, far, near, timeout=300)
    stop_uploaders(hosts("a"), hosts("b"))
    shutil.rmtree(far / "step-10", ignore_errors=True)
    (runs_in(hosts("b"))[0] / "step-10/.snapshot_metadata").unlink()
    assert two.run(_again, far, near, timeout=300) == [10, 10]
    assert Snapshot(str(far / "step-10")).verify()


def _killed_uploader(far, near):
    folder = f"{near}/{'ab'[rank()]}"
    with manager_of(far, folder, replicas=1, keep_near=KeepLatest(1)) as manager:
        manager.take(1, state(1))
        until(lambda: manager.where(1)["replicas"] == 1)
        before = ask(runs_in(folder)[0]).address
        dist.barrier()
        if rank() == 1:
            stop_uploaders(folder)
        for step in range(2, 12):
            manager.take(step, state(step))
        until(lambda: (where := manager.where(11))["replicas"] == 1 and where["far"] == "whole")
        dist.barrier()
        manager.take(12, state(12))
        until(lambda: _cleaned(manager, folder) <= 6)
        dist.barrier()
        return before == ask(runs_in(folder)[0]).address


def _cleaned(manager, folder):
    """The near steps that are left when what is held no longer was looked at once more."""
    manager._steps.near_cleaner.look_again(12)
    return len(list(runs_in(folder)[0].glob("step-*")))


def test_replicas_continue_after_an_uploader_was_killed(two, tmp_path, hosts):
    hosts("a"), hosts("b")
    assert two.run(_killed_uploader, tmp_path / "far", tmp_path / "hosts", timeout=300) == [True, True]


def test_uploader_survives_connections_of_other_processes(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(1, state(1))
        [folder] = runs_in(hosts("a"))
        ask(folder)
        strangers = []
        for _ in range(300):
            each = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                each.connect(f"/proc/self/fd/{descriptor}/.uploader.sock")
            os.close(descriptor)
            strangers.append(each)
        manager.take(2, state(2))
        until(lambda: manager.where(2)["far"] == "whole")
        for each in strangers:
            each.close()


def test_near_folder_of_another_user_is_not_used(tmp_path, hosts):
    if os.geteuid():
        pytest.skip("only root can make folders of others")
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        manager.take(1, state(1))
    [folder] = runs_in(hosts("a"))
    stop_uploaders(hosts("a"))
    os.chown(folder, 65534, 65534)
    told = []
    happening.add_handler(told.append)
    try:
        with manager_of(far, hosts("a")) as manager:
            manager.take(2, state(2))
    finally:
        happening.remove_handler(told.append)
        os.chown(folder, 0, 0)
    assert [each.fields["step"] for each in told if each.name == "degraded"] == [2]


@pytest.mark.parametrize("run", ["../other/job", "", "a" * 11, "A" * 12, "0123456789ab/x"])
def test_run_id_in_a_fact_is_never_a_path(run):
    with pytest.raises(CorruptSnapshotError, match="not a fact"):
        decode_record(b'{"run":"%s","attempts":[[1,"0123456789ab",null]]}' % run.encode(), "far")
    assert decode_record(b'{"run":"0123456789ab","attempts":[]}', "far").pending[0].run == "0123456789ab"


def test_fact_that_is_damaged_is_written_again(tmp_path, hosts):
    far = tmp_path / "far"
    with manager_of(far, hosts("a")) as manager:
        manager.take(1, state(1))
    [fact] = (far / ".run").iterdir()
    flip_keeping_time(fact, 30)
    with manager_of(far, hosts("a")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 1
        assert manager.report.sources["near"] > 0
        manager.take(2, state(2))
    assert sorted(path.name for path in (far / ".run").iterdir()) == ["00000001.json", "00000002.json"]


@pytest.mark.parametrize("name", ["a%41b%20c", "with space", "what?", "ä#;"])
def test_near_root_may_be_any_path(tmp_path, name):
    near = tmp_path / name / "near"
    try:
        with manager_of(tmp_path / "far", near) as manager:
            manager.take(1, state(1))
            until(lambda: manager.where(1)["far"] == "whole")
        with manager_of(tmp_path / "far", near) as manager:
            assert manager.restore_latest(state(-1)) == 1
            assert manager.report.sources["near"] > 0
    finally:
        stop_uploaders(near)


def test_upload_of_an_incomplete_step_does_not_delay_a_newer_one(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=10, keep_near=None) as manager:
        stopped = tmp_path / "far"
        stopped.mkdir(exist_ok=True)
        manager.take(10, state(10))
        for path in data_files(hosts("a"), 10):
            path.unlink()
        manager.take(40, state(40))
        until(lambda: manager.where(40)["far"] == "whole")


def test_near_with_incremental_takes(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), incremental=True, upload=1) as manager:
        live = state(1, 200_000)
        for step in range(1, 6):
            live["own"]["value"] = step
            manager.take(step, live)
        until(lambda: manager.where(5)["far"] == "whole")
        assert manager.take(6, live).report.written_bytes < 5000
        until(lambda: all(manager.where(step)["far"] == "whole" for step in range(1, 7)))
    for path in (tmp_path / "far").glob("step-*"):
        assert Snapshot(str(path)).verify(), path
    shutil.rmtree(hosts("a"))
    with manager_of(tmp_path / "far", hosts("b"), incremental=True) as manager:
        live = state(-1, 200_000)
        assert manager.restore_latest(live) == 6
        assert live["own"]["value"] == 5


def test_near_steps_are_not_compared_by_time(tmp_path, hosts, monkeypatch):
    """Hosts' clocks may differ by years: steps and attempts decide."""
    real = time.time
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        for step, years in ((10, 5), (20, 0), (30, -5)):
            monkeypatch.setattr(time, "time", lambda years=years: real() + years * 31e6)
            manager.take(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    shutil.rmtree(hosts("a"), ignore_errors=True)
    with manager_of(tmp_path / "far", hosts("b")) as manager:
        assert manager.restore_latest(state(-1)) == 30
    assert Path(tmp_path / "far/step-30").exists()


def test_far_root_that_was_copied_is_another_run(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
    shutil.copytree(tmp_path / "far", tmp_path / "fork")
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 10
        manager.take(30, state(30))
    with manager_of(tmp_path / "fork", hosts("a")) as fork:
        assert fork.restore_latest(state(-1)) == 10
        fork.take(11, state(11))
    assert {path.name for path in (tmp_path / "fork").glob("step-*")} == {"step-10", "step-11"}
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 30


def test_far_root_spelled_differently_is_the_same_run(tmp_path, hosts):
    """It counted as a copy, so a new run began, and the near steps of the old one were ignored."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=None, grace=0, keep_near=None) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        manager.take(20, state(20))
        stop_uploaders(hosts("a"))
    stop_uploaders(hosts("a"))
    with manager_of(f"file://{tmp_path}//far/", hosts("a"), upload=None, grace=0) as manager:
        assert manager.restore_latest(state(-1)) == 20


def test_near_job_that_was_replaced_can_restore_and_continue(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=None) as one:
        one.take(10, state(10))
        until(lambda: one.where(10)["far"] == "whole")
        with manager_of(tmp_path / "far", hosts("a")) as other:
            assert other.restore_latest(state(-1)) == 10

        def is_told():
            with contextlib.suppress(SnapshotExistsError):
                try:
                    one.take(20, state(20), overwrite=True)
                except SnapshotError:
                    return True
            return False

        until(is_told)
        assert one.restore_latest(state(-1)) == 10
        for step in (70, 80):
            one.take(step, state(step))
        until(lambda: one.where(80)["far"] == "whole")
        assert one.where(70)["near"] == "whole"


def test_upload_to_a_slow_bucket_completes_some_steps(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=1, rate=4e6, keep_near=KeepLatest(1)) as manager:
        for step in range(30):
            manager.take(step, state(step, 250_000))  # 2 MB each: as quick as 60 MB/s
        until(lambda: len(list((tmp_path / "far").glob("step-*/.snapshot_metadata"))) >= 3)
    whole = [path.parent for path in (tmp_path / "far").glob("step-*/.snapshot_metadata")]
    assert "step-29" in {path.name for path in whole}
    assert all(Snapshot(str(path)).verify() for path in whole)


def test_upload_of_all_steps_that_are_waited_for(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=None, rate=1e6, keep_near=None) as manager:
        pending = [manager.async_take(step, state(step)) for step in range(12)]
        with contextlib.ExitStack() as stack:
            threads = [
                stack.enter_context(_Joined(lambda each=each: each.wait("far", timeout=300))) for each in pending
            ]
        assert [each.error for each in threads] == [None] * 12
    assert len(list((tmp_path / "far").glob("step-*/.snapshot_metadata"))) == 12


class _Joined(threading.Thread):
    """A thread that is waited for, and keeps its error."""

    def __init__(self, work):
        super().__init__()
        self.work, self.error = work, None

    def run(self):
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - it is looked at
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.join()


def test_upload_after_a_run_goes_back_to_an_earlier_step(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload="latest", keep_near=KeepLatest(2)) as manager:
        manager.take(100, state(100))
        until(lambda: manager.where(100)["far"] == "whole")
        for step in (60, 70, 80):
            manager.take(step, state(step))
    assert (tmp_path / "far/step-80/.snapshot_metadata").exists()


def test_near_step_removed_from_the_far_root_is_not_restored(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=1, keep_near=None) as manager:
        for step in (20, 30):
            manager.take(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    Snapshot(str(tmp_path / "far/step-30")).delete()
    with manager_of(tmp_path / "far", hosts("a"), upload=1) as manager:
        assert manager.restore_latest(state(-1)) == 20
        manager.take(25, state(25))
        until(lambda: manager.where(25)["far"] == "whole")
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-20", "step-25"}


def test_take_after_should_stop_waits_for_the_far_root(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=None) as manager:
        manager.async_take(10, state(10))
        manager._stopping = True  # as after SIGTERM
        manager.take(10, state(10))
        assert (tmp_path / "far/step-10/.snapshot_metadata").exists()


def test_near_root_that_is_full_can_be_restored_from(tmp_path):
    near = tmp_path / "small"
    near.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", near], check=False).returncode:
        pytest.skip("mounts need root")
    try:
        with manager_of(tmp_path / "far", near / "run", upload=10, grace=0) as manager:
            manager.take(5, state(5))
            until(lambda: manager.where(5)["near"] == "whole")
            stop_uploaders(near / "run")
            shutil.rmtree(tmp_path / "far/step-5", ignore_errors=True)
        stop_uploaders(near / "run")
        shutil.rmtree(tmp_path / "far/step-5", ignore_errors=True)
        with contextlib.suppress(OSError), open(near / "ballast", "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        with manager_of(tmp_path / "far", near / "run") as manager:
            live = state(-1)
            assert manager.restore_latest(live) == 5
            assert holds(live, 5)
            until(lambda: manager.where(5)["far"] == "whole" if manager._steps.flush() is None else False)
        stop_uploaders(near / "run")
    finally:
        subprocess.run(["umount", "-l", near], check=True)


def test_close_does_not_wait_for_steps_older_than_the_restored_one(tmp_path, hosts, monkeypatch):
    """Some of their files may have been lost with another host, so that they never become whole."""
    far = tmp_path / "far"
    with manager_of(far, hosts("a"), upload=None, grace=0) as manager:
        manager.take(10, state(10))
    with manager_of(far, hosts("b"), upload=1) as manager:
        manager.take(20, state(20))
    waited = []
    monkeypatch.setattr(TierSet, "wait_far", lambda self, step, *_: waited.append(step))
    with manager_of(far, hosts("a"), upload=None) as manager:
        assert manager.restore_latest(state(-1)) == 20
    assert not waited
    with manager_of(far, hosts("a"), upload=None) as manager:
        assert manager.restore_latest(state(-1)) == 20
        manager.take(30, state(30))
    assert waited == [30]
