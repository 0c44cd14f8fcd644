"""The facts of a run and the tombstones of its deleted snapshots, as every reader of a root needs them."""

from __future__ import annotations

import errno
import re
import secrets
from contextlib import suppress

from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING, Storage
from snapshot.io.url import URL
from snapshot.loading.open import is_foreign
from snapshot.runs.timeline import (
    Facts,
    decode_facts,
    decode_record,
)
from snapshot.save import transaction
from snapshot.save.transaction import committed_save_id

PINNED = ".pinned"
"""File in a step's folder that protects it from removal. It belongs to no snapshot, so clean-up leaves it."""
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")

FOLDER = ".run"
"""Folder of the facts, in the far root and in the folder of a run in a near root."""
RECORD = ".run.json"
"""The record of earlier versions, which is read if there is no fact."""
LONGEST = 64 << 20
TRIES = 20
_FACT = re.compile(r"([0-9]{8})\.json")


def path_of(number: int) -> str:
    """Return the path of a fact in a far root."""
    return f"{FOLDER}/{number:08d}.json"


async def read_facts(storage: Storage) -> Facts:
    """Return the published facts; none if the root has none. Raise StorageError if it cannot be read."""
    for _ in range(TRIES):
        numbers = await _list_numbers(storage)
        if not numbers:
            return await _read_record(storage)
        path = path_of(max(numbers))
        with suppress(StorageNotFoundError):  # a later one was published, and this one deleted
            return decode_facts(await storage.get(path, limit=LONGEST), storage.url.join(path))
    raise StorageError(f"{storage.url.join(FOLDER)}: changed {TRIES} times while it was read")


async def _list_numbers(storage: Storage) -> list[int]:
    try:
        listed = await storage.list(f"{FOLDER}/", recursive=False)
    except StorageNotFoundError:
        return []
    found = (_FACT.fullmatch(path.removeprefix(f"{FOLDER}/")) for path in listed)
    return sorted(int(each[1]) for each in found if each)


async def _read_record(storage: Storage) -> Facts:
    """Return the facts in the record of an earlier version."""
    try:
        data = await storage.get(RECORD, limit=1 << 20)
    except StorageNotFoundError:
        return Facts()
    found = decode_record(data, storage.url.join(RECORD))
    return Facts(max(each.number for each in found.pending), found.pending) if found.pending else found


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
        old = [path for path, stat in zip(found, stats, strict=True) if stat.age > LASTS]
        await root.delete(old)


async def is_buried(root: Storage, save_id: str) -> bool:
    """Return True if a snapshot was removed from the far root."""
    with suppress(StorageNotFoundError):
        await root.stat(tombstone(save_id))
        return True
    return False


def delete_checkpoint(session: Session) -> None:
    """Delete the snapshot of a session. Raise for checkpoints of other libraries, which are never deleted."""
    try:
        run(bury_step(session))
        run(transaction.delete_snapshot(session.storage))
    except (SnapshotNotFoundError, StorageError) as error:
        foreign = False
        with suppress(SnapshotError):
            foreign = run(is_foreign(session))
        if not foreign and getattr(error, "errno", None) == errno.ENOTDIR:
            raise SnapshotNotFoundError(f"{session.url}: no snapshot to delete") from error
        if not foreign:
            raise
        raise SnapshotExistsError(
            f"{session.url}: was written by another library, so it is never replaced or deleted; delete it yourself"
        ) from error
