"""The protocol of a run, checked exhaustively: no trace with two faults breaks it, and each mend is needed."""

import pytest

from tests.tiers.model import MENDS, Model, Wrong, explore

DEEP = 10
"""Actions in a trace: enough to find the fault that each mend prevents."""


@pytest.mark.slow
def test_no_trace_with_two_faults_is_wrong():
    assert explore(Model(), DEEP) > 60_000


@pytest.mark.parametrize("mend", sorted(MENDS))
def test_each_mend_is_needed(mend):
    with pytest.raises(Wrong):
        explore(Model(without=mend), DEEP)
