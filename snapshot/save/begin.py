"""The beginning of a take: a session for its options, and agreement between the ranks."""

from __future__ import annotations

import os
from functools import partial

from snapshot.distributed.exchange import Exchange
from snapshot.progress import Meter
from snapshot.runtime.session import Session
from snapshot.save.concurrency import TakeSlot, take_slots
from snapshot.save.packing import usual_budget
from snapshot.save.rendezvous import TakeOpening, open_take
from snapshot.save.take_options import TakeOptions
from snapshot.url import URL


def begin_take(
    exchange: Exchange,
    path: str | os.PathLike[str],
    options: TakeOptions,
    meter: Meter,
    slot: TakeSlot | None = None,
) -> TakeOpening:
    """Agree with the other ranks on a take."""
    return open_take(
        exchange,
        URL.parse(os.fspath(path)),
        options.replicated or (),
        meter,
        partial(session_for_take, options, slot=slot),
        overwrite=options.overwrite,
        keys=options.keys,
    )


def session_for_take(options: TakeOptions, url: URL, slot: TakeSlot | None = None) -> Session:
    """Open the session of a take. Background takes share one budget."""
    return Session(
        url,
        options.storage_options,
        durable=options.durable,
        budget=options.memory_budget_bytes,
        default_budget=take_slots().usual_limit() if slot is not None else usual_budget(options.compression),
        pool=slot.pool if slot is not None else None,
    )
