"""Suites of this library on macOS and Windows, as far as Linux can emulate them: see helpers/elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import elsewhere

TOP = Path(__file__).parents[2]
SUITES = [
    "storage/test_file.py",
    "storage/test_file_hostile.py",
    "storage/test_file_share.py",
    "save/test_stored_format.py",
    "save/test_verify_writes.py",
    "loading/test_restore.py",
    "loading/test_left_out.py",
    "behaviour/test_exact_values.py",
    "transform/test_convert.py",
    "cli/test_ls.py",
    "manager/test_manager.py",
]
COPIES = (
    "direct_io or reflink or copy or copies or CopiesByTheKernel or failed_fsync or read_only or without_privileges"
)
LACKING = {
    "darwin": COPIES,
    "win32": f"{COPIES} or only_names or synced_by_a_commit or lock_that_is_never_released or write_aligned or "
    "refuses_invalid_arguments",
}
"""Tests of what a platform lacks: O_DIRECT and copies by the kernel; on Windows also syncs of folders, and signals."""


def on(platform, *command):
    environment = {
        **os.environ,
        "SNAPSHOT_TEST_PLATFORM": platform,
        "PYTHONPATH": os.pathsep.join((str(TOP), elsewhere.__path__[0])),
    }
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=TOP, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", LACKING)
def test_other_platforms_emulated_pass_the_test_suites(platform, tmp_path):
    suites = [str(TOP / "tests" / name) for name in (SUITES if platform == "win32" else SUITES[:5])]  # macOS has most
    given = "-q", "-p", "no:cacheprovider", "-n0", f"--basetemp={tmp_path}/base", "-k", f"not ({LACKING[platform]})"
    code, printed = on(platform, "-m", "pytest", *given, *suites)
    assert code == 0, printed
    assert int(printed.rsplit(" passed", 1)[0].split()[-1]) > 300, printed


@pytest.mark.parametrize("platform", LACKING)
def test_other_platforms_features_that_need_linux_say_so(platform):
    program = """
import os, signal
from snapshot import Snapshot, SnapshotError, SnapshotManager, StateDict, TakeOptions
from snapshot_publish import Subscriber
import snapshot.cli.doctor, snapshot_publish.subscriber, snapshot_tiers.join, snapshot_worker.client
for what, call in {
    "near": lambda: SnapshotManager("run", near="near"),
    "worker": lambda: Snapshot.async_take("step", {"s": StateDict(a=1)}, options=TakeOptions(worker="process")),
    "Subscriber": lambda: Subscriber("store", "local"),
}.items():
    try:
        call()
    except SnapshotError as error:
        assert "needs Linux" in str(error) and what in str(error), error
    else:
        raise AssertionError(what)
from snapshot.io.system import try_lock_folder
with try_lock_folder(".", 1.0) as first, try_lock_folder(".", 0.1) as second:
    assert (first, second) == (True, False)
with try_lock_folder(".", 1.0) as first:
    assert first
print("refused")
"""
    assert on(platform, "-W", "error", "-c", program) == (0, "refused\n")


@pytest.mark.parametrize("platform", ["linux", *LACKING])
def test_other_platforms_use_aiofiles_without_vectored_calls(platform, tmp_path):
    program = f"""
import os, sys, torch
from snapshot import Snapshot, StateDict
def refuse(*arguments):
    raise AssertionError("called")
if {platform!r} != "linux":
    os.preadv = os.pwritev = refuse
state = {{"s": StateDict(a=torch.arange(3 << 18), b=torch.ones(5))}}
Snapshot.take({str(tmp_path / "step")!r}, state)
state["s"]["a"].zero_()
Snapshot({str(tmp_path / "step")!r}).restore(state)
assert torch.equal(state["s"]["a"], torch.arange(3 << 18))
print("aiofiles" in sys.modules)
"""
    code, printed = on("" if platform == "linux" else platform, "-W", "error", "-c", program)
    assert (code, printed) == (0, f"{platform != 'linux'}\n")
