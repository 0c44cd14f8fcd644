"""Interrupts at random moments, many of them: `python -m pytest tests/soak` runs what takes too long for the suite."""

import subprocess
import sys


def test_soak_interrupts_at_random_moments_leave_the_old_or_the_new_snapshot(tmp_path):
    script = f"""
import os, random, signal, threading, torch
from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
path = {str(tmp_path / "s")!r}
state = lambda v: {{"s": StateDict(x=torch.full((1000,), float(v)))}}
Snapshot.take(path, state(0), options=TakeOptions(durable=False))
random.seed(1)
for i in range(300):
    timer = threading.Timer(random.uniform(0, 0.006), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        Snapshot.take(path, state(i), overwrite=True, options=TakeOptions(durable=False))
        timer.join()
    except (KeyboardInterrupt, SnapshotError):
        pass
    try:
        timer.cancel(); timer.join()
    except KeyboardInterrupt:
        pass
    report = Snapshot(path).verify()
    assert report.ok, report
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd="/", timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
