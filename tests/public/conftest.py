"""What the public tests share."""

import pytest
from leaks import no_leak


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No test leaves a file descriptor open, or a thread that was not there."""
    with no_leak():
        yield
