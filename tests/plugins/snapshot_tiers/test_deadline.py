"""What a job with near folders saves before it is killed."""

import os
import signal
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
        manager._steps.upload_seconds = lambda: UPLOAD
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
