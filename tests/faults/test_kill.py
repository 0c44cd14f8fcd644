"""A process that is killed at any step leaves the old snapshot or the new one, whole, and nothing in the way."""

import pytest

from tests.faults.killed_jobs import VERBS, kill_at_operations, kill_at_system_calls, kill_while_pruning

pytestmark = [pytest.mark.deadly, pytest.mark.usefixtures("one_thread")]
SAMPLED = {
    "async_take": 3,
    "async_overwrite": 3,
    "overlapped": 3,
    "based_async": 3,
    "read": 8,
}  # all of theirs are in tests/soak


@pytest.mark.parametrize("verb", VERBS)
def test_kill_at_a_storage_operation_leaves_the_old_or_the_new_snapshot(forker, tmp_path, verb):
    kills, new = kill_at_operations(forker, tmp_path, verb, every=SAMPLED.get(verb, 1))
    assert kills >= 2
    if verb != "read":
        assert 0 < new < kills


@pytest.mark.parametrize("verb", ["take", "overwrite"])
def test_kill_on_the_portable_path_leaves_the_old_or_the_new_snapshot(portable_forker, tmp_path, verb):
    kills, new = kill_at_operations(portable_forker, tmp_path, verb, every=2)
    assert 0 < new < kills


def test_kill_during_prune_leaves_complete_snapshots(forker, tmp_path):
    kills = kill_while_pruning(forker, tmp_path, every=2)
    assert kills > 8


@pytest.mark.parametrize(("verb", "every"), [("take", 12), ("overwrite", 14), ("delete", 10)])
def test_kill_at_a_system_call_leaves_the_old_or_the_new_snapshot(forker, strace, tmp_path, verb, every):
    kills, _ = kill_at_system_calls(forker, tmp_path / "here", verb, tmp_path / "log", every=every, offset=every // 2)
    assert kills >= 3
