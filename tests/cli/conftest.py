"""A snapshot to look at, and a terminal to look at it in."""

from tests.helpers.command_fixtures import root, terminal  # noqa: F401 - fixtures
