"""Start of a take of a step: all ranks agree on the step, and on the result of an earlier take of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CommitUnknown, SnapshotError
from snapshot.events import log
from snapshot.manager.root import Root
from snapshot.runtime.loop import run
from snapshot.save import cleanup
from snapshot.snapshot import PendingSnapshot


class StepAnswer(msgspec.Struct, array_like=True):
    """Reply of the leader."""

    known: bool
    """True if an earlier asynchronous take has saved the current state."""
    bases: list[int]
    """Committed steps that the take is based on, the newest first."""


class StepBegin(msgspec.Struct, array_like=True):
    """Message of each rank."""

    step: int
    saved: bool
    """True if an asynchronous take has already saved this very state, as far as this rank knows."""


def agree_on(
    exchange: Exchange,
    root: Root,
    step: int,
    pending: PendingSnapshot | None,
    *,
    latest: bool,
    find_bases: Callable[[], list[int]],
) -> StepAnswer:
    """Return whether `pending`, an earlier take of this step, has saved the current state. Wait for it to end.

    `latest`: nothing was taken or restored since. The leader checks that the snapshot of `pending` still exists, and
    deletes a leftover pin if not. Raise SnapshotError on all ranks if they passed different steps.
    """

    def lead(all_: list[StepBegin]) -> StepAnswer:
        ranks = {each.step: rank for rank, each in enumerate(all_)}
        if len(ranks) > 1:
            said = ", ".join(f"rank {rank} {number}" for number, rank in ranks.items())
            raise SnapshotError(f"{root.url}: all ranks must pass the same step, got {said}; nothing was done")
        run(root.forget_pin(step))
        known = all(each.saved for each in all_) and pending is not None and run(_is_committed(root, step, pending))
        return StepAnswer(known, [] if known else find_bases())

    return exchange.agree(StepBegin(step, _may_be_committed(pending) and latest), lead, StepBegin, StepAnswer)


def _may_be_committed(pending: PendingSnapshot | None) -> bool:
    """Wait for a pending take, and return True if it may be committed."""
    if pending is None:
        return False
    try:
        pending.wait()
    except CommitUnknown:
        return True
    except Exception as error:  # noqa: BLE001 - `wait` or the log has reported it; it is taken again
        log.warning("%s: the earlier take failed, so the step is taken again: %s", pending.path, error)
        return False
    return True


async def _is_committed(root: Root, step: int, pending: PendingSnapshot) -> bool:
    async with root.opened(step) as session:
        return await cleanup.committed_save_id(session.storage) == pending.save_id
