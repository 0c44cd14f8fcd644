"""A notice for tools that know DCP's checkpoints only: a `.metadata` beside a snapshot that DCP's API has saved.

Trainers look for `.metadata` to find their newest checkpoint, and begin anew where there is none. With the notice they
find the step, and reading it with DCP's own reader fails with an error that says what it is.
"""

from __future__ import annotations

from contextlib import suppress

from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.formats.dcp import METADATA
from snapshot.storage import ANYTHING, Storage

NOTICE = (
    b"\x80\x02cthis is a snapshot and not a checkpoint of DCP: read it with SnapshotReader of snapshot-torch, "
    b"or with Snapshot(path)\nNotice\n."
)
"""A pickle of a class that does not exist. Loading it raises an error with this text; no code runs."""


async def is_notice(storage: Storage) -> bool:
    """Return True if the `.metadata` that is there is a notice."""
    try:
        if (await storage.stat(METADATA)).size != len(NOTICE):
            return False
        return await storage.get(METADATA) == NOTICE
    except StorageNotFoundError:
        return False


async def put_notice(storage: Storage) -> None:
    """Put the notice. Without it the snapshot is as good: a failure is a line in the log."""
    try:
        await storage.put(METADATA, NOTICE, expect=ANYTHING)
    except SnapshotError as error:
        log.warning("%s: no notice for tools that look for %s: %s", storage.url, METADATA, error)


async def remove_notice(storage: Storage) -> None:
    """Delete the notice, if it is one."""
    with suppress(StorageError):
        if await is_notice(storage):
            await storage.delete([METADATA])
