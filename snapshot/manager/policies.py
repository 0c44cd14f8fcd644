"""Policies of the snapshots to keep, combined with `|`, and the plan of a removal.

Everything that removes old snapshots uses them: managers, near folders, published versions and their copies,
`snapshot prune`, and the Lightning callback. An application's policy may read snapshots, so none runs on the loop.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import index
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from snapshot.errors import SnapshotError
from snapshot.text import duration_text, seconds_of


@dataclass(frozen=True, slots=True)
class Taken:
    """A committed snapshot, as a policy sees it."""

    step: int
    created: float = 0.0
    """Seconds since the epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    suspect: bool = False
    """True if a guard found something in its state."""
    expires: float | None = None
    """Time when its lifetime is over, in seconds since the epoch."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each physical file, by a key that steps share with it, for policies with `needs_sizes`."""
    pinned: bool = False
    """True if it stays whatever the policy says, for policies with `needs_sizes`."""
    counts: bool = True
    """False for a step that no policy decides about, such as a damaged one, and that only takes space."""


class Policy(ABC):
    """Rule that says which snapshots are kept. `a | b` keeps those that either keeps.

    A policy may read the snapshots. Takes don't wait for it, and if it raises, nothing is removed.
    """

    needs_sizes: ClassVar[bool] = False
    """True if `keep` gets all steps at once, also suspect ones and those with `counts=False`, with their sizes."""

    @property
    def inner(self) -> tuple[Policy, ...]:
        """The policies that this one asks."""
        return ()

    def settle(self, where: str, taken: Sequence[Taken], now: float) -> None:  # noqa: B027 - most have nothing to do
        """Learn which steps stay below `where`. Called for policies that need sizes, once that is decided."""

    @abstractmethod
    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        """Return which steps of `taken`, which is in any order, to keep. `now` is in seconds since the epoch."""

    def __or__(self, other: object) -> Policy:
        return Union((*split_policy(self), *split_policy(other))) if isinstance(other, Policy) else NotImplemented


@dataclass(frozen=True)
class KeepLatest(Policy):
    """Keep the latest `n` steps.

    >>> sorted(KeepLatest(2).keep([Taken(30), Taken(10), Taken(20)], now=0))
    [20, 30]
    """

    n: int

    def __post_init__(self) -> None:
        _count("KeepLatest", self.n)

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        return set(heapq.nlargest(self.n, (each.step for each in taken)))

    def __str__(self) -> str:
        return "latest" if self.n == 1 else f"latest {self.n}"


@dataclass(frozen=True)
class KeepBest(Policy):
    """Keep the `n` best steps by a metric. A suspect one never counts, nor one whose metric is NaN or missing.

    >>> sorted(KeepBest("loss").keep([Taken(1, 0, {"loss": 0.5}), Taken(2, 0, {"loss": 0.7})], now=0))
    [1]
    """

    metric: str
    n: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        _count("KeepBest", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise TypeError(f"KeepBest: metric must be a non-empty str, got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"KeepBest: mode must be 'min' or 'max', got {self.mode!r}")

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        return set(self.ranked(taken)[: self.n])

    def ranked(self, taken: Sequence[Taken]) -> list[int]:
        """Return the steps that have the metric, best first."""
        sign = 1 if self.mode == "min" else -1
        having = [
            (sign * value, -each.step)
            for each in taken
            if not each.suspect and not math.isnan(value := each.metrics.get(self.metric, math.nan))
        ]
        return [-step for _, step in sorted(having)]

    def __str__(self) -> str:
        return f"best {self.n} by {self.metric}" if self.n > 1 else f"best by {self.metric}"


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keep each step that is a multiple of `n`.

    >>> sorted(KeepEvery(1000).keep([Taken(500), Taken(1000), Taken(2000)], now=0))
    [1000, 2000]
    """

    n: int

    def __post_init__(self) -> None:
        _count("KeepEvery", self.n)

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        return {each.step for each in taken if each.step % self.n == 0}

    def __str__(self) -> str:
        return f"every {self.n:,}"


@dataclass(frozen=True)
class KeepFor(Policy):
    """Keep the steps of a period until now: seconds, a `timedelta`, or a text such as `"7d"`.

    >>> sorted(KeepFor("1h").keep([Taken(1, created=0), Taken(2, created=9000)], now=10_000))
    [2]
    """

    duration: float | timedelta | str

    def __post_init__(self) -> None:
        seconds_of(self.duration, "KeepFor")

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        since = now - seconds_of(self.duration, "KeepFor")
        return {each.step for each in taken if each.created >= since}

    def __str__(self) -> str:
        return f"within {duration_text(seconds_of(self.duration, 'KeepFor'))}"


@dataclass(frozen=True)
class Union(Policy):
    """Keep the snapshots that any of several policies keeps; created by `|`."""

    policies: tuple[Policy, ...]

    @property
    def inner(self) -> tuple[Policy, ...]:
        return self.policies

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        return set().union(*(each.keep(taken, now) for each in self.policies))

    def __str__(self) -> str:
        return " | ".join(map(str, self.policies))


def split_policy(policy: Policy) -> tuple[Policy, ...]:
    """Return the policies in a union, or the policy itself."""
    return policy.policies if isinstance(policy, Union) else (policy,)


def every_policy(policy: Policy | None) -> list[Policy]:
    """Return a policy and all that it asks, directly or not."""
    return [policy, *(each for inner in policy.inner for each in every_policy(inner))] if policy is not None else []


def needs_sizes(policy: Policy | None) -> bool:
    """Return True if a policy, or one in it, needs the sizes of the steps."""
    return any(each.needs_sizes for each in every_policy(policy))


def choose_kept(policy: Policy | None, taken: Sequence[Taken], now: float) -> dict[int, list[str]]:
    """Return the kept steps with the reasons. The newest good one is always kept; without a policy all are.

    Suspect steps are decided among themselves. So none takes the place of a good one, and none is the best. The newest
    of them is kept, too, unless a policy needs sizes. A step with a lifetime is kept until that is over, and counts for
    no policy.
    Raise SnapshotError if the policy does.
    """
    found: dict[int, list[str]] = {}
    sized = needs_sizes(policy)
    for suspect in sorted({each.suspect for each in taken if each.counts}):
        these = [each for each in taken if each.counts and each.suspect == suspect]
        live = [each for each in these if each.expires is None or each.expires > now]
        lasting = [each for each in live if each.expires is None]  # no step goes for one that goes later anyway
        asked = [replace(each, suspect=False, metrics={}) for each in lasting] if suspect else lasting
        kept = {each.step: [f"until {time_text(each.expires)}"] for each in live if each.expires is not None}
        for each in split_policy(policy) if policy is not None and live else ():
            if not asked and not each.needs_sizes:
                continue
            for step in _ask(each, taken if each.needs_sizes else asked, now) & {one.step for one in live}:
                kept.setdefault(step, []).append(str(each))
        if policy is None:
            kept = {each.step: ["no policy"] for each in live} | kept
        if not suspect or (live and not sized):
            kept.setdefault(max(each.step for each in (live if suspect else these)), ["newest"])
        found |= {step: [f"suspect: {each}" for each in why] if suspect else why for step, why in kept.items()}
    return found


def _ask(policy: Policy, taken: Sequence[Taken], now: float) -> set[int]:
    try:
        return {index(step) for step in policy.keep(taken, now)}
    except Exception as error:
        why = f"{type(policy).__name__}.keep failed: {type(error).__name__}: {error}"
        raise SnapshotError(f"{why}; nothing is removed") from error


def time_text(seconds: float) -> str:
    """Format a time since the epoch.

    >>> time_text(0)
    '1970-01-01 00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _count(name: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{name}: n must be an integer of at least 1, got {n!r}")


class RetentionPlan(NamedTuple):
    """Decision about each of several snapshots."""

    kept: dict[int, str]
    """Steps to keep, with the reason."""
    removed: list[int]
    """Steps to remove, the oldest first."""


def plan_retention(
    chosen: Mapping[int, Sequence[str]],
    steps: Collection[int],
    *,
    held: Mapping[int, str] = MappingProxyType({}),
    find_needed: Callable[[list[int]], Mapping[int, str]] = lambda removed: {},
) -> RetentionPlan:
    """Decide what to keep and what to remove.

    Args:
        chosen: The steps that the policy keeps, with the reasons, from `choose_kept`.
        steps: All steps to decide about. Others are removed if nothing holds them.
        held: The steps that stay in any case, with the reason. An empty reason holds nothing.
        find_needed: Returns those of the steps to remove that the remaining ones rely on, with the reason.

    >>> chosen = choose_kept(KeepLatest(1), [Taken(10), Taken(20), Taken(30), Taken(40)], now=0)
    >>> bases = {10: "the base of 20"}
    >>> plan_retention(chosen, [10, 20, 30, 40], held={20: "pinned"}, find_needed=lambda removed: bases)
    RetentionPlan(kept={40: 'latest', 20: 'pinned', 10: 'the base of 20'}, removed=[30])
    """
    kept = {step: ", ".join(why) for step, why in chosen.items()}
    left = {*steps} - kept.keys()
    kept |= {step: held[step] for step in sorted(left) if held.get(step)}
    kept |= find_needed(sorted(left - kept.keys()))
    return RetentionPlan(kept, sorted(left - kept.keys()))


def checked_policy(keep: Any, *, metrics: bool = True) -> Policy | None:
    """Return the policy for an argument `keep`: a policy, a number of the latest to keep, or None for all.

    Raise TypeError or ValueError for other values. `metrics`: False if what is kept has no metrics, and
    no sizes.
    """
    if isinstance(keep, int) and not isinstance(keep, bool):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        return KeepLatest(keep)
    if keep is not None and not isinstance(keep, Policy):
        raise TypeError(
            f"keep must be a number or a policy (KeepLatest(n), KeepBest(metric), ..., or several with |), got {keep!r}"
        )
    if not metrics and any(isinstance(each, KeepBest) for each in every_policy(keep)):
        raise ValueError(f"keep must be a policy without KeepBest, since versions have no metrics, got {keep}")
    if not metrics and needs_sizes(keep):
        raise ValueError(f"keep must be a policy without KeepWithin, since versions have no sizes, got {keep}")
    return keep
