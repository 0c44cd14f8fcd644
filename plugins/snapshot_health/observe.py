"""Guards and statistics for the takes of the core: the entry point `health` of the group `snapshot.takes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.loading.open import Opened
from snapshot.save.observers import TakeView
from snapshot_health.guards import GuardedTake, expect_good
from snapshot_health.statistics import ByPath, TensorStatistics, measure_tensor


class Health:
    """Looks for signs that a state is wrong, and measures its tensors."""

    def observe(self, view: TakeView, options: Mapping[str, Any]) -> GuardedTake:
        """Examine the state that is taken. Raise `SuspectStateError` to refuse it."""
        made = GuardedTake(options["guards"], view)
        if view.alone:  # of several ranks, the leader knows all findings at the commit
            expect_good(options["guards"], made.findings, view.url)
        if options["statistics"]:
            made.examine_statistics(_measure(view))
        return made

    def read_statistics(self, opened: Opened) -> dict[str, TensorStatistics]:
        """Return the statistics that a take has stored."""
        from snapshot_health.stored_statistics import read_statistics  # a take does not pay for what reads

        return read_statistics(opened)


def _measure(view: TakeView) -> ByPath:
    measured: ByPath = {}
    for leaf in view.leaves:
        found = measure_tensor(leaf.tensor) if leaf.wrap is None else None
        if found is not None:
            measured.setdefault(leaf.entry, []).append(found)
    return measured


HEALTH = Health()
