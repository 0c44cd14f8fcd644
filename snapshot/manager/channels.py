"""Votes of a manager's ranks, in the process group that currently exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from snapshot.distributed.group import ranks_of
from snapshot.manager.agreement import StepVote
from snapshot.options import Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Channels:
    """A `StepVote` for each question, created on its first use."""

    def __init__(self, pg: ProcessGroup | None, timeout: float | None) -> None:
        self._pg = pg
        self._timeout = timeout
        self._group: Any = None
        self._ranks = ranks_of(pg)
        self._number = -1
        """Number of this manager within the group."""
        self._agreements: dict[str, StepVote] = {}

    def ask(self, question: str, wish: bool, *, leader_alone: bool = False) -> bool:
        """Return True if all ranks act now. `wish`: this rank wants to; with `leader_alone` only rank 0's counts."""
        group = self._pg
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not self._group:  # looking up the ranks at each call would dominate its cost
            self._group, self._ranks, self._number, self._agreements = group, ranks_of(self._pg), -1, {}
        if self._ranks.world == 1:
            return wish
        if question not in self._agreements:
            self._agreements[question] = self._agreement(question)
        return self._agreements[question].ask(wish and not (leader_alone and self._ranks.rank))

    def _agreement(self, question: str) -> StepVote:
        ranks = self._ranks
        if self._number < 0:
            self._number = next(ranks.managers)
        timeout = Settings.current().timeout if self._timeout is None else self._timeout
        store, _ = ranks.connected()
        return StepVote(store, f"manager/{self._number}/{question}", ranks.rank, ranks.world, timeout)
