"""States of many small tensors: a take and a restore need little memory for each of them."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

COUNT = 200_000
SCRIPT = """
import resource, sys, torch
from snapshot import Snapshot, StateDict

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def state(value):
    whole = torch.full((int(sys.argv[1]), 16), float(value))
    return {"s": StateDict({f"layer.{number}.weight": each.clone() for number, each in enumerate(whole)})}

few = {"s": StateDict(x=torch.ones(3))}
Snapshot.take(sys.argv[2] + "/few", few, overwrite=True)
Snapshot(sys.argv[2] + "/few").restore(few)
live = state(1)
before = peak()
if sys.argv[3] == "take":
    Snapshot.take(sys.argv[2] + "/many", live)
else:
    Snapshot(sys.argv[2] + "/many").restore(live)
    assert all(each.eq(1).all() for each in list(live["s"].values())[::1000])
print(peak() - before)
"""


def test_take_and_restore_of_many_tensors_use_a_kilobyte_for_each(tmp_path):
    for verb in ("take", "restore"):
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(COUNT), str(tmp_path), verb]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        assert int(printed) < 1150 * COUNT, verb
