"""Suspect steps in near folders: they replace no good step that waits, and stay until a later take."""

import math

import pytest
import torch
from torch import nn

from snapshot import KeepLatest, Snapshot, StateDict, TakeOptions
from snapshot_tiers.uploader import MOST_QUEUED
from tests.plugins.snapshot_tiers.jobs import manager_of, runs_in, stop_uploaders, until
from tests.plugins.snapshot_tiers.timeline_steps import down

SUSPECT = TakeOptions(guards="suspect")


def training():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, {"m": model, "o": optimizer, "p": StateDict(step=0)}


def spoil(model):
    with torch.no_grad():
        model.weight.fill_(math.nan)


@pytest.mark.slow
def test_upload_of_the_last_good_step_if_only_suspect_ones_are_newer(tmp_path, hosts):
    far = tmp_path / "far"
    model, app = training()
    with manager_of(far, hosts("a"), upload="latest", keep_near=KeepLatest(1)) as manager:
        for step in range(1, 7):
            if step == 3:
                spoil(model)
            manager.take(step, app, options=SUSPECT)
        assert manager.last_good() == 2
        until(lambda: Snapshot(far / "step-2").exists())
    stop_uploaders(hosts("a"))
    with manager_of(far, hosts("b")) as manager:
        assert manager.restore_latest(training()[1]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("upload", [None, 1000, "latest"])
def test_close_waits_for_the_newest_good_and_the_newest_step(tmp_path, hosts, upload):
    far = tmp_path / "far"
    model, app = training()
    with manager_of(far, hosts("a"), upload=upload, keep_near=None) as manager:
        for step in range(1, 5):
            if step == 3:
                spoil(model)
            manager.take(step, app, options=SUSPECT)
    assert Snapshot(far / "step-2").exists()
    assert Snapshot(far / "step-4").exists()
    assert upload == "latest" or not Snapshot(far / "step-3").exists()
    stop_uploaders(hosts("a"))
    with manager_of(far, hosts("b")) as manager:
        assert manager.restore_latest(training()[1]) == 2


@pytest.mark.slow
def test_upload_queue_of_suspect_steps_does_not_drop_the_good_one(tmp_path, hosts):
    far = tmp_path / "far"
    model, app = training()
    with manager_of(far, hosts("a"), upload=1, keep_near=None, grace=0) as manager:
        manager.take(1, app, options=SUSPECT)
        until(lambda: manager.where(1)["far"] == "whole")
        up = down(far)
        manager.take(2, app, options=SUSPECT)
        spoil(model)
        for step in range(3, 6 + MOST_QUEUED):
            manager.take(step, app, options=SUSPECT)
        assert manager.where(3)["far"] == "dropped"
        assert manager.where(2)["far"] in ("queued", "uploading")
        up()
        manager._steps.joined.link.register()
        until(lambda: manager.where(2)["far"] == "whole")


@pytest.mark.slow
def test_keep_near_keeps_a_suspect_step_until_a_later_take(tmp_path, hosts):
    far = tmp_path / "far"
    model, app = training()
    with manager_of(far, hosts("a"), upload=1, keep_near=None) as manager:
        manager.take(1, app, options=SUSPECT)
        manager.take(2, app, options=SUSPECT)
        spoil(model)
        manager.take(3, app, options=SUSPECT)
        until(lambda: manager.where(2)["far"] == "whole")
    stop_uploaders(hosts("a"))
    model, app = training()
    with manager_of(far, hosts("a"), upload=1, keep_near=KeepLatest(2)) as manager:
        assert manager.restore_latest(app) == 2
        [folder] = runs_in(hosts("a"))
        assert math.isnan(Snapshot(folder / "step-3").read_object("0/m/weight").sum())
        manager.take(4, app, options=SUSPECT)
        until(lambda: not (folder / "step-3" / ".snapshot_metadata").exists())
        assert manager.steps()[-1] == 4


@pytest.mark.slow
def test_last_good_and_suspect_before_joining_read_near_steps(tmp_path, hosts):
    far = tmp_path / "far"
    model, app = training()
    with manager_of(far, hosts("a"), upload=None, keep_near=None) as manager:
        assert manager.steps() == []
        assert manager.last_good() is None
        for step in (1, 2, 3):
            if step == 3:
                spoil(model)
            manager.take(step, app)
        stop_uploaders(hosts("a"))
        other = manager_of(far, hosts("a"))  # as another process would
        assert other.steps() == [1, 2, 3]
        assert other.last_good() == 2
        assert "NaN" in other.suspect(3)[0]
        assert Snapshot(far / "step-2").exists() is False
        other.close()
