"""A program that saves while its interpreter exits: `python exiting.py FOLDER WHERE VERB`. `test_exit.py` runs it.

It prints a line for each step that worked. With several threads, it ends in any order.
"""

import asyncio
import atexit
import sys
import threading
import time

import torch

from snapshot import Snapshot, SnapshotError, SnapshotManager, StateDict, TakeOptions

folder, where, verbs = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
STATE = StateDict(x=torch.arange(3 << 18, dtype=torch.float32), step=5)
STRIDED = StateDict(x=torch.arange(64.0).view(8, 8).t())


def app():
    return {"state": STATE, "strided": STRIDED}


def module():
    net = torch.nn.Linear(600, 600)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(600)).sum().backward()
    optimizer.step()
    return {"net": net, "optim": optimizer}


def check(path):
    live = StateDict(x=torch.zeros(3 << 18), step=0)
    Snapshot(path).restore({"state": live}, unused="ignore")
    assert torch.equal(live["x"], STATE["x"])
    assert live["step"] == 5


def work(name):
    for verb in verbs:
        path = f"{folder}/{name}-{verb}"
        if verb == "take":
            Snapshot.take(path, app())
            check(path)
        elif verb == "async":
            called = []
            pending = Snapshot.async_take(path, app())
            pending.add_done_callback(lambda _, called=called: called.append(1))
            pending.wait()
            check(path)
        elif verb == "unawaited":
            Snapshot.async_take(path, app())
        elif verb == "overlapped":
            Snapshot.async_take(path, module(), options=TakeOptions(staging="overlapped")).wait()
        elif verb == "small":  # more bytes than the budget
            Snapshot.async_take(path, app(), options=TakeOptions(memory_budget_bytes=1 << 20)).wait()
            check(path)
        elif verb == "verify":
            Snapshot.take(path, app())
            assert Snapshot(path).verify().ok
        elif verb == "nested":  # in an event loop of the application
            asyncio.run(take_in_coroutine(path))
        elif verb == "manager":
            manager = SnapshotManager(path, keep=1)
            for step in range(3):
                manager.take(step, app())
            manager.async_take(3, app())
            manager.close()
            assert SnapshotManager(path).restore_latest(app()) == 3
        elif verb == "near":  # if no uploader can be started, the step is written to the far root
            with SnapshotManager(f"{path}/far", near=f"{path}/near") as manager:
                manager.take(1, app())
        print(name, verb, flush=True)


async def take_in_coroutine(path):
    Snapshot.take(path, app())
    await asyncio.sleep(0)


def outlive():
    threading.main_thread().join()
    work("outlives")


def linger():
    threading.main_thread().join()
    ready.wait(30)
    try:
        work("daemon")
    except SnapshotError as error:
        print("daemon", "refused" if "while the interpreter exits" in str(error) else error, flush=True)
    finally:
        refused.set()


def release():
    ready.set()
    refused.wait(30)


def last():
    """The work of a handler that is called after those of the library."""
    work("late")


def save_forever():
    try:
        while True:
            Snapshot.take(f"{folder}/forever", app(), overwrite=True)
            saved.set()
    except SnapshotError as error:
        print("forever", "refused" if "while the interpreter exits" in str(error) else error, flush=True)


class Slow:
    """A state that is still collected when the interpreter exits."""

    def state_dict(self):
        collecting.set()
        while not threading._SHUTTING_DOWN:
            time.sleep(0.01)
        x = torch.zeros(1 << 22)
        for _ in range(200):  # some time in C++
            x = x.clone()
        return {"x": x}

    def load_state_dict(self, state):
        """Nothing is restored."""


def start(thread, begin=threading.Thread.start):
    """Refuse new threads as Python 3.12 does."""
    if threading._SHUTTING_DOWN:
        raise RuntimeError("can't create new thread at interpreter shutdown")
    begin(thread)


saved = threading.Event()
if "forever" in where:
    threading.Thread(target=save_forever, daemon=True).start()
    saved.wait(30)
collecting = threading.Event()
if "slow" in where:
    threading.Thread(target=Snapshot.async_take, args=(f"{folder}/slow", {"slow": Slow()}), daemon=True).start()
    collecting.wait(30)
if "threadless" in where:
    threading.Thread.start = start
ready, refused = threading.Event(), threading.Event()
if "before" in where:
    Snapshot.take(f"{folder}/before", app())
if "late" in where:
    atexit.register(last)
if "atexit" in where:
    atexit.register(work, "atexit")
if "daemon" in where:
    atexit.register(release)
    threading.Thread(target=linger, daemon=True).start()
if "outlives" in where:
    threading.Thread(target=outlive).start()
