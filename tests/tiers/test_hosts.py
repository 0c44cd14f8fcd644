"""Several hosts: each rank has a near folder of its own, and an uploader that keeps replicas for another."""

import shutil

import torch
import torch.distributed as dist

from snapshot import Snapshot, TakeOptions
from snapshot import events as happening
from tests.tiers.jobs import (
    ELEMENTS,
    data_files,
    holds,
    manager_of,
    rank,
    runs_in,
    state,
    stop_uploaders,
    until,
)


def take_steps(root, near, steps, value=None, **options):
    """Take steps on the host of this rank, and return where the last one is, once it is everywhere."""
    manager = manager_of(root, f"{near}/{'abcd'[rank()]}", **options)
    with manager:
        for step in steps:
            pending = manager.async_take(
                step, state(step if value is None else value), options=TakeOptions(replicated=["same/**"])
            )
            pending.wait()
        if options.get("upload", "latest") is not None:
            pending.wait("far", timeout=40)
        wanted = options.get("replicas", 0)
        until(lambda: manager.where(steps[-1])["replicas"] >= wanted)
        found = manager.where(steps[-1])
        dist.barrier()
        return found


def restore(root, near, names, **options):
    """Restore on hosts of these names, and return the step, its value, and the sources of the bytes."""
    told = []
    happening.add_handler(told.append)
    live = state(-1)
    try:
        with manager_of(root, f"{near}/{names[rank()]}", **options) as manager:
            step = manager.restore_latest(live)
            sources = manager.report.sources if manager.report else None
            healed = [each.path for each in told if each.name == "rerouted"]
            dist.barrier()
            return step, step is not None and holds(live, live["own"]["value"]), live["own"]["value"], sources, healed
    finally:
        happening.remove_handler(told.append)


def test_each_host_has_its_files_and_the_same_manifest_and_uploads_become_one_snapshot(two, tmp_path, hosts):
    found = two.run(take_steps, tmp_path / "far", hosts("a").parent, [10, 20], timeout=60)
    hosts("b")
    assert found == [{"near": "whole", "replicas": 0, "far": "whole"}] * 2
    names = [{path.name for path in data_files(hosts(name), 20)} for name in "ab"]
    assert all(names)
    assert not names[0] & names[1]
    manifests = [(runs_in(hosts(name))[0] / "step-20/.snapshot_metadata").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]
    uploaded = Snapshot(str(tmp_path / "far/step-20"))
    assert uploaded.verify()
    assert (uploaded.read_object("1/own/tensor") == torch.full((ELEMENTS,), 201.0)).all()
    assert {path.name for path in (tmp_path / "far/step-20/data").iterdir()} == names[0] | names[1]


def _replicated(root, near, **options):
    return take_steps(root, near, [10, 20], replicas=1, **options)


def _restored_on(root, near, names):
    return restore(root, near, names, replicas=1)


def test_a_lost_host_is_restored_from_its_partner_and_then_the_far_root(two, tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a").parent
    hosts("b"), hosts("c"), hosts("d")
    assert two.run(_replicated, far, near, timeout=60) == [{"near": "whole", "replicas": 1, "far": "whole"}] * 2
    assert len(data_files(hosts("a"), 20)) == len(data_files(hosts("b"), 20))
    stop_uploaders(hosts("a"), hosts("b"))
    for path in (far / "step-20/data").iterdir():  # near copies suffice
        path.unlink()
    shutil.rmtree(hosts("a"))
    found = two.run(_restored_on, far, near, "cb", timeout=60)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[0][3]["peer"] > 0
    assert found[0][3]["near"] == found[0][3]["far"] == found[1][3]["peer"] == 0
