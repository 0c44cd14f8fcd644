"""The protocol of a run, checked exhaustively: no trace with two faults breaks it, and each mend is needed."""

import pytest

from tests.tiers.model import MENDS, Model, Wrong, explore
from tests.tiers.schedules import run_schedule

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


@pytest.mark.slow
def test_no_trace_with_two_faults_is_wrong():
    assert explore(Model(), DEEP) > 60_000


@pytest.mark.parametrize("mend", sorted(MENDS))
def test_each_mend_is_needed(mend):
    first = FIRST.get(mend, [])
    with pytest.raises(Wrong):
        explore(Model(without=mend), DEEP, first)
    assert not first or explore(Model(), 6, first)


@pytest.mark.parametrize("seed", range(5))
def test_the_code_makes_the_transitions_of_the_model(tmp_path, seed):
    """Random schedules run on both, and are compared after each action. tests/soak runs thousands."""
    for each in range(seed * 40, seed * 40 + 40):
        assert run_schedule(each, tmp_path / "world")
