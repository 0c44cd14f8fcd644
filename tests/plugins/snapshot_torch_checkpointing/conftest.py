"""No test of this plugin leaks."""

from tests.helpers.leaks import nothing_leaks  # noqa: F401 - a fixture
