"""Saves and restores while the interpreter exits, each in a program of its own: `exiting.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

from snapshot import Snapshot

VERBS = ["take", "async", "unawaited", "overlapped", "small", "manager"]
KEPT = {"manager": "manager/step-3"}
"""Where a verb leaves a snapshot, if not under its own name."""


@pytest.mark.parametrize("threads", ["before,forever", "threadless"])
def test_saves_work_in_exit_handlers_and_in_threads_that_outlive_the_main_one(tmp_path, threads):
    """Either with the threads of a save before, or without any, as in a first save with Python 3.12."""
    program = Path(__file__).with_name("exiting.py")
    command = [sys.executable, str(program), str(tmp_path), f"atexit,daemon,outlives,{threads}", ",".join(VERBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    lines = done.stdout.splitlines()
    for name in ("outlives", "atexit"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {verb}" for verb in VERBS]
        for verb in VERBS:
            assert Snapshot(str(tmp_path / f"{name}-{KEPT.get(verb, verb)}")).verify().ok
    assert "daemon refused" in lines
    assert ("forever refused" in lines) == ("forever" in threads)
