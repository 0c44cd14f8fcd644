"""Hosts that break: full, read-only or missing near folders, lost hosts, damaged replicas, other numbers of ranks."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from snapshot import Snapshot
from snapshot import events as happening
from snapshot.errors import SnapshotError
from tests.plugins.snapshot_tiers.host_steps import restore, take_steps
from tests.plugins.snapshot_tiers.jobs import (
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


@pytest.fixture
def small(tmp_path):
    """A folder with room for 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounts need root")
    yield folder
    stop_uploaders(folder / "near")
    subprocess.run(["umount", "-l", folder], check=True)


def degraded(told):
    return [each.fields["step"] for each in told if each.name == "degraded"]


def test_near_root_that_is_full_does_not_stop_the_run(tmp_path, small, told):
    live = state(1, 200_000)  # two tensors of 0.8 MB
    with manager_of(tmp_path / "far", small / "near", upload=None, grace=30) as manager:
        for step in (1, 2):
            manager.take(step, live)
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "ballast").write_bytes(bytes(max(0, free - 100_000)))
        for step in (3, 4):
            manager.take(step, live)
        assert degraded(told)
        (small / "ballast").unlink()
        shutil.rmtree(runs_in(small / "near")[0] / "step-1", ignore_errors=True)
        manager.take(5, live)
        assert manager.where(5)["near"] == "whole"
    live = state(-1, 200_000)
    with manager_of(tmp_path / "far", small / "near") as manager:
        assert manager.restore_latest(live) == 5
        assert holds(live, 1)
    far = [path.name for path in (tmp_path / "far").glob("step-*")]
    assert {f"step-{step}" for step in degraded(told)} <= set(far)
    assert all(Snapshot(str(tmp_path / "far" / name)).verify() for name in far)


def test_near_root_that_becomes_read_only_does_not_stop_the_run(tmp_path, small, told):
    with manager_of(tmp_path / "far", small / "near", grace=1) as manager:
        manager.take(1, state(1))
        until(lambda: manager.where(1)["far"] == "whole")
        run = runs_in(small / "near")[0]
        subprocess.run(["mount", "--bind", run, run], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
        try:
            manager.take(2, state(2))
            with contextlib.suppress(SnapshotError):
                manager.async_take(3, state(3)).wait()
            manager.async_take(4, state(4)).wait()
        finally:
            subprocess.run(["umount", "-l", run], check=True)
        assert set(degraded(told)) >= {2, 4}
        manager.take(5, state(5))
        assert manager.where(5)["near"] == "whole"
    for step in (2, 4, 5):
        live = state(-1)
        Snapshot(str(tmp_path / f"far/step-{step}")).restore(live)
        assert holds(live, step)


def test_near_root_that_cannot_be_created_is_replaced_by_the_far_root(tmp_path, told):
    (tmp_path / "file").write_text("not a folder")
    with manager_of(tmp_path / "far", tmp_path / "file/near") as manager:
        assert manager.restore_latest(state(-1)) is None
        manager.take(1, state(1))
        pending = manager.async_take(2, state(2))
        pending.wait("far")
        assert manager.steps() == [1, 2]
        assert manager.where(2)["far"] == "whole"
    assert degraded(told) == [1, 2]
    with manager_of(tmp_path / "far", tmp_path / "file/near") as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 2
        assert holds(live, 2)


def _one_broken(far, near):
    """Rank 1's host cannot make its near folder."""
    base = Path(near) / "ab"[rank()]
    if rank() == 1:
        base.parent.mkdir(parents=True, exist_ok=True)
        base.write_text("a file")
    dist.barrier()
    told = []
    happening.add_handler(told.append)
    try:
        with manager_of(far, base / "near") as manager:
            manager.take(1, state(1))
            dist.barrier()
        return degraded(told)
    finally:
        happening.remove_handler(told.append)


def test_near_root_broken_on_one_host_makes_all_hosts_use_the_far_root(two, tmp_path, hosts):
    near = tmp_path / "hosts"
    assert two.run(_one_broken, tmp_path / "far", near, timeout=300) == [[1], [1]]
    stop_uploaders(near / "a" / "near")
    assert Snapshot(str(tmp_path / "far/step-1")).verify()


def _replicated(far, near):
    return take_steps(far, near, [10, 20], replicas=1)


def _restored(far, near, names):
    return restore(far, near, names, replicas=1)


@pytest.fixture
def replicated(two, tmp_path, hosts):
    """A run of two hosts with steps 10 and 20 on both, and 20 in the far root."""
    for name in "abcd":
        hosts(name)
    two.run(_replicated, tmp_path / "far", hosts("a").parent, timeout=300)
    stop_uploaders(hosts("a"), hosts("b"))
    return two, tmp_path / "far", hosts("a").parent


def test_far_root_replaces_two_lost_hosts(replicated):
    two, far, near = replicated
    shutil.rmtree(near / "a"), shutil.rmtree(near / "b")
    found = two.run(_restored, far, near, "cd", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[0][3]["far"] > 0 == found[0][3]["near"]


def test_replica_heals_damage_on_one_host(replicated):
    two, far, near = replicated
    shutil.rmtree(far / "step-20/data")
    own = [path for path in data_files(near / "a", 20) if "-0-" in path.name and path.suffix == ".safetensors"]
    good = [path.read_bytes() for path in own]
    for path in own:
        flip_keeping_time(path)
    found = two.run(_restored, far, near, "ab", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[0][3]["peer"] > 0
    assert found[0][4]
    assert [path.read_bytes() for path in own] == good


def test_far_root_heals_damage_on_all_hosts(replicated):
    two, far, near = replicated
    for name in "ab":
        for path in data_files(near / name, 20):
            flip_keeping_time(path)
    found = two.run(_restored, far, near, "ab", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[0][3]["far"] > 0


def test_restore_latest_falls_back_if_near_replicas_and_far_are_damaged(replicated):
    two, far, near = replicated
    for path in (*data_files(near / "a", 20), *data_files(near / "b", 20), *(far / "step-20/data").iterdir()):
        flip_keeping_time(path)
    found = two.run(_restored, far, near, "ab", timeout=300)
    assert [each[:3] for each in found] == [(10, True, 10)] * 2


def test_near_files_of_several_hosts_together_form_a_complete_step(replicated):
    """Each host lost other files of the step, and the far root lost it all."""
    two, far, near = replicated
    shutil.rmtree(far / "step-20")
    for name, part in (("a", 0), ("b", 1)):
        for path in data_files(near / name, 20)[part::2]:
            path.unlink()
    os.unlink(runs_in(near / "a")[0] / "step-20/.snapshot_metadata")
    found = two.run(_restored, far, near, "ab", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2


def test_near_roots_of_hosts_in_another_order_restore_exactly(replicated):
    two, far, near = replicated
    found = two.run(_restored, far, near, "ba", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2


def _shared_only(far, near, names):
    live = {"same": state(-1)["same"]}
    with manager_of(far, f"{near}/{names[rank()]}", replicas=1) as manager:
        step = manager.restore_latest(live)
        dist.barrier() if dist.is_initialized() else None
        return step, float(live["same"]["tensor"].sum())


def test_near_and_far_roots_restore_on_other_numbers_of_ranks_and_hosts(replicated, three):
    _, far, near = replicated
    assert _shared_only(far, near, "a") == (20, 20 * 4000.0)
    stop_uploaders(near / "a")
    found = three.run(_shared_only, far, near, "abc", timeout=300)
    assert found == [(20, 20 * 4000.0)] * 3


def _die_in_the_middle(far, near):
    manager = manager_of(far, f"{near}/{'ab'[rank()]}", timeout=5)
    manager.take(1, state(1))
    if rank() == 1:
        os.kill(os.getpid(), 9)
    try:
        manager.take(2, state(2))
    except SnapshotError as error:
        return str(error)
    return ""


def test_near_take_with_a_dying_rank_leaves_the_step_before(fresh_pool, tmp_path, hosts, two):
    pool = fresh_pool(2)
    hosts("a"), hosts("b")
    pool.start(_die_in_the_middle, tmp_path / "far", tmp_path / "hosts")
    with contextlib.suppress(Exception):
        pool.finish(timeout=300)
    pool.close()
    found = two.run(_restored, tmp_path / "far", tmp_path / "hosts", "ab", timeout=300)
    assert [each[:3] for each in found] == [(1, True, 1)] * 2
    for name in "ab":
        assert {path.name for path in runs_in(hosts(name))[0].glob("step-*")} == {"step-1"}
