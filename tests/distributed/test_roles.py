"""Ranks with different roles in one job: they resume from one step, whichever of them is killed and when."""

import shutil
import signal

import pytest

from snapshot import RestoreError, Snapshot, SnapshotManager
from tests.distributed import role_jobs
from tests.helpers.rank_pool import Died, Pool

PROMPTS = 16
ROLES = {"trainer": 0, "rollout worker": 1, "buffer": 2}
MOMENTS = ("before", "writes", "commit", "after")


def newest(root):
    """The newest step, after a look at the state of each role: no prompt is lost in it, and none is there twice."""
    step = SnapshotManager(root, signals=()).latest()
    if step is None:
        return 0
    snapshot = Snapshot(f"{root}/step-{step}")
    assert snapshot.verify()
    trained, buffer = snapshot.read_object("0/trained/prompts"), snapshot.read_object("2/buffer")
    waiting = [prompt for prompt, _ in buffer["waiting"]]
    assert [*trained, *waiting, *range(buffer["next"], PROMPTS)] == list(range(PROMPTS))
    assert snapshot.read_object("1/answered/count") == buffer["next"] == min(step, PROMPTS)
    return step


@pytest.mark.parametrize("which", ROLES.values(), ids=ROLES)
def test_manager_take_of_several_roles_is_all_or_nothing_if_one_is_killed(fresh_pool, tmp_path, which):
    root = tmp_path / "run"
    for moment in MOMENTS:
        before = newest(root)
        with fresh_pool(3) as pool:
            pool.start(role_jobs.train, str(root), PROMPTS, which, moment, pool.pids[which])
            outcomes = pool.finish(until_death=True)
        assert isinstance(outcomes[which], Died), (moment, outcomes)
        assert outcomes[which].signal == signal.SIGKILL
        # the first take of the job was committed, and of the second one all or nothing
        old, new = before + 1, before + 2
        may_be = {"before": {old}, "writes": {old}, "commit": {old} if which == 0 else {old, new}, "after": {new}}
        assert newest(root) in may_be[moment], moment
    with fresh_pool(3) as pool:
        pool.run(role_jobs.train, str(root), PROMPTS, which, "never", 0)
    trained = Snapshot(f"{root}/step-{newest(root)}").read_object("0/trained/prompts")
    assert trained == list(range(PROMPTS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job that has ended."""
    root = tmp_path_factory.mktemp("trained")
    with Pool(3) as pool:
        pool.run(role_jobs.train, str(root), PROMPTS, 0, "never", 0)
    return root


def test_manager_restore_of_several_roles_needs_each_on_its_rank(trained, three):
    found = three.run(role_jobs.restore, str(trained), ("trained", "answered", "buffer"))
    state = [{"prompts": list(range(PROMPTS))}, {"count": PROMPTS}, {"next": PROMPTS, "waiting": []}]
    step = newest(trained)
    assert [each[:2] for each in found] == [(step, each) for each in state]
    moved = three.outcomes(role_jobs.restore, str(trained), ("trained", "buffer", "answered"))
    assert ["RestoreError" in str(each) or isinstance(each, RestoreError) for each in moved] == [True] * 3


def test_manager_restore_without_a_role_is_an_error_if_asked_for(trained, two):
    found = two.run(role_jobs.restore, str(trained), ("trained", "answered"))
    assert "buffer" in found[0][2]
    refused = two.outcomes(role_jobs.restore, str(trained), ("trained", "answered"), "error")
    assert ["RestoreError" in str(each) or isinstance(each, RestoreError) for each in refused] == [True] * 2


def test_manager_restore_of_several_roles_passes_over_a_step_that_one_cannot_read(trained, three, tmp_path):
    root = shutil.copytree(trained, tmp_path / "run")
    step = newest(root)
    [file] = (root / f"step-{step}/data").glob("*-1-0.safetensors")  # that of the rollout worker
    file.unlink()
    found = three.run(role_jobs.restore, str(root), ("trained", "answered", "buffer"))
    assert [each[0] for each in found] == [step - 1] * 3
