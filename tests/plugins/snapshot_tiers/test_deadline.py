"""What a job with near folders saves before it is killed."""

import os
import signal
import threading
import time

import pytest
import torch

from snapshot import Snapshot
from snapshot.manager.preemption import Deadline
from tests.plugins.snapshot_tiers.jobs import manager_of

pytestmark = pytest.mark.slow  # each test starts an uploader
TAKE, UPLOAD = 10.0, 20.0


def training():
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("seconds", "survives", "saved"),
    [
        (TAKE + UPLOAD + 1, False, "whole"),
        (TAKE + UPLOAD + 0.99, True, "near"),
        (TAKE + 1, True, "near"),
        (TAKE + UPLOAD + 0.99, False, "parameters"),  # a near copy would be lost with the host
        ((TAKE + UPLOAD) / 3 + 0.99, False, "none"),
        (TAKE + 0.99, True, "none"),
    ],
)
def test_near_take_saves_what_fits_before_the_deadline(seconds, survives, saved, tmp_path, hosts, monkeypatch):
    monkeypatch.setattr(Deadline, "left", lambda self, signalled: seconds)
    state = training()
    near = hosts("a")
    manager = manager_of(tmp_path / "far", near, survives=survives, signals=(signal.SIGTERM,))
    with manager:
        manager.take(10, state)
        manager._measured.slowest = lambda: TAKE
        manager._steps.upload_seconds = lambda patience: UPLOAD
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
        assert manager.take(20, state).report.saved == saved
        if saved in ("whole", "parameters"):  # the take has waited for the upload
            assert manager.where(20)["far"] == "whole"
        assert manager.where(20)["near"] == ("absent" if saved == "none" else "whole")
        manager._steps.until = time.monotonic()  # there is no time left at the end
    if saved == "parameters":
        kept = Snapshot(tmp_path / "far" / "step-20").get_manifest()
        assert "0/model/weight" in kept
        assert not [path for path in kept if "exp_avg" in path]
    with manager_of(tmp_path / "far", near) as later:
        assert later.restore_latest(state) == (20 if saved in ("whole", "near") else 10)


def test_take_that_cannot_be_near_is_not_said_to_be(tmp_path, hosts, monkeypatch):
    monkeypatch.setattr(Deadline, "left", lambda self, signalled: TAKE + UPLOAD)
    state, near = training(), hosts("a")
    with manager_of(tmp_path / "far", near, survives=True, signals=(signal.SIGTERM,)) as manager:
        manager.take(10, state)
        manager._measured.slowest = lambda: TAKE
        manager._steps.upload_seconds = lambda patience: UPLOAD
        monkeypatch.setattr(type(manager._steps.joined), "near_fault", lambda self: "it is full")
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
        assert manager.take(20, state).report.saved == "parameters"
        assert manager.where(20) == {"near": "absent", "replicas": 0, "far": "whole"}


def test_source_stops_the_job_before_an_upload_cannot_end_any_more(tmp_path, hosts):
    end = time.time() + 10 * UPLOAD
    with manager_of(tmp_path / "far", hosts("a"), deadline=lambda: end) as manager:
        manager.take(10, training())
        manager._steps.upload_seconds = lambda patience: 6 * UPLOAD
        assert manager.should_stop()


def test_last_save_waits_for_no_uploader_that_hangs(tmp_path, hosts):
    state, near = training(), hosts("a")
    with manager_of(tmp_path / "far", near, survives=True, signals=(signal.SIGTERM,), deadline="30s") as manager:
        manager.take(10, state)
        manager._steps.flush()
        steps = manager._steps
        known = steps.upload_seconds()
        assert known > 0
        answered = threading.Event()
        steps._ask_upload_seconds = lambda tiers: answered.wait()
        assert steps.upload_seconds(0.01) == known
        answered.set()


def test_step_whose_upload_does_not_end_in_time_is_not_said_to_be_whole(tmp_path, hosts, monkeypatch, caplog):
    monkeypatch.setattr(Deadline, "left", lambda self, signalled: 30.0)
    state = training()
    with manager_of(tmp_path / "far", hosts("a"), signals=(signal.SIGTERM,)) as manager:
        manager.take(10, state)
        tiers = manager._steps.joined
        monkeypatch.setattr(tiers, "wait_far", lambda *given: (_ for _ in ()).throw(TimeoutError("step-20: not far")))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
        assert manager.take(20, state).report.saved == "near"
    assert "it is not in the root yet; the last good step is 20" in caplog.text
