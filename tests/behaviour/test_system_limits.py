"""Where the system gives no more descriptors, threads, memory or room in files, every verb raises the library's error,
and works again as soon as it can. Each case is a process of its own."""

import textwrap

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, resource, sys, threading
import torch
from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions

which, folder = sys.argv[1:]
size = 40_000_000 if which == "memory" else 1_000_000
state = {"s": StateDict(x=torch.ones(size))}
start, soft = threading.Thread.start, {}


def limit(name, value):
    soft.setdefault(name, resource.getrlimit(name))
    resource.setrlimit(name, (value, soft[name][1]))


if which == "descriptors":
    limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1)
elif which == "threads":
    def refuse(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = refuse
elif which == "memory":
    Snapshot.take(folder + "/first", state)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, held + (48 << 20))  # enough for threads
elif which == "file size":
    limit(resource.RLIMIT_FSIZE, 100_000)

PROCESS = TakeOptions(worker="process")
verbs = {
    "take": lambda name: Snapshot.take(f"{folder}/{name}", state),
    "async_take": lambda name: Snapshot.async_take(f"{folder}/{name}", state).wait(),
    "process": lambda name: Snapshot.async_take(f"{folder}/{name}", state, options=PROCESS).wait(),
}
if which == "memory":
    verbs.pop("take")  # which needs none
failed = 0
for name, verb in verbs.items():
    try:
        verb(name)
    except SnapshotError as error:
        assert error.__cause__ is not None, error
        assert len(str(error)) > 20, error
        failed += 1
assert failed == len(verbs), failed
threading.Thread.start = start
for name, value in soft.items():
    resource.setrlimit(name, value)
if which == "file size":
    verbs.pop("process")  # which has the limit of its start
for name, verb in verbs.items():
    verb(name)
    assert Snapshot(f"{folder}/{name}").verify(), name
    live = {"s": StateDict(x=torch.zeros(size))}
    Snapshot(f"{folder}/{name}").restore(live)
    assert live["s"]["x"].eq(1).all()
"""


@pytest.mark.parametrize("which", ["descriptors", "threads", "memory", "file size"])
def test_system_limits_raise_an_error_of_the_library(tmp_path, warm, which):
    warm.run(textwrap.dedent(SCRIPT), which, tmp_path)
