"""Pools of ranks for the tests of this folder, and its own modules for them to import: `from pool import Died`."""

import contextlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "storage"))
from pool import Pool  # noqa: E402 - it is found from here on
from servers import moto  # noqa: E402, F401

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


@pytest.fixture(scope="session")
def four():
    """Four ranks, shared by all tests."""
    with Pool(4) as pool:
        SHARED.append(pool)
        yield pool


def pytest_runtest_teardown(nextitem):
    """Gloo's threads poll as long as their group is there: behind this folder's last test they only take time."""
    if nextitem is None or HERE not in nextitem.path.parents:
        for pool in SHARED:
            pool.close()


@pytest.fixture(autouse=True)
def mended(request):
    """A shared pool that an earlier test left broken is made anew before the next one that uses it."""
    for name in {"two", "four"}.intersection(request.fixturenames):
        pool = request.getfixturevalue(name)
        if not pool.healthy():
            pool.restart()


@pytest.fixture
def fresh_pool():
    """Makes pools, `fresh_pool(world, ...)`, whose ranks the test may kill or stop."""
    with contextlib.ExitStack() as stack:
        yield lambda world, **options: stack.enter_context(Pool(world, **options))


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see."""
    return str(tmp_path)
