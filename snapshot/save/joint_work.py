"""Work that each rank does by itself: it stops if another rank fails, whose error is raised here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from snapshot.aio import shielded
from snapshot.distributed.exchange import Exchange, Undecided
from snapshot.errors import RankError, SnapshotError, StorageError
from snapshot.runtime.loop import cancel_all, in_own_thread

T = TypeVar("T")
LOOK = 0.5
"""Seconds between checks for failed ranks while this rank works."""


async def while_all_go_on(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and stop it if another rank fails meanwhile."""
    if exchange.alone:
        return await work
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            error = await in_own_thread(exchange.given_up)
            if error is not None:
                raise error
    except BaseException:
        await shielded(cancel_all([task]))
        raise
    return task.result()


async def raise_fault_of_another_rank(exchange: Exchange, error: BaseException) -> None:
    """Raise the error of the rank that failed first: a storage error here may come from its clean-up."""
    if isinstance(error, StorageError):
        first = await shielded(in_own_thread(_first_fault, exchange))
        if isinstance(first, RankError) and first.rank != exchange.rank:
            raise first from error


def _first_fault(exchange: Exchange) -> SnapshotError | None:
    with contextlib.suppress(SnapshotError, Undecided):
        return exchange.given_up()
    return None
