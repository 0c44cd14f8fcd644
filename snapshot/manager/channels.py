"""The questions on which the ranks of a manager agree, in whatever process group there is at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from snapshot.distributed.group import ranks_of
from snapshot.manager.agreement import StepVote
from snapshot.options import Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Channels:
    """An `StepVote` for each question, made when it is first asked."""

    def __init__(self, pg: ProcessGroup | None, timeout: float | None) -> None:
        self._pg = pg
        self._timeout = timeout
        self._group: Any = None
        self._ranks = ranks_of(pg)
        self._number = -1
        """Of this manager, among those of the group."""
        self._agreements: dict[str, StepVote] = {}

    def ask(self, question: str, wish: bool, *, leader_alone: bool = False) -> bool:
        """Whether all act now; `wish`: this rank wants to. With `leader_alone` only rank 0's wish counts."""
        group = self._pg
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not self._group:  # to ask for the ranks each time would cost more than all the rest
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
