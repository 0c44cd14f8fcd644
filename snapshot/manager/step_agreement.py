"""Start of a take of a step: all ranks agree on the step, and on the result of an earlier take of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CommitUnknown, SnapshotError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.manager.root import Root
from snapshot.save import transaction
from snapshot.snapshot import PendingSnapshot


class StepAnswer(msgspec.Struct, array_like=True):
    """Reply of the leader."""

    known: bool
    """True if an earlier asynchronous take has saved the current state."""
    bases: list[int]
    """Committed steps that the take is based on, the newest first."""
    near_fault: str = ""
    """Why a host cannot write near, or ''."""


class StepBegin(msgspec.Struct, array_like=True):
    """Message of each rank."""

    step: int
    saved: bool
    """True if an asynchronous take has already saved this very state, as far as this rank knows."""
    near_fault: str = ""
    """Why this host cannot write near, or ''."""
    failures: int = 0
    """Failed takes in a row, as this rank saw them."""


def agree_on(
    exchange: Exchange,
    root: Root,
    pending: PendingSnapshot | None,
    mine: StepBegin,
    *,
    find_bases: Callable[[], list[int]],
    expect_few: Callable[[int], None],
    expect_new: Callable[[int], None] | None,
    before_far: Callable[[], None] | None,
) -> StepAnswer:
    """Return whether `pending`, an earlier take of this step, has saved the current state.

    The leader checks that the snapshot of `pending` still exists, and deletes a leftover pin if not. `expect_few` gets
    the number of failures, `expect_new` the step. `before_far` is called if a host cannot write near. Raise
    SnapshotError on all ranks if they passed different steps.
    """
    step = mine.step

    def lead(all_: list[StepBegin]) -> StepAnswer:
        ranks = {each.step: rank for rank, each in enumerate(all_)}
        if len(ranks) > 1:
            said = ", ".join(f"rank {rank} {number}" for number, rank in ranks.items())
            raise SnapshotError(f"{root.url}: all ranks must pass the same step, got {said}; nothing was done")
        expect_few(max(each.failures for each in all_))
        run(root.forget_pin(step))
        known = all(each.saved for each in all_) and pending is not None and run(_is_committed(root, step, pending))
        if not known and expect_new is not None:
            expect_new(step)
        fault = next((each.near_fault for each in all_ if each.near_fault), "")
        if fault and before_far is not None:
            before_far()
        return StepAnswer(known, [] if known else find_bases(), fault)

    return exchange.agree(mine, lead, StepBegin, StepAnswer)


def may_be_committed(pending: PendingSnapshot | None) -> bool:
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
        return await transaction.committed_save_id(session.storage) == pending.save_id
