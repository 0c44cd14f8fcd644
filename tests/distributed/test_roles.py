"""Ranks with different roles in one job: they resume from one step, whichever of them is killed and when."""

import signal

import pytest

from snapshot import Snapshot, SnapshotManager
from tests.distributed import role_jobs
from tests.helpers.rank_pool import Died

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


def test_manager_restore_of_several_roles_needs_the_same_ranks(fresh_pool, tmp_path):
    """A role that moves to another rank does not find its state, and says so before anything is restored."""
    with fresh_pool(3) as pool:
        pool.run(role_jobs.train, str(tmp_path), 2, 0, "never", 0)
        found = pool.outcomes(role_jobs.restore_elsewhere, str(tmp_path))
    assert all("buffer" in str(each) for each in found), found
