"""Clean-up: which files belong to which save, and which of them may be deleted.

File names contain the id of their save. A save cleans up only after its own commit, deletes only files of known names,
and never files of another pending save of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence

from snapshot.errors import (
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.formats.notice import remove_notice
from snapshot.manifest.document import METADATA
from snapshot.save.claims import claim_path, pending_saves
from snapshot.storage import Storage

# Save ids are 12 hexadecimal digits: a `data/train-1.json`, or a `data/2026-1-1.json`, belongs to the user.
_DATA = re.compile(r"data/([0-9a-f]{12})(?:-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|json)|\.(?:json|sha256))|\.signature)")
_CLAIM = re.compile(r"\.take-([0-9a-f]{12})(?:\.[0-9a-f]+\.tmp)?")
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-z]+)"')

LAST_WORDS = 20.0
"""Seconds that clean-up may take over a network."""
DAY = 24 * 3600.0
"""Age in seconds after which a claim counts as interrupted, on storages where a commit cannot detect a deleted claim.
"""


def time_limit(storage: Storage) -> asyncio.Timeout:
    """Return a time limit for clean-up over a network."""
    return asyncio.timeout(None if storage.capabilities.blocking else LAST_WORDS)


def save_id_of(path: str) -> str | None:
    """Return the save id in a file name, or None if this library did not write the file."""
    found = _DATA.fullmatch(path) or _CLAIM.fullmatch(path)
    return found[1] if found else None


def belongs_to(path: str, save_id: str, rank: int | None) -> bool:
    """Return True if the file belongs to this save (and to `rank`, if given)."""
    return save_id_of(path) == save_id and (
        rank is None or path.startswith((f"data/{save_id}-{rank}-", f"data/{save_id}-{rank}."))
    )


async def list_save_files(storage: Storage) -> list[str]:
    """Return all files below the snapshot that a take wrote.

    Data files are listed first: a file that is found had its claim by then.
    """
    listed = [*await storage.list("data/"), *await storage.list(".take-")]
    return [path for path in listed if save_id_of(path) is not None]


async def committed_save_id(storage: Storage) -> str | None:
    """Return the save id of the committed snapshot, or None if there is none. Raise if it cannot be read."""
    try:
        found = _SAVE_ID.search((await storage.get(METADATA))[:1000])
    except StorageNotFoundError:
        return None
    return found[1].decode() if found else None


async def _remove_claims(
    storage: Storage, found: list[str], committed: str | None = None, older_than: float = DAY
) -> list[str]:
    """Delete the claims among `found`, except those of this process. Return the other files that may be deleted.

    A take without its claim cannot commit. So uncommitted files are leftovers once their claim is deleted. If the
    storage cannot guarantee that, a claim younger than a day may belong to a running take.
    """
    pending = pending_saves()
    found = [path for path in found if save_id_of(path) not in pending]
    claims = [path for path in found if path.startswith(".take-")]
    if claims and not storage.capabilities.guarded_commit:
        young = {save_id_of(claim) for claim in claims if await is_younger_than(storage, claim, older_than)} - {
            committed
        }
        found = [path for path in found if save_id_of(path) not in young]
        claims = [claim for claim in claims if save_id_of(claim) not in young]
    if claims:
        await storage.delete(claims)
        await drop_unfinished_uploads(
            storage, {save_id for claim in claims if (save_id := save_id_of(claim))}, older_than
        )
    return [path for path in found if not path.startswith(".take-")]


async def is_younger_than(storage: Storage, claim: str, older_than: float) -> bool:
    """Return True if a claim is younger than `older_than` seconds."""
    try:
        return (await storage.stat(claim)).mtime > time.time() - older_than
    except StorageNotFoundError:
        return False


async def drop_unfinished_uploads(storage: Storage, save_ids: set[str], older_than: float = DAY) -> None:
    """Drop unfinished uploads of these saves that are older than `older_than` seconds."""
    try:
        for save_id in save_ids:
            for prefix in (f"data/{save_id}-", f"data/.{save_id}-", f".{claim_path(save_id)}"):
                swept = await storage.sweep(prefix, older_than)
                if swept:
                    emit("swept", "take", str(storage.url), uploads=len(swept))
    except SnapshotError as error:  # many stores need a separate permission; leftovers only cost space
        log.info("%s: cannot list unfinished uploads: %s", storage.url, error)


async def delete_save(storage: Storage, save_id: str, files: Sequence[str] = ()) -> None:
    """Delete the claim of a save, so that it cannot be committed, and then the files of all its ranks.

    `files` are the known files, for a storage that cannot be listed.
    """
    await storage.delete([claim_path(save_id)])
    with contextlib.suppress(SnapshotError):
        files = [path for path in await list_save_files(storage) if belongs_to(path, save_id, None)]
    await storage.delete(files)


async def clean_after_commit(storage: Storage, keep: str) -> None:
    """Delete the leftovers of earlier takes, and the files of the snapshot that `keep` replaced."""
    try:
        found = [path for path in await list_save_files(storage) if save_id_of(path) != keep]
        if not found:
            return
        left = await _remove_claims(storage, found)
        now = await committed_save_id(storage)
        gone = [path for path in left if save_id_of(path) != now]
        if now is not None and gone:
            await storage.delete(gone)
    except SnapshotError as error:  # the snapshot is committed: leftovers only cost space
        log.warning("%s: cannot delete the leftovers of earlier takes: %s", storage.url, error)
        return
    emit("cleaned", "take", str(storage.url), files=len(gone))


async def find_leftovers(storage: Storage, older_than: float = DAY) -> list[str]:
    """Return the files of uncommitted takes that are over.

    Such a take has no claim, because a deletion was interrupted, or a claim older than `older_than` seconds. A younger
    claim may belong to a running take.
    """
    found = await list_save_files(storage)
    spared = set(pending_saves())
    for claim in (path for path in found if path.startswith(".take-")):
        if await is_younger_than(storage, claim, older_than):
            spared.add(save_id_of(claim) or "")
    if found:  # checked last: a take without a claim may be committed
        now = await committed_save_id(storage)
        if now is None and METADATA in await storage.list(METADATA):
            return []  # the manifest is unreadable, so the owner of the data is unknown
        spared.add(now or "")
    return [path for path in found if save_id_of(path) not in spared]


async def delete_leftovers(storage: Storage, older_than: float = DAY) -> list[str]:
    """Delete the leftovers of takes and their unfinished uploads. Return the leftovers that were found."""
    found = await find_leftovers(storage, older_than)
    if found:
        left = await _remove_claims(storage, found, None, older_than)
        now = await committed_save_id(storage)
        await storage.delete([path for path in left if save_id_of(path) != now])
    return found


async def is_busy(storage: Storage, older_than: float = DAY) -> bool:
    """Return True if a take may be running here, in addition to the committed snapshot."""
    claims = [path for path in await storage.list(".take-") if save_id_of(path) is not None]
    now = await committed_save_id(storage) if claims else None
    return any([save_id_of(claim) != now and await is_younger_than(storage, claim, older_than) for claim in claims])


_OTHERS = re.compile(rb'\s*(\{\s*"version"|version:|manifest:|world_size:)')


async def expect_own_manifest(storage: Storage) -> None:
    """Raise if another library wrote the manifest here. Deleting it would orphan the other library's files."""
    size = (await storage.stat(METADATA)).size
    head = bytearray(min(size, 256))
    await storage.read_into(METADATA, 0, [head])
    if _OTHERS.match(head):
        raise SnapshotExistsError(
            f"{storage.url}: holds a snapshot of another library, which is never replaced or deleted; "
            "delete its folder yourself"
        )


async def delete_snapshot(storage: Storage) -> None:
    """Delete a snapshot, the manifest first, and the leftovers of interrupted takes."""
    with contextlib.suppress(StorageNotFoundError):
        await expect_own_manifest(storage)
    found = await list_save_files(storage)
    data = await _remove_claims(storage, found, await committed_save_id(storage))
    try:
        await storage.stat(METADATA)
    except StorageNotFoundError as error:
        if not found:
            raise SnapshotNotFoundError(f"{storage.url}: no snapshot to delete") from error
    else:
        await storage.delete([METADATA])
    await storage.delete(data)
    await remove_notice(storage)


async def delete_if_unchanged(
    storage: Storage, token: str, older_than: float, spared: Callable[[], Awaitable[bool]]
) -> bool:
    """Delete the snapshot if its manifest still has this token, and return True if it was deleted.

    The snapshot was selected earlier, so another one may have replaced it, or a take may be writing it. `spared` is
    checked last.
    """
    await expect_own_manifest(storage)
    if await is_busy(storage, older_than):
        return False
    found = await list_save_files(storage)
    if await spared() or (await storage.stat(METADATA)).token != token:
        return False
    await storage.delete([METADATA])
    data = await _remove_claims(storage, found, None, older_than)
    now = await committed_save_id(
        storage
    )  # a take that is not committed now has lost its claim, or began after the listing
    await storage.delete([path for path in data if save_id_of(path) != now])
    if now is None:
        await remove_notice(storage)
    return True
