"""What holds for all tests."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from forked import Warm

# A machine that is busy with something else is slow, and no test says anything about time.
settings.register_profile("snapshot", deadline=None)
settings.load_profile("snapshot")


@pytest.fixture(scope="session")
def warm():
    """An interpreter that has imported torch, for scripts to be forked from."""
    warm = Warm()
    yield warm
    warm.close()
