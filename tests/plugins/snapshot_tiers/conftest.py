"""Near folders whose uploaders end with the test."""

import pytest

from tests.plugins.snapshot_tiers.jobs import stop_uploaders


@pytest.fixture
def hosts(tmp_path):
    """Return a function that names the near folder of a host: `hosts("a")`."""
    made = set()

    def folder(name):
        made.add(name)
        return tmp_path / "hosts" / name

    yield folder
    stop_uploaders(*[tmp_path / "hosts" / name for name in made])
