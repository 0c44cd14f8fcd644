"""The census: which steps are whole in the union of what all hosts show. Markers are not used: they can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from snapshot.tiers.near_steps import NearFolder
from snapshot.tiers.timeline import NO_ORIGIN, Line, Origin, Standing


class StepView(msgspec.Struct, array_like=True):
    """A step in the folder of one host."""

    step: int
    save_id: str
    """The snapshot whose manifest is here; empty if there is none."""
    origin: tuple[str, int, str, int, bool]
    files: dict[str, int]
    """The data files that are here."""


class HostView(msgspec.Struct, array_like=True):
    """The steps of one host."""

    key: str
    steps: list[StepView] = []


def view_of(folder: NearFolder, key: str) -> HostView:
    """Return the view of a host's folder."""
    committed, views = folder.steps(), []
    for step in sorted(folder.folders()):
        found = committed.get(step)
        files = folder.files(step)
        if found is not None:
            views.append(StepView(step, found.save_id, (*found.origin,), files))
        elif files:
            views.append(StepView(step, "", (*NO_ORIGIN,), files))
    return HostView(key, views)


@dataclass
class CensusStep:
    """A snapshot of a step, with the hosts that have its files."""

    step: int
    save_id: str
    origin: Origin
    keepers: set[int] = field(default_factory=set)
    """Hosts that have the manifest, by their positions."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The files that the snapshot must have, by its manifest."""
    holders: dict[str, list[int]] = field(default_factory=dict)
    """Hosts that have each file with its right size."""

    @property
    def missing(self) -> list[str]:
        """The files that no host has."""
        return [name for name in self.sizes if not self.holders.get(name)]

    @property
    def replicas(self) -> int:
        """The number of further hosts that have each file: the lowest one. -1 if a file is missing."""
        return min((len(self.holders.get(name, ())) for name in self.sizes), default=1) - 1


def take_census(
    views: Sequence[HostView], line: Line, sizes_of: Callable[[CensusStep], dict[str, int]]
) -> list[CensusStep]:
    """Return the snapshots on the line of a run, with the holders of their files.

    There is one for each step: the newest. `sizes_of` reads the manifest of one; it is empty if no host can read it.

    >>> a = HostView("a", [StepView(1, "s", ("r", 1, "t", 1, False), {"x": 1})])
    >>> b = HostView("b", [StepView(1, "", ("", 0, "", 0, False), {"x": 1, "y": 2})])
    >>> from snapshot.tiers.timeline import Attempt, Facts
    >>> line = Line(Facts(1, (Attempt("t", "r", 1),)))
    >>> [found] = take_census([a, b], line, lambda step: {"x": 1, "y": 2})
    >>> found.step, found.missing, found.replicas
    (1, [], 0)
    """
    best: dict[int, CensusStep] = {}
    for at, view in enumerate(views):
        for each in view.steps:
            origin = Origin(*each.origin)
            if not origin.attempt or line.standing(each.step, each.save_id, origin) != Standing.ON:
                continue
            known = best.get(each.step)
            if known is None or line.age(origin) > line.age(known.origin):
                known = best[each.step] = CensusStep(each.step, each.save_id, origin)
            if known.save_id == each.save_id:
                known.keepers.add(at)
    for known in best.values():
        known.sizes = sizes_of(known)
    for at, view in enumerate(views):
        for each in view.steps:
            if (known := best.get(each.step)) is not None:
                for name, size in each.files.items():
                    if known.sizes.get(name) == size:
                        known.holders.setdefault(name, []).append(at)
    return [each for each in best.values() if each.sizes]
