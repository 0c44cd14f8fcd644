"""Saves and restores while the interpreter exits, each in a program of its own: `exiting.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

from snapshot import Snapshot
from tests.plugins.snapshot_tiers.jobs import stop_uploaders

VERBS = ["take", "async", "unawaited", "overlapped", "small", "verify", "nested", "manager", "near"]
KEPT = {"manager": "manager/step-3", "near": "near/far/step-1"}
"""Where a verb leaves a snapshot, if not under its own name."""


@pytest.mark.parametrize("threads", ["before,forever", "threadless"])
def test_take_and_restore_work_in_atexit_handlers_and_outliving_threads(tmp_path, threads):
    """Either with the threads of a save before, or without any, as in a first save with Python 3.12."""
    program = Path(__file__).with_name("exiting.py")
    command = [sys.executable, str(program), str(tmp_path), f"atexit,daemon,outlives,{threads}", ",".join(VERBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    lines = done.stdout.splitlines()
    for name in ("outlives", "atexit"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {verb}" for verb in VERBS]
        for verb in VERBS:
            assert Snapshot(str(tmp_path / f"{name}-{KEPT.get(verb, verb)}")).verify().ok
        stop_uploaders(tmp_path / f"{name}-near" / "near")  # they stay for an hour
    assert "daemon refused" in lines
    assert ("forever refused" in lines) == ("forever" in threads)


def test_exit_waits_until_a_daemon_thread_has_left_take(tmp_path):
    """It may be in the midst of a copy of torch, whose end aborts the process."""
    program = Path(__file__).with_name("exiting.py")
    command = [sys.executable, str(program), str(tmp_path), "slow", "take"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert Snapshot(str(tmp_path / "slow")).verify().ok


def test_take_at_exit_of_a_process_forked_by_a_daemon_thread(tmp_path):
    """Its main thread is a daemon."""
    program = f"""
import atexit, multiprocessing, threading, torch
from snapshot import Snapshot, StateDict
def save():
    Snapshot.take({str(tmp_path / "saved")!r}, {{"s": StateDict(x=torch.ones(3))}})
def end():
    threading._shutdown()
    save()
def fork():
    child = multiprocessing.get_context("fork").Process(target=end)
    child.start()
    child.join()
    print("code", child.exitcode)
daemon = threading.Thread(target=fork, daemon=True)
daemon.start()
daemon.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert "code 0" in done.stdout, done.stderr
    assert Snapshot(str(tmp_path / "saved")).verify().ok
