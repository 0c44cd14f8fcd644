"""Thousands of takes of ordinary trainings, of which no guard may find one suspect: `SOAK_TAKES=10000`."""

import os

import pytest

from tests.helpers.trainings import TRAININGS, alarms

TAKES = int(os.environ.get("SOAK_TAKES", "10000")) // len(TRAININGS) + 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TRAININGS)
def test_soak_guards_find_nothing_in_ordinary_trainings(name):
    assert list(alarms(name, f"memory://soak-{name.replace(' ', '-')}/run", TAKES, seed=TAKES)) == []
