"""The census: which steps are whole in the union of what all hosts show. Markers are not used: they can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from snapshot.tiers.near_steps import NearFolder
from snapshot.tiers.run_record import NO_ORIGIN, Origin, RunRecord


class StepView(msgspec.Struct, array_like=True):
    """A step in the folder of one host."""

    step: int
    save_id: str
    """The snapshot whose manifest is here; empty if there is none."""
    origin: tuple[str, int, str, int]
    sizes: dict[str, int]
    """The files that the snapshot must have, by the manifest; only the first host of several sends them."""
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
            views.append(StepView(step, found.save_id, (*found.origin,), found.head.sizes(), files))
        elif files:
            views.append(StepView(step, "", (*NO_ORIGIN,), {}, files))
    return HostView(key, views)


@dataclass
class CensusStep:
    """A snapshot of a step, with the hosts that have its files."""

    step: int
    save_id: str
    origin: Origin
    sizes: dict[str, int]
    keepers: set[int] = field(default_factory=set)
    """Hosts that have the manifest, by their positions."""
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


def take_census(views: Sequence[HostView]) -> list[CensusStep]:
    """Return every snapshot whose manifest a host shows, with the holders of its files.

    >>> a = HostView("a", [StepView(1, "s", ("r", 1, "t", 1), {"x": 1, "y": 2}, {"x": 1})])
    >>> b = HostView("b", [StepView(1, "", ("", 0, "", 0), {}, {"x": 1, "y": 2})])
    >>> [(each.step, each.missing, each.replicas) for each in take_census([a, b])]
    [(1, [], 0)]
    """
    found: dict[tuple[int, str], CensusStep] = {}
    for at, view in enumerate(views):
        for each in view.steps:
            if each.save_id:
                made = CensusStep(each.step, each.save_id, Origin(*each.origin), each.sizes)
                found.setdefault((each.step, each.save_id), made).keepers.add(at)
    at_step: dict[int, list[CensusStep]] = {}
    for (step, _), known in found.items():
        at_step.setdefault(step, []).append(known)
    for at, view in enumerate(views):
        for each in view.steps:
            for known in at_step.get(each.step, ()):
                sizes, holders = known.sizes, known.holders
                for name, size in each.files.items():
                    if sizes.get(name) == size:
                        holders.setdefault(name, []).append(at)
    return list(found.values())


def of_this_run(found: Sequence[CensusStep], record: RunRecord) -> list[CensusStep]:
    """Return the snapshots of a run that no later attempt abandoned: one for each step, the newest."""
    best: dict[int, CensusStep] = {}
    for each in found:
        if each.origin.run != record.run or record.is_abandoned(each.step, each.origin):
            continue
        known = best.get(each.step)
        if known is None or record.is_newer(each.origin, known.origin):
            best[each.step] = each
    return list(best.values())
