"""Schedules of a whole run in one process, what they have found, and that the oracle sees faults."""

import logging
import shutil

import pytest
import torch

from snapshot import SnapshotError, SnapshotExistsError, SnapshotNotFoundError, StorageError, TakeOptions
from snapshot.io.storage import ANYTHING
from snapshot.runs.timeline import RunLine, Standing
from snapshot_tiers import facts
from snapshot_tiers.control import ControlRequest, UploadState
from tests.plugins.snapshot_tiers.one_process import Job, Machines
from tests.plugins.snapshot_tiers.oracle import FolderRoot, Wrong
from tests.plugins.snapshot_tiers.spoiled_house import SpoiledHouse
from tests.plugins.snapshot_tiers.whole_house import House, state, value_of

QUICK = 8
"""Schedules in a run of these tests."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


SAME = TakeOptions(replicated=["**"])


def test_near_run_random_schedules(tmp_path):
    """tests/soak plays thousands."""
    for seed in range(QUICK):
        House(seed, tmp_path / "house").play()


@pytest.mark.parametrize("seed", [1, 16, 30])
def test_near_run_schedules_that_reach_most_of_the_code(tmp_path, seed):
    House(seed, tmp_path / "house").play()


@pytest.mark.parametrize("rolls", [False, True])
def test_near_run_random_schedules_with_suspect_steps_and_a_restored_root(tmp_path, rolls):
    for seed in range(QUICK // 2):
        SpoiledHouse(seed, tmp_path / "house", rolls=rolls).play()


# The oracle


def is_wrong(folder, theme, seeds):
    """Say whether a schedule about some situation breaks a promise."""
    for seed in seeds:
        house = House(seed, folder / "house")
        try:
            if house.theme == theme:
                house.play()
        except Wrong:
            return True
    return False


@pytest.mark.slow
def test_near_run_oracle_finds_an_upload_of_undecided_steps(tmp_path, monkeypatch):
    real = RunLine.standing

    def standing(self, step, save_id, origin):
        found = real(self, step, save_id, origin)
        return Standing.ON if found == Standing.UNDECIDED else found

    monkeypatch.setattr(RunLine, "standing", standing)
    assert is_wrong(tmp_path, "forks", range(300))


@pytest.mark.slow
def test_near_run_oracle_finds_a_publication_without_a_condition(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ABSENT", ANYTHING)
    assert is_wrong(tmp_path, "races", range(200, 900))


@pytest.mark.slow
def test_near_run_oracle_finds_that_abandoned_steps_count(tmp_path, monkeypatch):
    """All steps count, also those that the run has left."""
    monkeypatch.setattr(RunLine, "standing", lambda *_: Standing.ON)
    assert is_wrong(tmp_path, "forks", range(300))


# What the schedules have found


@pytest.fixture
def run(tmp_path):
    """Return the machines, and a function that begins a job with a rank on each of some hosts."""
    jobs = []

    def begin(hosts, **options):
        given = {"grace": 0, "keep_near": None, **options}
        jobs.append(Job(machines, str(tmp_path / "far"), [str(tmp_path / host) for host in hosts], **given))
        return jobs[-1]

    with Machines() as machines:
        yield machines, begin
        for job in jobs:
            job.kill()


def restored(job, **options):
    """Restore on all ranks, and return the step and its value."""
    lives = [state(-1) for _ in job.managers]
    found, errors = job.together(lambda rank, each: each.restore_latest(lives[rank], **options))
    assert errors == [None] * len(errors)
    assert len({(step, value_of(live)) for step, live in zip(found, lives, strict=True)}) == 1
    return found[0], value_of(lives[0])


def take(job, step, value):
    found, errors = job.together(lambda _, each: each.async_take(step, state(value), options=SAME))
    job.settle()
    assert errors == [None] * len(errors)
    for each in found:
        each.wait()
    return found


def process_of(machines, host):
    [found] = [each for each in machines.processes.values() if f"/{host}/" in each.folder and each.is_alive]
    return found


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_near_restore_reads_from_a_host_whose_uploader_is_dead_or_hangs(run, how):
    """The other hosts found no place with its files, and passed over the step."""
    machines, begin = run
    job = begin("ab", upload=None, replicas=0)
    take(job, 10, 1)
    getattr(process_of(machines, "b"), how)()
    assert restored(job) == (10, 1)


def test_uploader_restarted_by_another_job_is_found_by_other_hosts(run):
    """A job on one host offers nothing, and its uploader forgot the port that the hosts of the first job know."""
    machines, begin = run
    job = begin("ab", upload=None, replicas=0)
    take(job, 10, 1)
    process_of(machines, "b").kill()
    begin("b", upload=None).together(lambda _, each: each.restore_latest(state(-1)))  # it lacks the files of the other
    assert restored(job) == (10, 1)


def test_near_restore_in_a_new_job_reads_from_a_host_whose_uploader_hangs(run):
    machines, begin = run
    job = begin("b", upload=None)
    take(job, 10, 1)
    job.kill()
    process_of(machines, "b").hang()
    assert restored(begin("ab", upload=None, replicas=0)) == (10, 1)


def test_wait_counts_the_time_of_a_registration_that_hangs(run):
    machines, begin = run
    job = begin("a", upload=None)
    take(job, 10, 1)
    process_of(machines, "a").hang()
    [pending] = take(job, 20, 2)
    job.tiers.link.register()
    began = machines.clock.now
    with pytest.raises(TimeoutError, match="did not answer within 5 s"):
        pending.wait("far", timeout=5)
    assert machines.clock.now - began < 6


def test_near_step_of_another_attempt_on_another_host_is_not_replaced(run):
    """Two jobs share the line. The leader of the second one does not have the step that the first one took."""
    _, begin = run
    first, second = begin("b", upload=None), begin("ab", upload=None, replicas=0)
    for job in (first, second):
        assert restored(job) == (None, -1)
    take(first, 10, 1)
    _, errors = second.together(lambda _, each: each.take(10, state(2), options=SAME))
    assert isinstance(errors[1], SnapshotExistsError)
    assert "another attempt has taken the step" in str(errors[0])
    assert restored(begin("b", upload=None)) == (10, 1)


@pytest.mark.parametrize("place", ["near", "far"])
@pytest.mark.parametrize("later", ["good", "suspect"])
def test_near_restore_prefers_the_good_step_of_two_jobs(run, tmp_path, place, later):
    """They do not see each other's hosts, and the later attempt is of the other one."""

    def app(value, weight):
        model = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(model.weight, weight)
        return {**state(value), "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    machines, begin = run
    jobs, pendings = {host: begin(host, upload=None) for host in "ab"}, {}
    kinds = [("a", 1, 0.5), ("b", 2, float("nan"))]
    kinds = kinds if later == "suspect" else kinds[::-1]
    for host, _, _ in kinds:
        assert restored(jobs[host]) == (None, -1)
    for host, value, weight in kinds:
        made = app(value, weight)
        [pendings[host]], errors = jobs[host].together(
            lambda _, each, made=made: each.async_take(10, made, options=SAME)
        )
        assert errors == [None]
        pendings[host].wait()
    if place == "far":
        pendings["a"].wait("far", timeout=300)
    for job in jobs.values():
        job.kill()
    if place == "far":
        process_of(machines, "a").kill()
        shutil.rmtree(tmp_path / "a")
    last = begin("b" if place == "far" else "ab", upload=None, replicas=0)
    lives = [app(-1, 0.0) for _ in last.managers]
    found, errors = last.together(lambda rank, each: each.restore_latest(lives[rank]))
    assert errors == [None] * len(errors)
    assert {(step, value_of(live)) for step, live in zip(found, lives, strict=True)} == {(10, 1)}


def test_upload_of_a_dropped_step_if_the_run_goes_back_to_it(run, tmp_path):
    """The newest step on the line stayed near, since a step that was lost with a host had been newer."""
    machines, begin = run
    root = FolderRoot(tmp_path / "far")
    first = begin("a", upload=None)
    take(first, 10, 1)
    first.kill()
    root.go_down()
    second = begin("ab", replicas=0)
    assert restored(second, offline=True) == (10, 1)
    take(second, 20, 2)
    machines.clock.sleep(1)
    assert second.tiers.ask(ControlRequest("status")).steps[10].far == UploadState.DROPPED
    second.kill()
    process_of(machines, "b").kill()
    shutil.rmtree(tmp_path / "b")
    root.come_back()
    last = begin("a")
    assert restored(last) == (10, 1)
    machines.clock.sleep(30)
    assert (tmp_path / "far/step-10/.snapshot_metadata").exists()


# What a manager says about steps with near folders


def test_manager_where_pin_and_snapshot_know_near_and_far_steps(run, tmp_path):
    _, begin = run
    job = begin("ab", upload=None, replicas=0)
    first = job.managers[0]
    with pytest.raises(SnapshotError, match="the ranks join in the first take"):
        first.where(10)
    assert first.steps() == []
    take(job, 10, 1)
    pendings = take(job, 20, 2)
    assert first.where(10) == {"near": "whole", "replicas": 0, "far": "kept near"}
    assert first.where(99) == {"near": "absent", "replicas": 0, "far": "absent"}
    assert first.steps() == [10, 20]
    for pending in pendings:
        pending.wait("far", timeout=300)
    assert first.where(20) == {"near": "whole", "replicas": 0, "far": "whole"}
    assert (first.pinned(), first.latest()) == ([], 20)
    for step in (10, 20):
        first.pin(step)
    with pytest.raises(SnapshotNotFoundError):
        first.pin(99)
    assert first.pinned() == [10, 20]
    assert (tmp_path / "far/step-20/.pinned").exists()
    for step in (10, 20):
        first.unpin(step)
    assert first.pinned() == []
    assert not (tmp_path / "far/step-20/.pinned").exists()
    near = job.tiers.folder.step_path(20)
    shutil.rmtree(f"{near}/data")
    assert first.snapshot(20).path == str(tmp_path / "far/step-20")
    assert first.where(20)["near"] in ("partial", "absent")
    assert restored(job) == (20, 2)


def test_manager_replicas_let_where_and_restore_survive_a_lost_host(run, tmp_path):
    machines, begin = run
    job = begin("ab", upload=None, replicas=1)
    take(job, 10, 1)
    machines.clock.sleep(30)
    assert [job.managers[rank].where(10)["replicas"] for rank in (0, 1)] == [1, 1]
    job.kill()
    process_of(machines, "b").kill()
    shutil.rmtree(tmp_path / "b")
    assert restored(begin("ab", upload=None, replicas=0)) == (10, 1)


def test_manager_without_far_root_lists_near_steps_and_restores_offline(run, tmp_path):
    machines, begin = run
    root = FolderRoot(tmp_path / "far")
    job = begin("a", upload=1)
    take(job, 10, 1)
    machines.clock.sleep(5)
    assert (tmp_path / "far/step-10/.snapshot_metadata").exists()
    root.go_down()
    take(job, 20, 2)
    machines.clock.sleep(5)
    assert job.managers[0].steps() == [10, 20]
    job.kill()
    again = begin("a", upload=1)
    _, errors = again.together(lambda _, each: each.restore_latest(state(-1)))
    assert isinstance(errors[0], StorageError)
    assert "/far/.run" in str(errors[0])
    again.kill()
    again = begin("a", upload=1)
    assert restored(again, offline=True) == (20, 2)
    take(again, 30, 3)
    root.come_back()
    machines.clock.sleep(60)
    assert again.managers[0].where(30)["far"] == "whole"
    assert restored(begin("a")) == (30, 3)


def test_manager_take_of_a_step_that_only_the_far_root_has_needs_overwrite(run, tmp_path):
    machines, begin = run
    job = begin("a", upload=1)
    take(job, 10, 1)
    machines.clock.sleep(5)
    job.kill()
    process_of(machines, "a").kill()
    shutil.rmtree(tmp_path / "a")
    job = begin("a", upload=1)
    _, errors = job.together(lambda _, each: each.take(10, state(2), options=SAME))
    assert isinstance(errors[0], SnapshotExistsError)
    assert "overwrite=True" in str(errors[0])
    _, errors = job.together(lambda _, each: each.async_take(10, state(2), options=SAME, overwrite=True))
    assert errors == [None]
    job.settle()
    machines.clock.sleep(5)
    assert restored(begin("a")) == (10, 2)


def test_manager_keep_near_removes_older_steps_but_not_pinned_ones(run, tmp_path):
    machines, begin = run
    job = begin("a", upload=1, keep_near=2)

    def near_after(step):
        take(job, step, step)
        machines.clock.sleep(5)
        job.clean()
        return list(job.tiers.folder.steps())

    assert [near_after(step) for step in (10, 20, 30)] == [[10], [10, 20], [20, 30]]
    job.managers[0].pin(20)
    assert [near_after(step) for step in (40, 50)] == [[20, 30, 40], [20, 40, 50]]
    assert sorted(path.name for path in (tmp_path / "far").glob("step-*")) == [f"step-{n}0" for n in range(1, 6)]
