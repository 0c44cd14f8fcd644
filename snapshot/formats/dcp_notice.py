"""A notice for tools that only know DCP's checkpoints: a `.metadata` file next to a snapshot of DCP's API.

Trainers look for `.metadata` to find their newest checkpoint, and start from scratch without it. With the notice they
find the step, and DCP's own reader fails with an error that names this library.
"""

from __future__ import annotations

from contextlib import suppress

from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.io.storage import ANYTHING, Storage

METADATA = ".metadata"
"""The file that every checkpoint of DCP has."""
NOTICE = (
    b"\x80\x02cthis is a snapshot and not a checkpoint of DCP: read it with SnapshotReader of snapshot-torch, "
    b"or with Snapshot(path)\nNotice\n."
)
"""A pickle of a class that does not exist. Loading it raises an error with this text; no code runs."""


async def is_notice(storage: Storage) -> bool:
    """Return True if the existing `.metadata` is a notice."""
    try:
        if (await storage.stat(METADATA)).size != len(NOTICE):
            return False
        return await storage.get(METADATA) == NOTICE
    except StorageNotFoundError:
        return False


async def put_notice(storage: Storage) -> None:
    """Write the notice. A failure is only logged, since the snapshot is complete without it."""
    try:
        await storage.put(METADATA, NOTICE, expect=ANYTHING)
    except SnapshotError as error:
        log.warning("%s: failed to write the notice for tools that look for %s: %s", storage.url, METADATA, error)


async def remove_notice(storage: Storage) -> None:
    """Delete the notice, if it is one."""
    with suppress(StorageError):
        if await is_notice(storage):
            await storage.delete([METADATA])
