"""Agreements of a group of ranks, kept for the next take of the same structure, which then needs fewer exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from snapshot.distributed.group import Ranks
from snapshot.io.system import PerProcess

MOST_PLANS = 8


@dataclass(frozen=True)
class KnownReplication:
    """A plan that the ranks agreed on."""

    structure: str
    """A digest of all ranks' structures."""
    paths: frozenset[str]
    """Paths of the replicated entries."""
    written_elsewhere: frozenset[tuple[str, int]] = frozenset()
    """Boxes that another rank writes, as (path, number of the piece)."""


class ReplicationMemory:
    """The cached plans of one group of ranks."""

    def __init__(self) -> None:
        self._plans: dict[str, KnownReplication] = {}
        self.restored: KnownReplication | None = None
        """The agreed plan of the snapshot that was restored last."""

    def find(self, structure: str) -> KnownReplication | None:
        """Return the plan for this rank's structure."""
        return self._plans.get(structure)

    def keep(self, structure: str, plan: KnownReplication) -> None:
        """Cache the plan of a committed snapshot."""
        self._plans.pop(structure, None)
        self._plans[structure] = plan
        while len(self._plans) > MOST_PLANS:
            self._plans.pop(next(iter(self._plans)))

    def keep_restored(self, plan: KnownReplication) -> None:
        """Cache the agreed plan of a restored snapshot."""
        self.restored = plan


_memories: PerProcess[WeakKeyDictionary[Ranks, ReplicationMemory]] = PerProcess(WeakKeyDictionary)


def replication_memory(ranks: Ranks) -> ReplicationMemory:
    """Return the cached plans of a group of ranks."""
    memories = _memories.get()
    return memories.get(ranks) or memories.setdefault(ranks, ReplicationMemory())


def remember_replication(ranks: Ranks, structure: str, plan: KnownReplication) -> None:
    """Cache the plan of a committed snapshot, for the next take of the same structure. A copy has none."""
    if ranks.world > 1 and structure:
        replication_memory(ranks).keep(structure, plan)
