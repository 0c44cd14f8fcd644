"""Jobs that register with one uploader: the latest attempt decides what is uploaded, in whatever order they come."""

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.runs.timeline import KEY, Attempt, Facts, Origin, Parent
from snapshot_tiers import uploader as uploader_module
from snapshot_tiers.control import ControlRequest, Host, Registration, UploadState
from snapshot_tiers.uploader import Act, Uploader

RUN = "c" * 12
FIRST = Attempt("a" * 12, RUN, 1)
SECOND = Attempt("b" * 12, RUN, 2, Parent(FIRST.name, 10))


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST), (SECOND, FIRST, SECOND, FIRST)])
def test_uploader_with_jobs_registered_in_any_order_uploads_the_latest_attempt(tmp_path, order):
    def take(step, attempt):
        origin = Origin(RUN, attempt.number, attempt.name, 1)._asdict()
        Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict(x=step)}, metadata={KEY: origin})

    take(10, FIRST)
    uploader = Uploader(str(tmp_path))
    accepted = []
    uploader.on_secret = accepted.append
    for attempt in order:
        facts = Facts(1, (FIRST,)) if attempt is FIRST else Facts(2, (FIRST, SECOND))
        upload = None if attempt is FIRST else "latest"
        hosts = [Host("host", "host", [0])]
        given = Registration(RUN, facts, attempt.name, str(tmp_path / "far"), {}, upload, 0, hosts, 0, attempt.name)
        uploader.handle(ControlRequest("register", given))
    take(20, SECOND)
    assert uploader.handle(ControlRequest("status")).steps[20].far == UploadState.QUEUED
    assert set(accepted) == {FIRST.name, SECOND.name}


def test_uploader_ends_if_files_of_a_lost_host_are_missing(tmp_path, monkeypatch):
    """The host that has them was lost, or has dropped the step: it would ask the far root without an end."""
    monkeypatch.setattr(uploader_module, "VAIN", -1.0)
    origin = Origin(RUN, FIRST.number, FIRST.name, 1)._asdict()
    Snapshot.take(tmp_path / "step-10", {"s": StateDict(x=torch.ones(10))}, metadata={KEY: origin})
    for path in (tmp_path / "step-10/data").iterdir():  # as if the other host had written them
        path.unlink()
    uploader = Uploader(str(tmp_path))
    hosts = [Host("a", "a", [0]), Host("b", "b", [1])]
    facts = Facts(0, (), (FIRST,))
    given = Registration(RUN, facts, FIRST.name, str(tmp_path / "far"), {}, "latest", 0, hosts, 0, "secret")
    uploader.handle(ControlRequest("register", given))
    assert not uploader.is_idle()
    for _ in range(4):
        uploader._free = 0.0
        uploader.upload_turn()
    assert uploader.status().steps[10].far == UploadState.WAITING
    assert uploader.is_idle()
    uploader.ends = uploader._free = 0.0
    assert uploader.upload_turn().act == Act.END
    uploader.handle(ControlRequest("register", given))  # the next trainer may bring them
    assert not uploader.is_idle()
    uploader.close()


def test_uploader_does_not_treat_a_step_of_two_hosts_as_damaged_for_a_job_on_one(tmp_path):
    """Its other files are on the other host, whose uploader sends them."""
    origin = Origin(RUN, FIRST.number, FIRST.name, 1)._asdict()
    Snapshot.take(tmp_path / "step-10", {"s": StateDict(x=torch.ones(10))}, metadata={KEY: origin})
    for path in (tmp_path / "step-10/data").iterdir():  # as if the other host had written them
        path.unlink()
    uploader = Uploader(str(tmp_path))
    hosts = [Host("a", "a", [0]), Host("b", "b", [1])]

    def register(attempt, facts, hosts):
        far, secret = str(tmp_path / "far"), f"of {attempt.name}"
        given = Registration(RUN, facts, attempt.name, far, {}, "latest", 0, hosts, 0, secret)
        uploader.handle(ControlRequest("register", given))

    def states_after_turns():
        for _ in range(4):
            uploader._free = 0.0
            uploader.upload_turn()
        return uploader.status().steps[10].far

    register(FIRST, Facts(0, (), (FIRST,)), hosts)
    assert states_after_turns() == UploadState.WAITING
    register(SECOND, Facts(1, (FIRST,), (SECOND,)), hosts[:1])
    assert states_after_turns() == UploadState.WAITING
    uploader.close()


def test_uploader_does_not_publish_an_attempt_of_a_job_that_ended(tmp_path):
    """It had no takes. Published after the attempt of the next job, it ended that one: another job had continued."""
    gone, here = SECOND, Attempt("d" * 12, RUN, 2, Parent(FIRST.name, 10))
    uploader = Uploader(str(tmp_path))
    hosts = [Host("host", "host", [0])]

    def register(attempt, facts, secret):
        uploader.jobs = lambda: {secret}
        given = Registration(RUN, facts, attempt.name, str(tmp_path / "far"), {}, "latest", 0, hosts, 0, secret)
        uploader.handle(ControlRequest("register", given))

    register(gone, Facts(1, (FIRST,), (gone,)), "of the job that is gone")
    assert uploader._names() == {gone.name}
    register(here, Facts(2, (FIRST, here)), "of the next job")
    assert uploader._names() == {here.name}
    assert uploader.status().run == RUN
