"""The ranks of an operation, the store through which they agree, and their heartbeats."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from snapshot.errors import SnapshotError, system_limits
from snapshot.io.aio import Latch
from snapshot.io.system import PerProcess

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Heartbeats: a rank in a call beats, and the ranks that wait for it check the beats.
#
# A slow rank keeps beating and is waited for. A rank that is dead, stopped or absent does not beat.


def interval(timeout: float, world: int) -> float:
    """Return the seconds between beats: several per timeout, but no more than the store of a large group can handle."""
    return max(0.02, min(timeout / 5, max(1.0, world / 1000)))


class Heartbeat:
    """Beats in a thread while any call is in progress."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._calls: list[float] = []
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._stopped = False

    def begin(self, timeout: float) -> None:
        """Start beating for a call whose ranks expect a beat within `timeout` seconds."""
        with self._change:
            self._calls.append(timeout)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="snapshot-heart", daemon=True)
                try:
                    with system_limits("cannot start a thread"):
                        self._thread.start()
                except BaseException:
                    self._thread = None
                    self._calls.remove(timeout)
                    raise
            self._change.notify()

    def end(self, timeout: float) -> None:
        """Stop beating for that call."""
        with self._change:
            self._calls.remove(timeout)

    def stop(self) -> None:
        """Stop the thread: the group was destroyed."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._calls and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                self._change.wait(interval(min(self._calls), self._world))
                beating = bool(self._calls) and not self._stopped
            if beating:
                self._count += 1
                with contextlib.suppress(Exception):  # the waiting ranks detect a failed store
                    self._store.set(f"beat/{self._rank}", str(self._count))


class Liveness:
    """The beats of other ranks, as one waiting rank has seen them."""

    def __init__(self, store: Any, timeout: float, world: int) -> None:
        self._store = store
        self._timeout = timeout
        self._pause = interval(timeout, world)
        self._began = self._looked = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}

    def silent(self, missing: Callable[[], Iterable[int]]) -> int | None:
        """Return a missing rank that sent no heartbeat for the whole timeout, or None. Checks only occasionally."""
        now = time.monotonic()
        if now - self._looked < self._pause:
            return None
        self._looked = now
        for rank in missing():
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            last, since = self._seen.get(rank, (beat, self._began))
            if beat != last or rank not in self._seen:
                since = since if rank not in self._seen else now
                self._seen[rank] = beat, since
            if now - since > self._timeout:
                return rank
        return None


# Waits without requests: a thread with a connection of its own blocks in the store until a key exists.
#
# A timeout of such a wait would print warnings of torch, so there is none. Each party sets the key that others wait
# for, also if it fails, and a rank that stops waiting sets its own. The key is only a reason to look: what decides is
# read.

DAYS = timedelta(days=7)
"""The longest wait. The store's client counts milliseconds in 32 bits."""
WAKERS = 4
"""Maximum number of simultaneous waits of one rank, such as those of several asynchronous takes."""


class Waker:
    """A thread that waits for one key after another."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asked: SimpleQueue[tuple[str, Latch] | None] = SimpleQueue()
        self._latch = Latch()
        with system_limits("cannot start a thread"):
            threading.Thread(target=self._run, name="snapshot-waker", daemon=True).start()

    def begin(self, key: str) -> None:
        """Begin to wait for a key."""
        self._latch = Latch()
        self._asked.put((key, self._latch))

    def wait(self, seconds: float) -> bool:
        """Return True as soon as the key exists, or if the store failed; False after some seconds."""
        return self._latch.wait(seconds)

    def stop(self) -> None:
        """End the thread, after its present wait."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            key, latch = asked
            with contextlib.suppress(Exception):  # the waiting rank finds out what is wrong with the store
                self._store.wait([key], DAYS)
            latch.open()


# The ranks of an operation, and the store through which they agree.
#
# This module uses no collectives. A collective that times out breaks the user's group, and one in a second thread can
# deadlock training. Ranks meet in the store of their process group, over a connection of their own.

PAUSE = 0.02
"""Seconds between two looks at a counter in the store."""
SHARE = 0.0005
"""Seconds that the store has for each look of a rank, if there are many ranks."""


class Ranks:
    """A process group from a member's view: this rank's number, and the global numbers of all members."""

    def __init__(self, rank: int, members: tuple[int, ...], shared: Any = None, pg: ProcessGroup | None = None) -> None:
        self.rank = rank
        self.members = members
        """The number in the default process group of each rank in this group."""
        self.world = len(members)
        self.pg = pg
        self.sequence = itertools.count()
        self.managers = itertools.count()
        """Call numbers for subsets of these ranks."""
        self._shared = shared
        self._connected: tuple[Any, Heartbeat] | None = None
        self._session = ""
        self._wakers: list[Waker] = []
        """The idle ones."""
        self._free_wakers = WAKERS
        """The number that may still be created."""
        self._connecting = threading.Lock()
        self._of_meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
        self._numbers = {member: number for number, member in enumerate(members)}

    def connected(self) -> tuple[Any, Heartbeat]:
        """Return a private connection to the group's store, and a heartbeat with another one."""
        from torch.distributed.distributed_c10d import PrefixStore

        with self._connecting:
            if self._connected is None:
                # a new group on the same store must not meet the keys of a destroyed one
                self._session = f"snapshot/{self._shared.add(f'snapshot/sessions/{self.rank}', 1)}"
                store, other = (PrefixStore(self._session, _connect(self._shared)) for _ in range(2))
                self._connected = store, Heartbeat(other, self.rank, self.world)
            return self._connected

    def borrow_waker(self) -> Waker | None:
        """Return a waker of a connected rank; None if all are in use, or if the store is not served over TCP."""
        from torch.distributed.distributed_c10d import PrefixStore

        with self._connecting:
            if self._wakers:
                return self._wakers.pop()
            if not self._free_wakers:
                return None
            self._free_wakers -= 1
        connection = _connect(self._shared) if _is_served(self._shared) else self._shared
        if connection is self._shared:  # a wait would block its other users
            self._free_wakers = 0
            return None
        return Waker(PrefixStore(self._session, connection))

    def return_waker(self, waker: Waker) -> None:
        """Return a waker whose wait is over."""
        with self._connecting:
            self._wakers.append(waker)

    def stop(self) -> None:
        """Stop the heartbeat and the wakers: the group was destroyed."""
        if self._connected is not None:
            self._connected[1].stop()
        for waker in self._wakers:
            waker.stop()

    def end_together(self, seconds: float) -> None:
        """Wait until all ranks have called this, or for some seconds at most."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that serves it
            if self._shared is not None:
                self._shared.add("snapshot/ended", 1)
                while self._shared.add("snapshot/ended", 0) < self.world and time.monotonic() < end:
                    time.sleep(max(PAUSE, self.world * SHARE))

    def numbers(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of several ranks in this group, ascending. Ranks outside the group are left out."""
        return self._members_known(members)[1]

    def among(self, members: tuple[int, ...]) -> bool:
        """Return True if this rank is one of them."""
        return self._members_known(members)[2]

    def _members_known(self, members: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return the cached result for a tuple of members; tensors of one mesh share their tuple."""
        known = self._of_meshes.get(id(members))
        if known is None:
            found = tuple(sorted(self._numbers[member] for member in members if member in self._numbers))
            if len(self._of_meshes) > 1000:
                self._of_meshes.clear()
            known = self._of_meshes[id(members)] = members, found, self.rank in found
        return known

    def number(self, member: int) -> int | None:
        """Return a global rank's number in this group, or None if it is not a member."""
        return self._numbers.get(member)


SOLO = Ranks(0, (0,))
# A forked child keeps the parent's groups but never uses them: freeing a store in the child would delete its file, or
# close the server connection, of the parent.
_groups: PerProcess[dict[int, tuple[int, Any, Ranks]]] = PerProcess(dict, dict.copy)


def ranks_of(pg: ProcessGroup | None) -> Ranks:
    """Return the ranks of a process group, or of the default one. Without a group, return a single rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if pg is not None:
            raise SnapshotError("torch.distributed must be initialised before a process group is passed")
        return SOLO
    pg = dist.group.WORLD if pg is None else pg
    if not isinstance(pg, dist.ProcessGroup):
        raise SnapshotError("this rank is not a member of the given process group; only members may call")
    members = tuple(dist.get_process_group_ranks(pg))
    if len(members) == 1:
        return Ranks(0, members)
    store = dist.distributed_c10d._world.pg_map[pg][1]
    groups = _groups.get()
    known = groups.get(id(pg))
    if known is not None and known[0] == os.getpid() and known[1] is store:
        return known[2]
    for key, (_, _, old) in list(groups.items()):
        if old.pg not in dist.distributed_c10d._world.pg_map:
            old.stop()
            groups.pop(key, None)  # another thread may have removed it
    if store is None:
        raise SnapshotError("this process group has no store, which its ranks need to agree (an MPI backend?)")
    ranks = Ranks(dist.get_rank(pg), members, store, pg)
    groups[id(pg)] = os.getpid(), store, ranks
    return ranks


def group_of_this_rank() -> ProcessGroup | None:
    """Return a group of this rank alone, for an operation that other ranks do not take part in."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    known = _alone.get()
    if not known or known[0] is not dist.group.WORLD:
        known[:] = [dist.group.WORLD, dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    group: ProcessGroup = known[1]
    return group


_alone: PerProcess[list[Any]] = PerProcess(list, list)
"""The default process group, and the group of this rank alone that was created under it."""


def _is_served(store: Any) -> bool:
    """Return True if a store is a connection to a server, which answers a wait as soon as the key exists."""
    from torch.distributed.distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = getattr(store, "underlying_store", None)
    return type(store).__name__ == "TCPStore"


def _connect(store: Any) -> Any:
    """Return a private connection to a store: a wait on a shared one would block its other users."""
    from torch.distributed.distributed_c10d import PrefixStore

    if hasattr(store, "clone"):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()
    if isinstance(store, PrefixStore):
        # the prefix is not accessible, so only the inner store can be reconnected
        return store
    if hasattr(store, "host"):  # a TCPStore
        return type(store)(store.host, store.port, is_master=False, wait_for_workers=False)
    return store
