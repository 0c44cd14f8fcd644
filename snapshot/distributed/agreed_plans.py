"""What the ranks of a group have agreed on before: the next take of the same structure needs fewer exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from snapshot.distributed.group import Ranks
from snapshot.per_process import PerProcess

MOST_PLANS = 8


@dataclass(frozen=True)
class KnownPlan:
    """A plan that the ranks agreed on."""

    structure: str
    """A digest of all ranks' structures."""
    paths: frozenset[str]
    """The entries that are the same on all ranks."""
    written_elsewhere: frozenset[tuple[str, int]] = frozenset()
    """(Path, number of the piece) of the boxes that another rank writes."""


class PlanMemory:
    """The plans that one group of ranks has agreed on."""

    def __init__(self) -> None:
        self._plans: dict[str, KnownPlan] = {}
        self.restored: KnownPlan | None = None
        """What the ranks of the snapshot that was restored last had agreed on."""

    def find(self, structure: str) -> KnownPlan | None:
        """Return the plan of this rank's structure."""
        return self._plans.get(structure)

    def keep(self, structure: str, plan: KnownPlan) -> None:
        """Keep a plan that has led to a snapshot."""
        self._plans.pop(structure, None)
        self._plans[structure] = plan
        while len(self._plans) > MOST_PLANS:
            self._plans.pop(next(iter(self._plans)))

    def keep_restored(self, plan: KnownPlan) -> None:
        """Keep what the ranks of a restored snapshot had agreed on."""
        self.restored = plan


_memories: PerProcess[WeakKeyDictionary[Ranks, PlanMemory]] = PerProcess(WeakKeyDictionary)


def plan_memory(ranks: Ranks) -> PlanMemory:
    """Return what a group of ranks has agreed on."""
    memories = _memories.get()
    memory = memories.get(ranks)
    if memory is None:
        memory = memories[ranks] = PlanMemory()
    return memory


def keep_plan(ranks: Ranks, structure: str, plan: KnownPlan) -> None:
    """Keep a plan that has led to a snapshot: the next take of the same structure goes by it."""
    if ranks.world > 1:
        plan_memory(ranks).keep(structure, plan)
