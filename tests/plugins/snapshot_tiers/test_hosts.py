"""Several hosts: each rank has a near folder of its own, and an uploader that keeps replicas for another."""

import shutil

import torch

from snapshot import Snapshot
from tests.plugins.snapshot_tiers.host_steps import restore, take_steps
from tests.plugins.snapshot_tiers.jobs import ELEMENTS, data_files, runs_in, stop_uploaders


def test_near_hosts_have_their_files_and_uploads_form_one_snapshot(two, tmp_path, hosts):
    found = two.run(take_steps, tmp_path / "far", hosts("a").parent, [10, 20], timeout=300)
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


def test_replica_on_a_partner_and_then_the_far_root_restore_a_lost_host(two, tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a").parent
    hosts("b"), hosts("c"), hosts("d")
    assert two.run(_replicated, far, near, timeout=300) == [{"near": "whole", "replicas": 1, "far": "whole"}] * 2
    assert len(data_files(hosts("a"), 20)) == len(data_files(hosts("b"), 20))
    stop_uploaders(hosts("a"), hosts("b"))
    for path in (far / "step-20/data").iterdir():  # near copies suffice
        path.unlink()
    shutil.rmtree(hosts("a"))
    found = two.run(_restored_on, far, near, "cb", timeout=300)
    assert [each[:3] for each in found] == [(20, True, 20)] * 2
    assert found[0][3]["peer"] > 0
    assert found[0][3]["near"] == found[0][3]["far"] == found[1][3]["peer"] == 0
