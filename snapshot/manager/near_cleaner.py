"""Removal of old near steps in the background, after commits, and of far steps once newer ones were uploaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from snapshot.manager.policies import Policy, Taken, reasons
from snapshot.manager.retention import Cleaner, find_needed
from snapshot.manager.root import Root, taken_of
from snapshot.tiers.control import Request
from snapshot.tiers.near_steps import NearStep
from snapshot.tiers.tier_set import TierSet
from snapshot.tiers.upload_queue import UploadState
from snapshot.tiers.uploader_link import ANSWERS


class NearCleaner(Cleaner):
    """Background removal of the near steps that a policy does not keep, and that are not wanted far.

    `far`: the cleaner of the far root, on the rank that has it.
    """

    def __init__(
        self, root: Root, policy: Policy | None, spared: Callable[[int], bool], tiers: TierSet, far: Cleaner | None
    ) -> None:
        super().__init__(root, policy, spared, set)
        self._tiers = tiers
        self._far = far
        self._uploaded: set[int] = set()

    def _clean(self, upto: int) -> None:
        tiers = self._tiers
        tiers.prune(upto, self.kept, self._is_spared)
        if self._far is None or tiers.member.fault:
            return
        states = tiers.ask(Request("status"), ANSWERS).steps
        for step in sorted(
            step for step, each in states.items() if each.far == UploadState.WHOLE and step not in self._uploaded
        ):
            self._uploaded.add(step)
            self._far.committed(step, time.monotonic())

    def kept(self, steps: Sequence[NearStep], damaged: Collection[int]) -> set[int]:
        """Return the steps that the policy keeps, and the bases of what they left out.

        Other hosts may have the manifest of a damaged step, so the policy decides about it, too.
        """
        taken = [*(taken_of(each.step, each.head) for each in steps), *map(Taken, damaged)]
        kept = set(reasons(self._policy, sorted(taken, key=lambda each: each.step), time.time()))
        kept |= {each.step for each in steps if self._is_spared(each.step)}
        heads = {each.step: each.head for each in steps}
        return kept | find_needed(heads, kept, heads.keys() - kept).keys()
