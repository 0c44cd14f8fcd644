"""How a take of a step begins: all ranks agree on the step, and on what became of one that was begun before."""

from __future__ import annotations

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CommitUnknown, SnapshotError
from snapshot.events import log
from snapshot.manager.root import Root
from snapshot.runtime.loop import run
from snapshot.save import cleanup
from snapshot.snapshot import PendingSnapshot


class StepBegin(msgspec.Struct, array_like=True):
    """What each rank says."""

    step: int
    saved: bool
    """Whether an asynchronous take has saved this very state already, as far as this rank can see."""


def agree_on(exchange: Exchange, root: Root, step: int, pending: PendingSnapshot | None, *, latest: bool) -> bool:
    """Whether `pending`, an earlier take of this step, has saved what is to be saved now; it is waited for.

    `latest`: nothing was taken or restored since. The leader looks whether its snapshot still stands, and takes away a
    pin that was left of one that does not. Raises on all ranks where they differ in the step.
    """

    def lead(all_: list[StepBegin]) -> bool:
        ranks = {each.step: rank for rank, each in enumerate(all_)}
        if len(ranks) > 1:
            said = ", ".join(f"rank {rank} {number}" for number, rank in ranks.items())
            raise SnapshotError(f"{root.url}: the ranks gave different steps to take: {said}; nothing was done")
        run(root.forget_pin(step))
        return all(each.saved for each in all_) and pending is not None and run(_is_committed(root, step, pending))

    return exchange.agree(StepBegin(step, _may_be_committed(pending) and latest), lead, StepBegin, bool)


def _may_be_committed(pending: PendingSnapshot | None) -> bool:
    """Wait for it; whether it may be committed."""
    if pending is None:
        return False
    try:
        pending.wait()
    except CommitUnknown:
        return True
    except Exception as error:  # noqa: BLE001 - whatever it was, `wait` or the log has told, and it is taken again
        log.warning("%s: is taken again, since it failed: %s", pending.path, error)
        return False
    return True


async def _is_committed(root: Root, step: int, pending: PendingSnapshot) -> bool:
    async with root.opened(step) as session:
        return await cleanup.committed_save_id(session.storage) == pending.save_id
