"""Tombstones: the save ids of steps that were removed from a far root, so that no uploader puts them back."""

from __future__ import annotations

import time
from contextlib import suppress

from snapshot.aio import gather_limited
from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.save.cleanup import committed_save_id
from snapshot.storage import ANYTHING, Storage
from snapshot.tiers.run_record import RECORD

PRUNED = ".pruned"
"""Folder in the far root with an empty file for each removed snapshot."""
MANY = 500
LASTS = 30 * 24 * 3600.0
"""Seconds after which a tombstone may be deleted, if there are many."""


def tombstone(save_id: str) -> str:
    """Return the path of a snapshot's tombstone in the far root."""
    return f"{PRUNED}/{save_id}"


async def bury(root: Storage, step: Storage) -> None:
    """Put a tombstone for the snapshot in a step's folder, if the root has uploads of near steps."""
    try:
        await root.stat(RECORD)
    except StorageNotFoundError:
        return
    save_id = await committed_save_id(step)
    if save_id is not None:
        await root.put(tombstone(save_id), b"", expect=ANYTHING)
        with suppress(StorageError):
            await _remove_old(root)


async def _remove_old(root: Storage) -> None:
    found = await root.list(f"{PRUNED}/")
    if len(found) > MANY:
        stats = await gather_limited(found, root.stat)
        old = [path for path, stat in zip(found, stats, strict=True) if stat.mtime < time.time() - LASTS]
        await root.delete(old)


async def is_buried(root: Storage, save_id: str) -> bool:
    """Return True if a snapshot was removed from the far root."""
    with suppress(StorageNotFoundError):
        await root.stat(tombstone(save_id))
        return True
    return False
