"""Pools of ranks for the tests of this folder, and its own modules for them to import: `from pool import Died`."""

import contextlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from pool import Pool  # noqa: E402 - it is found from here on

# collecting what is no test would import it a second time, under another name
collect_ignore = [file.name for file in HERE.glob("*.py") if not file.name.startswith("test_")]


@pytest.fixture(scope="session")
def two():
    """Two ranks, shared by all tests."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four():
    """Four ranks, shared by all tests."""
    with Pool(4) as pool:
        yield pool


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
