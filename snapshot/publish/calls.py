"""The comparison of what the ranks call `publish` with. A version must never mix two steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import SnapshotError


class Call(msgspec.Struct, array_like=True):
    """A rank's call."""

    calls: int
    """Number of its calls so far."""
    step: int
    url: str
    full_every: int
    keep_full: int
    state: str
    """Digest of the description of its tensors."""


class Agreed(msgspec.Struct, array_like=True):
    """The leader's reply to the calls of all ranks."""

    calls: int
    """The highest number of calls of a rank."""
    known: bool
    """True if all ranks have the tensors of the call before."""
    wrong: str = ""
    """The difference, if the calls do not fit together."""
    steps_differ: bool = False
    """True if a rank with fewer calls was late, rather than absent from a call."""


def compare_calls(ranks: Sequence[Call], known: Sequence[str]) -> Agreed:
    """Compare the calls of all ranks. `known` are the descriptions of the call before.

    >>> one, two = Call(1, 10, "a", 50, 2, ""), Call(2, 20, "a", 50, 2, "")
    >>> compare_calls([one, two], []).wrong
    'step: 10 on rank 0, 20 on rank 1; calls: 1 on rank 0, 2 on rank 1'
    """
    wrong = []
    for field in ("step", "url", "full_every", "keep_full", "calls"):
        values = [getattr(rank, field) for rank in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            wrong.append(f"{field}: {values[0]} on rank 0, {values[other]} on rank {other}")
    steps_differ = len({rank.step for rank in ranks}) > 1
    same = [rank.state for rank in ranks] == list(known)
    return Agreed(max(rank.calls for rank in ranks), same, "; ".join(wrong), steps_differ)


def expect_same_plans(exchange: Exchange, plan: str) -> None:
    """Raise on all ranks unless all of them have the same plan, given by its digest, and the memory for it."""

    def lead(plans: list[str]) -> bool:
        other = next((rank for rank, each in enumerate(plans) if each != plans[0]), None)
        if other is not None:
            raise SnapshotError(f"names must be the same map on all ranks, got another one on rank {other}")
        return True

    if not exchange.alone:
        exchange.agree(plan, lead, str, bool)
