"""Pools of ranks for the tests of this folder, which are those of `tests/distributed`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "distributed"))
from pool import Pool  # noqa: E402 - it is found from here on

# collecting what is no test would import it a second time, under another name
collect_ignore = [file.name for file in HERE.glob("*.py") if not file.name.startswith("test_")]
SHARED = []
"""The pools that all tests of this folder share."""


@pytest.fixture(scope="session")
def two():
    """Two ranks, shared by all tests."""
    with Pool(2) as pool:
        SHARED.append(pool)
        yield pool


def pytest_runtest_teardown(nextitem):
    """Gloo's threads poll as long as their group is there: behind this folder's last test they only take time."""
    if nextitem is None or HERE not in nextitem.path.parents:
        for pool in SHARED:
            pool.close()


@pytest.fixture(autouse=True)
def mended(request):
    """The shared pool, where an earlier test left it broken, is made anew before the next one that uses it."""
    if "two" in request.fixturenames:
        pool = request.getfixturevalue("two")
        if not pool.healthy():
            pool.restart()


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see."""
    return str(tmp_path)
