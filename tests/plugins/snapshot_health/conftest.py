"""A snapshot to look at; and no test of this plugin leaks."""

from tests.helpers.command_fixtures import root  # noqa: F401 - a fixture
from tests.helpers.leaks import nothing_leaks  # noqa: F401 - a fixture
