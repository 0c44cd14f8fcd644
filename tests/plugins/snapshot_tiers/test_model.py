"""The protocol of a run, checked exhaustively: no trace with two faults breaks it, and each mend is needed."""

import pytest

from tests.plugins.snapshot_tiers.model import MENDS, Model, Wrong, explore
from tests.plugins.snapshot_tiers.schedules import run_schedule

DEEP = 10
"""Actions in a trace: enough to find the fault that each mend prevents."""


FIRST = {
    "an old number is looked at again after compaction": [
        ("start", 0, 0),
        ("publish_own", 0),
        ("stop", 0),
        ("go_down",),
        ("start", 0, 0),
        ("take", 0),
        ("stop", 0),
        ("come_back",),
        ("start", 0, 1),
        ("publish_own", 0),
    ]
}
"""Traces that begin with these actions, since the fault is deeper than all others."""


ROLLED_BACK = [
    ("start", 0, 0),
    ("publish_own", 0),
    ("take", 0),
    ("stop", 0),
    ("start", 0, 0),
    ("publish_own", 0),
    ("take", 0),
    ("roll_back",),
]
"""A root that lacks the attempt of a step which a host has."""
NEXT_JOB = [("start", 1, 1), ("publish_own", 1), ("take", 1)]
"""Another host, which has not seen the lost attempt, continues the run."""


@pytest.mark.slow
@pytest.mark.parametrize("then", [[], NEXT_JOB, [("look", 0), ("choose", 0)]])
def test_run_protocol_model_after_a_roll_back_has_no_wrong_trace(then):
    assert explore(Model(faults=3), 6, [*ROLLED_BACK, *then]) > 4_000


@pytest.mark.slow
def test_run_protocol_model_with_two_faults_has_no_wrong_trace():
    assert explore(Model(), DEEP) > 60_000


@pytest.mark.parametrize("mend", sorted(MENDS))
def test_run_protocol_model_needs_each_mend(mend):
    first = FIRST.get(mend, [])
    with pytest.raises(Wrong):
        explore(Model(without=mend), DEEP, first)
    assert not first or explore(Model(), 6, first)


@pytest.mark.parametrize("seed", range(5))
def test_run_protocol_code_makes_the_transitions_of_the_model(tmp_path, seed):
    """Random schedules run on both, and are compared after each action. tests/soak runs thousands."""
    for each in range(seed * 40, seed * 40 + 40):
        assert run_schedule(each, tmp_path / "world")


@pytest.mark.parametrize("then", [[], NEXT_JOB, [("look", 0), ("choose", 0)]])
def test_run_protocol_code_makes_the_transitions_of_the_model_after_a_roll_back(tmp_path, then):
    for each in range(30):
        assert run_schedule(each, tmp_path / "world", first=[*ROLLED_BACK, *then])
