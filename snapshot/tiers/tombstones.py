"""Tombstones: the save ids of steps that were removed from a far root, so that no uploader puts them back."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING, Storage
from snapshot.io.url import URL
from snapshot.save.transaction import committed_save_id
from snapshot.tiers.facts import read_facts
from snapshot.tiers.near_steps import STEP

PRUNED = ".pruned"
"""Folder in the far root with an empty file for each removed snapshot."""
MANY = 500
SELDOM = 20
"""One removal in this number looks for old tombstones."""
LASTS = 30 * 24 * 3600.0
"""Seconds after which a tombstone may be deleted, if there are many."""


def tombstone(save_id: str) -> str:
    """Return the path of a snapshot's tombstone in the far root."""
    return f"{PRUNED}/{save_id}"


async def bury(root: Storage, step: Storage) -> None:
    """Put a tombstone for the snapshot in a step's folder, if the root has uploads of near steps."""
    try:
        if not (await read_facts(root)).published:
            return
    except CorruptSnapshotError as error:
        log.warning("%s", error)
    save_id = await committed_save_id(step)
    if save_id is not None:
        await root.put(tombstone(save_id), b"", expect=ANYTHING)
        if not secrets.randbelow(SELDOM):
            with suppress(StorageError):
                await _remove_old(root)


async def bury_step(session: Session) -> None:
    """Put a tombstone for the snapshot of a session, if it is a step in a root with uploads of near steps."""
    above, _, name = session.url.location.rstrip("/").rpartition("/")
    if above and STEP.fullmatch(name):
        root = session.open_beside(URL(session.url.scheme, above, session.url.query))
        try:
            with suppress(StorageError):  # most roots have no uploads, and need not be readable
                await bury(root, session.storage)
        finally:
            await root.close()


async def _remove_old(root: Storage) -> None:
    found = await root.list(f"{PRUNED}/")
    if len(found) > MANY:
        found = sorted(found, key=lambda _: secrets.randbits(32))[:MANY]
        stats = await gather_limited(found, root.stat)
        old = [path for path, stat in zip(found, stats, strict=True) if stat.mtime < time.time() - LASTS]
        await root.delete(old)


async def is_buried(root: Storage, save_id: str) -> bool:
    """Return True if a snapshot was removed from the far root."""
    with suppress(StorageNotFoundError):
        await root.stat(tombstone(save_id))
        return True
    return False
