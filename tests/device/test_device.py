"""Snapshots of an accelerator, on machines that have none: `on_fakedev.py`, in a process of its own.

What torch was told of a device, it never forgets: other tests would meet it, too.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import fakedev

pytestmark = pytest.mark.device


@pytest.mark.skipif(bool(fakedev.missing()), reason=f"the fake accelerator cannot be built: {fakedev.missing()}")
@pytest.mark.timeout(600)  # a compiler may have to read all of torch's headers first
def test_snapshots_of_an_accelerator():
    tests = Path(__file__).with_name("on_fakedev.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
