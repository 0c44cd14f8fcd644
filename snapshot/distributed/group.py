"""Who takes part in a verb, and the store through which they agree.

Nothing here is a collective: a collective that times out leaves the user's group broken, and one on a second thread can
deadlock training. Ranks meet in the store of their process group, over a connection of our own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from snapshot.distributed.heartbeat import Heartbeat
from snapshot.errors import SnapshotError
from snapshot.per_process import PerProcess

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """A process group as its members see it: this rank's number in it, and the numbers of all in the world."""

    def __init__(self, rank: int, members: tuple[int, ...], shared: Any = None, pg: ProcessGroup | None = None) -> None:
        self.rank = rank
        self.members = members
        """Each rank's number in the default process group, by its number in this one."""
        self.world = len(members)
        self.pg = pg
        self.sequence = itertools.count()
        self.managers = itertools.count()
        """Numbers for those who agree among these ranks without calls."""
        self._shared = shared
        self._connected: tuple[Any, Heartbeat] | None = None
        self._connecting = threading.Lock()
        self._of_meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
        self._numbers = {member: number for number, member in enumerate(members)}

    def connected(self) -> tuple[Any, Heartbeat]:
        """Return a connection of our own to the group's store, and the heart that beats through another."""
        with self._connecting:
            if self._connected is None:
                # who destroys a group and makes another one on the same store would meet the first one's keys
                session = self._shared.add(f"snapshot/sessions/{self.rank}", 1)
                store, other = (
                    dist.distributed_c10d.PrefixStore(f"snapshot/{session}", _connect(self._shared)) for _ in range(2)
                )
                self._connected = store, Heartbeat(other, self.rank, self.world)
            return self._connected

    def stop(self) -> None:
        """Stop the heartbeat: the group is gone."""
        if self._connected is not None:
            self._connected[1].stop()

    def numbers(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of several, ascending; who does not take part has none."""
        return self._members_known(members)[1]

    def among(self, members: tuple[int, ...]) -> bool:
        """Whether this rank is one of them."""
        return self._members_known(members)[2]

    def _members_known(self, members: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Tensors of one mesh share their tuple: what is found out of it is kept beside it."""
        known = self._of_meshes.get(id(members))
        if known is None:
            found = tuple(sorted(self._numbers[member] for member in members if member in self._numbers))
            if len(self._of_meshes) > 1000:
                self._of_meshes.clear()
            known = self._of_meshes[id(members)] = members, found, self.rank in found
        return known

    def number(self, member: int) -> int | None:
        """Return the number in this group of a rank of the default one; None for who does not take part."""
        return self._numbers.get(member)


SOLO = Ranks(0, (0,))
# A forked child keeps the parent's groups, and never uses them: a store that is freed in the child takes its file, or
# the connection to its server, from the parent.
_groups: PerProcess[dict[int, tuple[int, Any, Ranks]]] = PerProcess(dict, dict.copy)


def ranks_of(pg: ProcessGroup | None) -> Ranks:
    """Return the ranks of a process group, or of the default one; one rank alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        if pg is not None:
            raise SnapshotError("a process group was given, and torch.distributed is not initialised")
        return SOLO
    pg = dist.group.WORLD if pg is None else pg
    if not isinstance(pg, dist.ProcessGroup):
        raise SnapshotError("this rank is no member of the process group that was given; only members may call")
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
            del groups[key]
    if store is None:
        raise SnapshotError("this process group has no store (an MPI backend?), through which its ranks could agree")
    ranks = Ranks(dist.get_rank(pg), members, store, pg)
    groups[id(pg)] = os.getpid(), store, ranks
    return ranks


def _connect(store: Any) -> Any:
    """Return a connection of our own to a store: a wait on a shared one would hold it for whoever else uses it."""
    if hasattr(store, "clone"):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()
    if isinstance(store, dist.distributed_c10d.PrefixStore):
        # the prefix cannot be asked for, so only what lies beneath could be connected to anew
        return store
    if hasattr(store, "host"):  # a TCPStore
        return type(store)(store.host, store.port, is_master=False, wait_for_workers=False)
    return store
