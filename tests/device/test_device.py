"""Snapshots of an accelerator: `on_fakedev.py`, `on_accelerator.py` and `on_cuda.py`, in a process of their own.

What torch was told of a device, it never forgets: other tests would meet it, too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import fakedev

pytestmark = pytest.mark.device


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.skipif(bool(fakedev.missing()), reason=f"the fake accelerator cannot be built: {fakedev.missing()}")
@pytest.mark.timeout(600)  # a compiler may have to read all of torch's headers first
def test_take_and_restore_on_an_accelerator():
    folder = Path(__file__).parent
    run(folder / "on_fakedev.py", folder / "on_accelerator.py")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.timeout(600)
def test_take_and_restore_on_cuda():
    folder = Path(__file__).parent
    run(folder / "on_accelerator.py", folder / "on_cuda.py", SNAPSHOT_TEST_DEVICE="cuda")
