"""What a process must not have more and more of: descriptors, threads, memory, keys in a store, and what it counts."""

import ctypes
import gc
import os
import threading
import time

import torch.distributed as dist

from snapshot.io.arena import arena, release_memory
from snapshot.save import step_barrier
from snapshot.save.take_slots import take_slots
from snapshot.save.transaction import pending_saves


def files_of(folder):
    """All files below a folder, by their names in it."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


class Leaks:
    """Looks now and then, when nothing is under way; at the end it judges."""

    def __init__(self, world):
        self.world = world
        self.seen = []

    def look(self, held):
        """Nothing is under way, so nothing may be counted as such; note the rest. `held`: bytes that the test has."""
        for thread in threading.enumerate():
            if thread.name in ("snapshot-callback", "snapshot-io-store"):
                thread.join(10)
        release_memory()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        end = time.monotonic() + 10
        while (
            arena()._out or pending_saves() or take_slots()._taken or step_barrier.pending_copies()
        ) and time.monotonic() < end:
            time.sleep(0.01)
        assert arena()._out == 0, arena()
        assert not pending_saves(), pending_saves()
        assert not take_slots()._taken
        assert take_slots()._pool.used == 0
        assert step_barrier.pending_copies() == ()
        self.seen.append(
            {
                "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
                "MiB": resident() - (held >> 20),
                "keys": keys() if self.world > 1 else 0, "objects": len(gc.get_objects()),
            }
        )  # fmt: skip

    def judge(self):
        """The last quarter has no more than the second one had, but for some slack."""
        count = len(self.seen)
        if count < 8:
            return
        early, late = self.seen[count // 4 : count // 2], self.seen[-(count // 4) :]
        for name, slack in (("descriptors", 2), ("threads", 3), ("MiB", 48), ("keys", 8), ("objects", 20_000)):
            before, after = max(each[name] for each in early), min(each[name] for each in late)
            assert after <= before + slack, f"{name} leak: {[each[name] for each in self.seen]}"

    def figures(self):
        return {f"{name} (first, middle, last)": [s[name] for s in (
            self.seen[0], self.seen[len(self.seen) // 2], self.seen[-1])] for name in self.seen[0]}  # fmt: skip


def resident(name="VmRSS"):
    """Memory of this process, in MiB; `VmHWM`: the most that it ever had."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith(name))


def keys():
    """How many keys there are in the store of the process group."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.num_keys()
