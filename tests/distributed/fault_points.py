"""Every point of a verb at which a rank may die, stop or be slow; and what one rank does when it comes to one.

A point is a call of the application, an operation of the storage, a change in the ranks' store (their exchanges are
made of these), or a collective. A run without faults lists those of each rank, in order.
"""

import contextlib
import re
import threading
import time
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist

from snapshot import RestoreOptions, Snapshot, StateDict
from snapshot.distributed.group import Ranks
from snapshot.testing import Tap, tapped
from tests.distributed import failing_ranks as ranks

CHANGES = ("set", "add", "compare_set", "delete_key")
VALUE = 7.0
"""Of what is taken; the old snapshot holds another."""


class Points(Tap):
    """Notes the points that a rank comes to, and does something before one of them."""

    def __init__(self, at=None, act=None):
        self.met = []
        self._at, self._act = at, act
        self._counts = Counter()
        self._lock = threading.Lock()

    def meet(self, name):
        with self._lock:
            self._counts[name] += 1
            point = name if self._counts[name] == 1 else f"{name} #{self._counts[name]}"
            self.met.append(point)
        if point == self._at:
            self._act()

    async def before(self, operation):
        path = re.sub(r"(data/|take-)[0-9a-z]+", r"\1*", operation.path)
        self.meet(f"storage {operation.name} {path}".rstrip())


class _Store:
    """A process group's store, whose changes are points. What only looks there may be done any number of times."""

    def __init__(self, store, meet):
        self._store, self._meet = store, meet

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name not in CHANGES:
            return method

        def call(key, *arguments):
            self._meet(f"store {name} {re.sub(r'^call/[0-9]+/', '', key)}")
            return method(key, *arguments)

        return call


class Met(StateDict):
    """Its two methods are points; `handed` says that it was handed something."""

    handed = False

    def __init__(self, meet, values):
        super().__init__(values)
        self._meet = meet

    def state_dict(self):
        self._meet("state_dict")
        return super().state_dict()

    def load_state_dict(self, state):
        self._meet("load_state_dict")
        self.handed = True
        super().load_state_dict(state)


@contextlib.contextmanager
def watched(points):
    """Inside, all that this rank does meets its points, on storages that are opened as `tapped+...`."""
    connected, broadcast = Ranks.connected, dist.broadcast

    def connect(self):
        store, heart = connected(self)
        return _Store(store, points.meet), heart

    def pass_on(*arguments, **options):
        points.meet("broadcast")
        return broadcast(*arguments, **options)

    with (
        tapped("tapped", points),
        mock.patch.object(Ranks, "connected", connect),
        mock.patch.object(dist, "broadcast", pass_on),
    ):
        yield


def state(rank, value):
    """What a rank holds: of its own, and what all share, which is worth reading once for all."""
    return {"own": torch.full((30_000,), value + rank), "shared": torch.full((400_000,), value), "mine": rank}


def act(verb, path, which=None, point=None, what=None, timeout=10.0, seconds=0.0):
    """All ranks do it, and one of them does something else at a point.

    Returns the rank's points, whether what it has is right, and whether it was handed anything; of a verb that raises,
    the exception is returned, with `handed`.
    """
    rank = dist.get_rank()
    do = {**ranks.ACTS, "slow": lambda: time.sleep(seconds)}.get(what)
    points = Points(point if rank == which else None, do)
    place, saves = f"tapped+file://{path}", verb in ("take", "async_take")
    app = {"s": Met(points.meet, state(rank, VALUE if saves else 0.0))}
    try:
        with watched(points):
            points.meet("call")
            if saves:
                ranks.save(verb, place, app, timeout=timeout, overwrite=True)
            else:
                once = verb == "read_once"
                Snapshot(place).restore(
                    app, timeout=timeout, options=RestoreOptions(read_once=once, memory_budget_bytes=4 << 20)
                )
            points.meet("return")
    except Exception as error:
        error.handed = app["s"].handed
        raise
    right = all(torch.equal(app["s"][name], value) for name, value in state(rank, VALUE).items() if name != "mine")
    return points.met, right, app["s"].handed
