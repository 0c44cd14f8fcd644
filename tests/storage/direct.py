"""Where tests of O_DIRECT can run."""

import os

import pytest


def require_direct(folder):
    """Skip where files cannot be written around the page cache: there is nothing to test."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this platform has no O_DIRECT")
    try:
        descriptor = os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"this file system refuses O_DIRECT: {error.strerror}")
    os.close(descriptor)
    os.unlink(folder / "probe")
