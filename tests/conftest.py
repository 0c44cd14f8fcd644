"""What holds for all tests, and the ranks and the warm interpreter that they share."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE / "distributed"))  # for `from pool import Pool`
from forked import Warm  # noqa: E402 - it is found from here on

# A machine that is busy with something else is slow, and no test says anything about time.
settings.register_profile("snapshot", deadline=None)
settings.load_profile("snapshot")


@pytest.fixture(scope="session")
def warm():
    """An interpreter that has imported torch, for scripts to be forked from."""
    warm = Warm()
    yield warm
    warm.close()


# Ranks

POOLS = {"two": 2, "three": 3, "four": 4}
SHARED = {}
"""The pools that all tests share."""


def shared(name):
    """A fixture: that many ranks, shared by all tests."""

    @pytest.fixture(scope="session", name=name)
    def ranks():
        from pool import Pool  # which few tests need

        with Pool(POOLS[name]) as pool:
            SHARED[name] = pool
            yield pool

    return ranks


two, three, four = map(shared, POOLS)


@pytest.fixture(autouse=True)
def mended(request):
    """A shared pool that an earlier test left broken, or that was closed, is made anew before a test that uses it."""
    for name in POOLS.keys() & set(request.fixturenames):
        pool = request.getfixturevalue(name)
        if pool is SHARED.get(name) and not pool.healthy():  # a test may have something of its own by that name
            pool.restart()


def pytest_runtest_teardown(item, nextitem):
    """Gloo's threads poll as long as their group is there: behind a folder's last test they only take time."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for pool in SHARED.values():
            pool.close()


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see."""
    return str(tmp_path)
