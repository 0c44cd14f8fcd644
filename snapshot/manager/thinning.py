"""Policies that thin out a run: to a limit of bytes, and by age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snapshot.events import log
from snapshot.manager.policies import Policy, Taken, checked_policy, choose_kept
from snapshot.text import parse_size, size_text


@dataclass(frozen=True)
class KeepWithin(Policy):
    """Keep the newest steps whose files fit into a limit: bytes, or a text such as `"2TiB"`.

    Files that steps share count once, and manifests, pinned steps and the bases of kept steps count, too. Suspect steps
    get the space that good ones leave. The newest good step and pinned ones stay in any case, with a warning if they
    alone are above the limit.

    `among`: a policy, or a number of the latest, that says which steps to choose from; None chooses from all. In a
    union, `KeepWithin` limits its own choice alone, so pass other policies as `among`.

    >>> taken = [Taken(step, sizes={f"data/{step}": 400}) for step in (10, 20, 30)]
    >>> sorted(KeepWithin("1kB").keep(taken, now=0))
    [20, 30]
    """

    limit: int | str
    among: Policy | int | None = None
    _over: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Roots that are above the limit, which was logged."""

    needs_sizes = True

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, (int, str)):
            raise TypeError(f"KeepWithin: limit must be bytes, or a text such as '2TiB', got {self.limit!r}")
        if isinstance(self.limit, str) and parse_size(self.limit) is None:
            raise ValueError(f"KeepWithin: limit must be written as '500GiB' or '2TB', got {self.limit!r}")
        if self._bytes < 1:
            raise ValueError(f"KeepWithin: limit must be at least 1 byte, got {self.limit!r}")
        checked_policy(self.among)

    @property
    def _bytes(self) -> int:
        return self.limit if isinstance(self.limit, int) else parse_size(self.limit) or 0

    @property
    def inner(self) -> tuple[Policy, ...]:
        among = checked_policy(self.among)
        return () if among is None else (among,)

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        kept, files = find_staying(taken, now)
        chosen = choose_kept(checked_policy(self.among), taken, now).keys() - kept
        nbytes = sum(files.values())
        for suspect in (False, True):
            for each in sorted(taken, key=lambda each: each.step, reverse=True):
                if each.step in chosen and each.suspect == suspect:
                    nbytes += sum(size for file, size in each.sizes.items() if file not in files)
                    if nbytes > self._bytes:
                        nbytes = sum(files.values())  # suspect ones may still fit
                        break
                    kept.add(each.step)
                    files |= each.sizes
        return kept - {each.step for each in taken if each.pinned}  # what pinned them says why

    def settle(self, where: str, taken: Sequence[Taken], now: float) -> None:
        """Log a warning if the steps that stay in any case are above the limit, once until they are not."""
        nbytes = sum(find_staying(taken, now)[1].values())
        if nbytes > self._bytes and where not in self._over:
            there = f"{size_text(nbytes)} in steps that must stay (the newest good one, pinned, unexpired, bases)"
            log.warning("%s: must have at most %s, got %s; raise the limit, or unpin steps", where, self._text, there)
        (self._over.add if nbytes > self._bytes else self._over.discard)(where)

    @property
    def _text(self) -> str:
        return self.limit if isinstance(self.limit, str) else size_text(self.limit)

    def __str__(self) -> str:
        return " of ".join([f"within {self._text}", *map(str, self.inner)])


def find_staying(taken: Sequence[Taken], now: float) -> tuple[set[int], dict[str, int]]:
    """Return the steps that no limit removes, and their physical files."""
    newest = max((each.step for each in taken if each.counts and not each.suspect), default=None)
    files: dict[str, int] = {}
    stay = [each for each in taken if each.pinned or each.step == newest or (each.expires or 0) > now]
    for each in stay:
        files |= each.sizes
    return {each.step for each in stay}, files


@dataclass(frozen=True)
class KeepSpread(Policy):
    """Keep steps of all ages, ever fewer the older they are: at most two for each doubling of the distance in steps.

    For each power of two, the numbers of the steps are cut into cells of that length, and the first step of each of the
    newest two cells that have one is kept. A step that is first in its cell stays first. So the result does not depend
    on when earlier steps were removed.

    >>> sorted(KeepSpread().keep([Taken(step) for step in range(100)], now=0))
    [0, 64, 80, 88, 92, 96, 98, 99]
    """

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        steps = sorted((each.step for each in taken), reverse=True)
        kept: set[int] = set()
        for level in range(max(steps, default=0).bit_length() + 1):
            first: Mapping[int, int] = {step >> level: step for step in steps}  # the last of a cell is its lowest
            kept |= {first[cell] for cell in sorted(first)[-2:]}
        return kept

    def __str__(self) -> str:
        return "spread"
