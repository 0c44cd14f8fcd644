"""A job on one host with a near folder: where steps are, what a restore reads, and what stays."""

import asyncio
import os
import shutil
import threading

import pytest
import torch

from snapshot import (
    KeepLatest,
    KeepWithin,
    RestoreOptions,
    Snapshot,
    SnapshotExistsError,
    SnapshotManager,
    TakeOptions,
    Tolerate,
)
from snapshot.errors import SnapshotError, StorageError
from snapshot.manager.policies import Policy
from snapshot.storages.file.file_storage import FileStorage
from snapshot_tiers import Near
from snapshot_tiers.control import ControlRequest
from tests.helpers.weight_folders import Adapted
from tests.plugins.snapshot_tiers.jobs import (
    data_files,
    flip_keeping_time,
    holds,
    manager_of,
    runs_in,
    state,
    stop_uploaders,
    until,
    upload_all,
)

pytestmark = pytest.mark.slow  # each test starts an uploader


def names(told):
    return [each.name for each in told]


def test_near_take_is_committed_near_and_then_far(tmp_path, hosts):
    live = state(10)
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        pending = manager.async_take(10, live)
        assert pending.wait().read_object("0/same/tensor").sum() == 10 * 4000
        near = manager.where(10)
        assert (near["near"], near["replicas"]) == ("whole", 0)
        pending.wait("far", timeout=300)
        assert manager.where(10)["far"] == "whole"
        assert manager.steps() == [10]
        assert manager.where(20) == {"near": "absent", "replicas": 0, "far": "absent"}
    uploaded = Snapshot(str(tmp_path / "far/step-10"))
    assert uploaded.verify()
    live = state(-1)
    uploaded.restore(live)
    assert holds(live, 10)
    with SnapshotManager(str(tmp_path / "far"), signals=()) as plain:  # an uploaded step is an ordinary snapshot
        live = state(-1)
        assert plain.restore_latest(live) == 10
        assert holds(live, 10)


def test_near_restore_reads_the_near_copy(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds(live, 10)
        assert manager.report.sources["near"] > 0
        assert manager.report.sources["far"] == 0


def test_far_root_is_read_by_a_new_host(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
    with manager_of(tmp_path / "far", hosts("b")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds(live, 10)
        assert manager.report.sources["near"] == 0
        assert manager.report.sources["far"] > 0


def test_keep_near_removes_steps_when_newer_ones_exist(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=KeepLatest(2), upload=20, keep=KeepLatest(2)) as manager:
        for step in range(10, 90, 10):
            manager.take(step, state(step))
            if step % 20 == 0:
                until(lambda step=step: manager.where(step)["far"] == "whole")
    near = {path.name for path in runs_in(hosts("a"))[0].glob("step-*")}
    far = {path.name for path in (tmp_path / "far").glob("step-*")}
    assert near == {"step-70", "step-80"}
    assert far == {"step-60", "step-80"}


def held(folder):
    """The bytes of all files of steps in a folder."""
    return sum(path.stat().st_size for path in folder.glob("step-*/**/*") if path.is_file())


def test_keep_near_within_a_limit_keeps_what_fits_in_the_folder(tmp_path, hosts, caplog):
    one = 2 * 4 * 50_000
    limit = int(3.5 * one)
    options = {"keep_near": KeepWithin(limit, 5), "keep": KeepWithin(int(2.5 * one)), "upload": 1}
    with manager_of(tmp_path / "far", hosts("a"), **options) as manager:
        for step in range(10, 90, 10):
            manager.take(step, state(step, 50_000))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    [near] = runs_in(hosts("a"))
    assert {path.name for path in near.glob("step-*")} == {"step-60", "step-70", "step-80"}
    assert held(near) <= limit
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-70", "step-80"}
    with manager_of(tmp_path / "far", hosts("a"), keep_near=KeepWithin(one // 2), upload=1) as manager:
        for step in (90, 100, 110):
            manager.take(step, state(step, 50_000))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    assert {path.name for path in near.glob("step-*")} == {"step-110"}
    assert (
        len([each for each in caplog.records if str(near) in each.getMessage() and "limit" in each.getMessage()]) == 1
    )


@pytest.mark.parametrize("keep", [None, KeepLatest(1)])
def test_lifetime_of_a_near_take_ends_near_and_far(tmp_path, hosts, keep):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=keep, keep=keep, upload=1) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.take(step, state(step), lifetime={20: 0.001, 30: "7d"}.get(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    left = {"step-30", "step-50"} if keep else {"step-10", "step-30", "step-40", "step-50"}
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == left
    near = left - {"step-30"} if keep else left  # it does not fill a near folder
    assert {path.name for path in runs_in(hosts("a"))[0].glob("step-*")} == near


class KeepIf(Policy):
    """Keep what a function of the step says."""

    def __init__(self, says):
        self.says = says

    def keep(self, taken, now):
        return {each.step for each in taken if self.says(each.step)}


@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_keep_near_and_far_of_an_application_read_the_snapshots(tmp_path, hosts, caplog, verb):
    def read_near(step):
        return manager.snapshot(step).read_object("0/own/value") % 20 == 0

    def read_far(step):
        return Snapshot(str(tmp_path / f"far/step-{step}")).read_object("0/own/value") % 40 == 0

    options = {"keep": KeepIf(read_far), "keep_near": KeepIf(read_near), "upload": 1}
    with manager_of(tmp_path / "far", hosts("a"), **options) as manager:
        for step in range(10, 80, 10):
            getattr(manager, verb)(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    near = {path.name for path in runs_in(hosts("a"))[0].glob("step-*")}
    far = {path.name for path in (tmp_path / "far").glob("step-*")}
    assert near == {"step-20", "step-40", "step-60", "step-70"}
    assert far == {"step-40", "step-70"}
    assert "KeepIf" not in caplog.text


@pytest.mark.parametrize("full", [False, True])
def test_keep_near_that_fails_removes_nothing_and_fails_no_take(tmp_path, hosts, caplog, monkeypatch, full):
    def refuse(step):
        raise LookupError(f"no score for {step}")

    with manager_of(tmp_path / "far", hosts("a"), keep_near=KeepIf(refuse), upload=1) as manager:
        manager.take(10, state(10))
        if full:
            monkeypatch.setattr(type(manager._steps.joined), "free_bytes", lambda self: 0)
        manager.take(20, state(20))
        monkeypatch.undo()
        manager.take(30, state(30))
    near = {path.name for path in runs_in(hosts("a"))[0].glob("step-*")}
    assert near >= {"step-10", "step-30"}
    assert ("step-20" in near) == (not full)
    assert "KeepIf.keep failed: LookupError: no score for 10" in caplog.text
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        assert manager.steps() == [10, 20, 30]


def test_upload_none_uploads_only_what_is_waited_for(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=None, keep_near=None) as manager:
        for step in (10, 20, 30, 40):
            pending = manager.async_take(step, state(step))
            if step == 20:
                pending.wait("far", timeout=300)
        pending.wait()
        assert manager.where(10)["far"] == "kept near"
        assert manager.where(20)["far"] == "whole"
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {
        "step-20",
        "step-40",
    }  # the exit saves the last


def test_near_file_that_is_damaged_is_read_from_far_and_healed(tmp_path, hosts, told):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=None) as manager:
        manager.take(10, state(10))
    damaged = next(path for path in data_files(hosts("a"), 10) if path.suffix == ".safetensors")
    good = damaged.read_bytes()
    flip_keeping_time(damaged)
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds(live, 10)
        assert manager.report.sources["far"] > 0
        assert [each.path for each in told if each.name == "rerouted"] == [f"data/{damaged.name}"]
        assert [each.path for each in told if each.name == "healed"] == [str(damaged)]
        assert damaged.read_bytes() == good


@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
def test_near_step_incomplete_on_all_roots_is_not_restored(tmp_path, hosts, fault):
    with manager_of(tmp_path / "far", hosts("a"), keep_near=None, upload=1) as manager:
        for step in (10, 20):
            manager.take(step, state(step)), until(lambda step=step: manager.where(step)["far"] == "whole")
    for path in (*data_files(hosts("a"), 20), *(tmp_path / "far/step-20/data").iterdir()):
        if fault == "flip":
            flip_keeping_time(path)
        elif fault == "cut":
            path.chmod(0o644), os.truncate(path, 8)
        else:
            path.unlink()
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds(live, 10)
        manager.take(20, state(20))  # the damaged one is replaced, on both tiers
    assert Snapshot(str(tmp_path / "far/step-20")).verify()
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        live = state(-1)
        assert (manager.restore_latest(live), holds(live, 20)) == (20, True)


def test_near_damage_is_not_uploaded(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=None, grace=0) as manager:
        pending = manager.async_take(10, state(10))
        pending.wait()
        for path in data_files(hosts("a"), 10):
            flip_keeping_time(path)
        with pytest.raises(SnapshotError, match="damaged"):
            pending.wait("far", timeout=300)
        assert manager.where(10)["far"] == "damaged"
    assert not (tmp_path / "far/step-10/.snapshot_metadata").exists()


def test_near_take_of_a_step_that_exists_far_needs_overwrite(tmp_path, hosts):
    with SnapshotManager(str(tmp_path / "far"), signals=()) as plain:
        plain.take(10, state(1))
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        with pytest.raises(SnapshotExistsError):
            manager.take(10, state(2))
        manager.take(20, state(20))
        with pytest.raises(SnapshotExistsError):
            manager.take(20, state(21))
        manager.take(20, state(22), overwrite=True)
        manager.take(10, state(12), overwrite=True)
        until(lambda: manager.where(20)["far"] == "whole")
    live = state(-1)
    Snapshot(str(tmp_path / "far/step-20")).restore(live)
    assert holds(live, 22)


def test_near_run_of_another_far_root_is_ignored(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(50, state(50))
    shutil.rmtree(tmp_path / "far")  # the user begins the run again
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) is None
        manager.take(10, state(10))
        assert manager.steps() == [10]
    assert len(runs_in(hosts("a"))) == 2


def test_uploader_is_shared_by_two_jobs(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as one, manager_of(tmp_path / "far", hosts("a")) as other:
        one.take(10, state(10))
        other.take(20, state(20))
        pids = {each._steps.joined.ask(ControlRequest("status")).pid for each in (one, other)}
        assert len(pids) == 1
        with pytest.raises(SnapshotExistsError):
            other.take(10, state(11))
    assert Snapshot(str(tmp_path / "far/step-20")).verify()


def test_upload_never_publishes_an_older_attempt(tmp_path, hosts):
    """A host that returns has a step that the run has left behind: neither its uploader nor a restore uses it."""
    with manager_of(tmp_path / "far", hosts("a"), upload=None, grace=0, keep_near=None) as manager:
        for step in (100, 120):
            manager.async_take(step, state(step)).wait()
        manager.async_take(110, state(110)).wait("far", timeout=300)
    stop_uploaders(hosts("a"))
    shutil.copytree(hosts("a"), hosts("old"), ignore=shutil.ignore_patterns(".uploader*"))
    shutil.rmtree(runs_in(hosts("a"))[0] / "step-120")
    shutil.rmtree(tmp_path / "far/step-120", ignore_errors=True)  # the end of the job may have uploaded it
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        assert manager.restore_latest(state(-1)) == 110
        manager.take(115, state(115))
        until(lambda: manager.where(115)["far"] == "whole")
    [folder] = list(hosts("old").iterdir())
    states = upload_all(hosts("old"), tmp_path / "far")
    assert not (tmp_path / "far/step-120").exists(), states
    assert not (folder / "step-120").exists()
    with SnapshotManager(str(tmp_path / "far"), signals=()) as plain:
        assert plain.steps()[-1] == 115


def test_near_restore_skips_abandoned_steps(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=1, keep_near=None) as manager:
        for step in (100, 120):
            manager.take(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
    shutil.rmtree(hosts("a"))
    for path in (tmp_path / "far/step-120/data").iterdir():
        shutil.move(path, tmp_path / path.name)
    with manager_of(tmp_path / "far", hosts("b")) as manager:  # 120 cannot be read now
        assert manager.restore_latest(state(-1)) == 100
    for path in tmp_path.glob("*-*.*"):
        shutil.move(path, tmp_path / "far/step-120/data" / path.name)
    with manager_of(tmp_path / "far", hosts("c")) as manager:  # and is there again, but the run went on from 100
        assert manager.restore_latest(state(-1)) == 100
        manager.take(120, state(121))
        until(lambda: manager.where(120)["far"] == "whole")
    live = state(-1)
    Snapshot(str(tmp_path / "far/step-120")).restore(live)
    assert holds(live, 121)


def test_upload_does_not_restore_removed_steps(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload=1, keep_near=None, keep=KeepLatest(1)) as manager:
        manager.take(10, state(10))
        until(lambda: manager.where(10)["far"] == "whole")
        stop_uploaders(hosts("a"))
        shutil.copytree(hosts("a"), hosts("old"), ignore=shutil.ignore_patterns(".uploader*"))
        manager.take(20, state(20))
        until(lambda: manager.where(20)["far"] == "whole")
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-20"}
    states = upload_all(hosts("old"), tmp_path / "far")
    assert states == {10: "outdated"}
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-20"}


def test_pin_holds_near_and_far(tmp_path, hosts):
    options = {"keep": KeepLatest(1), "keep_near": KeepLatest(1), "upload": 1}
    with manager_of(tmp_path / "far", hosts("a"), **options) as manager:
        manager.take(10, state(10))
        manager.pin(10)
        for step in (20, 30):
            manager.take(step, state(step))
            until(lambda step=step: manager.where(step)["far"] == "whole")
        assert manager.pinned() == [10]
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-10", "step-30"}
    assert {path.name for path in runs_in(hosts("a"))[0].glob("step-*")} == {"step-10", "step-30"}
    with manager_of(tmp_path / "far", hosts("a")) as manager, pytest.raises(SnapshotError):
        manager.pin(40)


def test_keep_near_keeps_the_base_of_a_pinned_step(tmp_path, hosts):
    layers = {"frozen": torch.nn.Linear(9, 9).requires_grad_(False), "trained": torch.nn.Linear(2, 2)}
    app = {"model": torch.nn.ModuleDict(layers)}
    with manager_of(tmp_path / "far", hosts("a"), keep_near=1, upload=1) as manager:
        for step in (10, 20, 30, 40):
            base = f"near://{runs_in(hosts('a'))[0]}/step-10" if step == 20 else None
            manager.take(step, app, options=TakeOptions(base=base, only="trainable" if base else None))
            until(lambda step=step: manager.where(step)["far"] == "whole")
            if step == 20:
                manager.pin(20)
    [run] = runs_in(hosts("a"))
    assert {path.name for path in run.glob("step-*")} == {"step-10", "step-20", "step-40"}


@pytest.mark.parametrize("rolling", [False, True], ids=["folder", "rolling"])
def test_near_takes_leave_frozen_parameters_to_a_folder_of_weights(tmp_path, hosts, rolling):
    run = Adapted(tmp_path / "weights", files=2)
    base = tmp_path / "weights"
    with manager_of(tmp_path / "far", hosts("a"), keep=KeepLatest(2), keep_near=1, upload=1) as manager:
        for step in (10, 20, 30):
            run.step()
            made = manager.take(step, run.state, options=TakeOptions(base=base, only="trainable"))
            assert made.report.omitted_bytes == run.frozen_bytes
            values = run.values()
            until(lambda step=step: manager.where(step)["far"] == "whole")
            base = f"near://{runs_in(hosts('a'))[0]}/step-{step}" if rolling else base
        run.step()
        assert manager.restore_latest(run.state) == 30
        assert run.has(values)
    assert {path.name for path in (tmp_path / "far").glob("step-*")} == {"step-20", "step-30"}
    with manager_of(tmp_path / "far", hosts("b")) as manager:
        run.spoil()
        with pytest.raises(SnapshotError, match="had not changed from its base"):
            manager.restore_latest(run.state)
        assert run.is_spoilt()
        (tmp_path / "weights").rename(tmp_path / "moved")
        assert manager.restore_latest(run.state, options=RestoreOptions(base=tmp_path / "moved")) == 30
        assert run.has(values)
    assert Snapshot(tmp_path / "far/step-30").verify()


def test_keep_near_keeps_the_base_of_a_take_that_runs(tmp_path, hosts, monkeypatch):
    layers = {"frozen": torch.nn.Linear(9, 9).requires_grad_(False), "trained": torch.nn.Linear(2, 2)}
    app = {"model": torch.nn.ModuleDict(layers)}
    reached, go_on = threading.Event(), threading.Event()
    create = FileStorage.create

    async def stall(self, path, size):
        if "step-30" in str(self.url):
            reached.set()
            await asyncio.to_thread(go_on.wait, 300)
        return await create(self, path, size)

    monkeypatch.setattr(FileStorage, "create", stall)
    with manager_of(tmp_path / "far", hosts("a"), keep_near=1, upload=1) as manager:
        manager.take(10, app)
        [run] = runs_in(hosts("a"))
        until(lambda: manager.where(10)["far"] == "whole")
        pending = manager.async_take(30, app, options=TakeOptions(base=f"near://{run}/step-10", only="trainable"))
        assert reached.wait(300)
        manager.take(20, app)
        until(lambda: manager.where(20)["far"] == "whole")
        manager._steps.near_cleaner.close()  # its removals are done
        go_on.set()
        pending.wait()
    assert {path.name for path in run.glob("step-*")} >= {"step-10", "step-30"}


def test_on_exception_saves_and_flushes(tmp_path, hosts):
    manager = manager_of(tmp_path / "far", hosts("a"), on_exception=lambda error: (30, state(30)), upload=None)

    def train():
        with manager:
            manager.take(10, state(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    live = state(-1)
    Snapshot(str(tmp_path / "far/step-30")).restore(live)
    assert holds(live, 30)


NEAR = ("upload", "replicas", "rate", "grace", "compression")


@pytest.mark.parametrize("on_error", [Tolerate(3), "warn"], ids=["Tolerate", "warn"])
def test_on_error_tolerate_survives_a_number_of_failed_takes(tmp_path, told, on_error):
    (tmp_path / "blocked").write_text("a file")
    live = state(1)
    with SnapshotManager(str(tmp_path / "blocked/far"), on_error=on_error, signals=()) as manager:
        assert manager.take(1, live).path.endswith("step-1")
        with pytest.raises(StorageError):
            manager.async_take(2, live).wait()
        assert names(told).count("tolerated") == 2
        with pytest.raises(SnapshotError):
            manager.take(3, live)
        with pytest.raises(SnapshotError, match="the last 3 takes failed"):
            manager.take(4, live)
        with pytest.raises(TypeError):
            manager.take("five", live)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("near", ""),
        ("near", "s3://bucket"),
        ("upload", "always"),
        ("upload", 0),
        ("replicas", -1),
        ("rate", 0),
        ("grace", -1),
        ("compression", "lz4"),
        ("on_error", "ignore"),
    ],
)
def test_near_and_on_error_refuse_invalid_arguments(tmp_path, option, value):
    given = {"near": str(tmp_path / "near")}
    with pytest.raises(ValueError, match=option):  # noqa: PT012 - the value or the manager refuses it
        if option not in ("near", "on_error"):
            given["near"] = Near(given["near"], **{option: value})
        SnapshotManager(str(tmp_path / "far"), signals=(), **(given | ({} if option in NEAR else {option: value})))


def test_tolerate_failures_must_be_a_number():
    for failures in (0, True, "3"):
        with pytest.raises(ValueError, match="failures must be"):
            Tolerate(failures)


def test_near_root_must_not_be_the_far_root(tmp_path):
    with pytest.raises(ValueError, match="another folder"):
        SnapshotManager(str(tmp_path), near=str(tmp_path), signals=())
    with pytest.raises(ValueError, match="memory"):
        SnapshotManager("memory://x", near=str(tmp_path), signals=())
    with pytest.raises(TypeError, match="JSON"):
        SnapshotManager("s3://b/x", near=str(tmp_path), storage_options={"a": object()}, signals=())


def test_near_manager_used_after_close_informs_the_uploader(tmp_path, hosts):
    """As in an exit handler, before which the library has closed all managers."""
    far = tmp_path / "far"
    manager = manager_of(far, hosts("a"), upload=None, grace=20)
    manager.take(10, state(10))
    manager.close()
    manager.take(20, state(20))
    manager.close()
    assert Snapshot(far / "step-20").exists()
