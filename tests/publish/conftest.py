"""Near folders whose uploaders end with the test."""

import pytest

from snapshot import events as happening
from tests.helpers.rank_pool import Pool
from tests.tiers.jobs import stop_uploaders


@pytest.fixture
def hosts(tmp_path):
    """Return a function that names the near folder of a host: `hosts("a")`."""
    made = set()

    def folder(name):
        made.add(name)
        return tmp_path / "hosts" / name

    yield folder
    stop_uploaders(*[tmp_path / "hosts" / name for name in made])


@pytest.fixture
def fresh_pool():
    """Return a function that makes pools whose ranks the test may kill."""
    pools = []

    def make(world, **options):
        pools.append(Pool(world, **options))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


@pytest.fixture
def told():
    """Events, as they happen."""
    found = []
    happening.add_handler(found.append)
    yield found
    happening.remove_handler(found.append)
