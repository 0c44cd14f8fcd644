"""A cache of plans, so that takes of the same structure are planned once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from snapshot.io.storage import Limits
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.plan.layout import FilePart, FilePlan, PlannedLeaf, SavePlan, cut_file, make_plan

KEPT = 8
"""Number of cached plans, for takes that alternate."""
_paths, _dtypes, _shapes, _origins = map(attrgetter, ("path", "dtype", "shape", "origin"))


@dataclass(frozen=True, slots=True)
class _CachedPlan:
    """A plan, with its arguments and leaves."""

    asked: tuple[Any, ...]
    leaves: tuple[list[Any], ...]
    plan: SavePlan
    tables: int


_cuts: PerProcess[dict[tuple[int, int], tuple[FilePlan, list[FilePart]]]] = PerProcess(dict)


def cut_file_cached(file: FilePlan, part_bytes: int) -> list[FilePart]:
    """Return the parts of a file, cached for the files of cached plans."""
    key = id(file), part_bytes
    cuts = _cuts.get()
    kept = cuts.get(key)
    if kept is None or kept[0] is not file:
        kept = cuts[key] = file, cut_file(file, part_bytes)
        drop_oldest(cuts, 2 * KEPT)
    return kept[1]


class PlanCache:
    """Cache of the latest plans."""

    def __init__(self) -> None:
        self._made: tuple[_CachedPlan, ...] = ()  # replaced as a whole, so that other threads can read it

    def plan(
        self,
        leaves: Sequence[PlannedLeaf],
        blob_bytes: int,
        limits: Limits,
        lanes: int,
        *,
        staged_bytes: int,
        loads: tuple[int, ...] = (),
        groups: bytes = b"",
        longest: int = 0,
    ) -> SavePlan:
        """Return the result of `make_plan` for the same arguments, from the cache if possible."""
        asked = (limits, lanes, groups, longest)
        described = tuple(list(map(get, leaves)) for get in (_paths, _dtypes, _shapes, _origins))
        for made in self._made:
            if made.asked == asked and made.leaves == described:
                return replace(made.plan, blob_bytes=blob_bytes + made.tables, staged_bytes=staged_bytes, loads=loads)
        plan = make_plan(
            leaves, blob_bytes, limits, lanes, staged_bytes=staged_bytes, loads=loads, groups=groups, longest=longest
        )
        if any(groups) or longest:  # the structure does not depend on the choice of files
            usual = self.plan(leaves, blob_bytes, limits, lanes, staged_bytes=staged_bytes, loads=loads)
            plan = replace(plan, structure=usual.structure)
        made = _CachedPlan(asked, described, plan, plan.blob_bytes - blob_bytes)
        self._made = (*self._made, made)[-KEPT:]
        return plan
