"""The modules of this folder, for its tests to import, and ranks that a test may kill."""

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


@pytest.fixture
def fresh_pool():
    """Makes pools, `fresh_pool(world, ...)`, whose ranks the test may kill or stop."""
    with contextlib.ExitStack() as stack:
        yield lambda world, **options: stack.enter_context(Pool(world, **options))
