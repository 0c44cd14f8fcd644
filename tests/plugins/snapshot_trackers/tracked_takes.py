"""Takes that a tracker is told of, and which of their bytes are read."""

import ctypes
import os
import re
import struct
from contextlib import contextmanager

import torch

from snapshot import Snapshot, SnapshotManager, StateDict
from snapshot.events import add_handler, remove_handler
from snapshot_trackers.trackers import Tracker


def state(bad=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    if bad:
        with torch.no_grad():
            model.weight[0, 0] = torch.nan
    return {"model": model, "progress": StateDict(step=1)}


def digest_of(step):
    return re.search(r'"digest":"(xxh3:[0-9a-f]{32})"\}$', (step / ".snapshot_metadata").read_text())[1]


@contextmanager
def handling(*handlers):
    for each in handlers:
        add_handler(each)
    try:
        yield
    finally:
        for each in handlers:
            remove_handler(each)
            if isinstance(each, Tracker):
                each.close()


class Reads:
    """Which files of committed snapshots any process reads, as the kernel tells."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._descriptor >= 0

    def __call__(self, event):
        if event.name == "committed":
            for each in (event.path, f"{event.path}/data"):
                assert self._libc.inotify_add_watch(self._descriptor, os.fsencode(each), 0x1) >= 0  # IN_ACCESS

    def names(self):
        found = []
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return found
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            if not mask & 0x40000000:  # a folder that was listed
                found.append(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return found


def take_two(root, tracker):
    """Take a good and a suspect step. Return their digests, and which of their files were read."""
    reads = Reads()
    with handling(reads, tracker):
        manager = SnapshotManager(root, signals=())
        manager.take(100, state())
        manager.async_take(200, state(bad=True)).wait()
    found = reads.names()
    assert Snapshot(root / "step-100").verify()
    assert reads.names(), "the kernel tells of reads"
    return [digest_of(root / f"step-{step}") for step in (100, 200)], found
