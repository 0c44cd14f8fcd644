"""A rank that dies or stops, at any point: all others raise in time and name it, and nothing is committed. One that is
only slow is waited for. What this samples, tests/soak tries at every point."""

import pytest

from snapshot import CommitUnknown, Snapshot, SnapshotError
from tests.distributed import failing_ranks as ranks
from tests.distributed.fault_cases import SOON, Case, attempt, known
from tests.helpers.rank_pool import Died

pytestmark = pytest.mark.ranks

SAVES = [
    # world, rank, point, act
    (2, 0, "call", "die"),
    (2, 1, "call", "stop"),
    (2, 1, "store add 0/count", "die"),
    (2, 0, "storage put .take-*", "stop"),
    (2, 0, "store set 0/answer", "die"),
    (2, 1, "state_dict", "die"),
    (2, 0, "state_dict", "stop"),
    (2, 1, "storage create data/*", "stop"),
    (2, 0, "storage write data/*", "die"),
    (2, 1, "storage write data/*.json", "die"),
    (2, 1, "storage finish data/*", "stop"),
    (2, 1, "storage settle", "die"),
    (2, 0, "storage get data/*.json", "stop"),
    (2, 0, "store compare_set decision", "die"),
    (2, 0, "storage commit *", "die"),
    (2, 0, "storage commit *", "stop"),
    (2, 0, "storage list data/", "die"),
    (2, 0, "storage delete *", "stop"),
    (2, 0, "store add over", "die"),
    (2, 1, "store add over", "stop"),
    (2, 0, "state_dict", "slow"),
    (2, 1, "storage finish data/*", "slow"),
    (2, 0, "storage commit *", "slow"),
    (4, 0, "storage finish data/*", "die"),
    (4, 2, "storage write data/*", "stop"),
    (4, 3, "state_dict", "die"),
    (4, 2, "storage write data/*", "slow"),
]
RESTORES = [
    (2, 0, "call", "stop"),
    (2, 1, "call", "die"),
    (2, 0, "storage get .snapshot_metadata", "die"),
    (2, 1, "storage stat data/*", "stop"),
    (2, 1, "state_dict", "die"),
    (2, 0, "storage read_into data/*", "stop"),
    (2, 1, "storage read_into data/*", "die"),
    (2, 1, "load_state_dict", "stop"),
    (2, 0, "load_state_dict", "die"),
    (2, 0, "store add over", "die"),
    (2, 0, "storage get .snapshot_metadata", "slow"),
    (2, 1, "storage read_into data/*", "slow"),
    (2, 0, "load_state_dict", "slow"),
    (4, 0, "storage read_into data/*", "die"),
    (4, 2, "store set 1/2", "stop"),
    (4, 3, "load_state_dict", "die"),
]
RELAYS = [
    (2, 0, "broadcast", "die"),
    (2, 1, "broadcast #2", "stop"),
    (2, 0, "storage read_into data/* #2", "stop"),
    (2, 1, "storage read_into data/* #2", "slow"),
    (2, 0, "broadcast #4", "slow"),
    (4, 3, "broadcast #3", "die"),
    (4, 0, "broadcast #2", "stop"),
    (4, 2, "broadcast #3", "slow"),
]
TABLE = {"take": SAVES[::2], "async_take": SAVES[1::2], "restore": RESTORES, "read_once": RELAYS}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder for what the cases have in common."""
    return str(tmp_path_factory.mktemp("template"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", TABLE)
def test_silent_rank_is_named_by_all_and_a_slow_one_is_waited_for(template, tmp_path, verb):
    cases = [_case(template, verb, *row) for row in TABLE[verb]]
    faults = attempt(cases, tmp_path, template)
    assert not faults, "\n".join(faults)


def _case(template, verb, world, which, glob, act, **options):
    point = known(world, verb, template).find(which, glob)
    assert point is not None, f"rank {which} of {world} never comes to {glob!r} in {verb}"
    return Case(world, verb, which, point, act, **options)


@pytest.mark.timeout(300)
def test_silent_rank_that_serves_the_store_is_named(template, tmp_path):
    rows = [
        ("take", 0, "call", "die"),
        ("take", 0, "state_dict", "die"),
        ("async_take", 0, "storage write data/*", "die"),
        ("take", 1, "storage write data/*", "die"),
        ("take", 0, "storage write data/*", "stop"),
        ("async_take", 1, "storage write data/*", "stop"),
        ("restore", 0, "storage read_into data/*", "die"),
        ("async_take", 0, "storage commit *", "die"),
    ]
    cases = [_case(template, verb, 2, *row, store="tcp") for verb, *row in rows]
    faults = attempt(cases, tmp_path, template)
    assert not faults, "\n".join(faults)


def test_store_connection_lost_on_one_rank_fails_all_ranks(four, folder):
    four.run(ranks.take_all, f"{folder}/s")
    outcomes = four.outcomes(ranks.break_off, 2, f"{folder}/s", SOON)
    four.restart()
    assert all(isinstance(outcome, SnapshotError) for outcome in outcomes), outcomes
    assert not any(isinstance(outcome, Died | CommitUnknown) for outcome in outcomes), outcomes
    # Each rank raises its own error, or a RankError that quotes the same error of a rank that raised it sooner.
    assert all("did not reach all ranks through the process group" in str(outcome) for outcome in outcomes), outcomes
    assert Snapshot(f"{folder}/s").verify().ok
