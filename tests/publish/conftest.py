"""Ranks that a test may kill."""

import contextlib

import pytest

from tests.helpers.rank_pool import Pool


@pytest.fixture
def fresh_pool():
    """Return a function that makes pools, `fresh_pool(world, ...)`, whose ranks the test may kill or stop."""
    with contextlib.ExitStack() as stack:
        yield lambda world, **options: stack.enter_context(Pool(world, **options))
