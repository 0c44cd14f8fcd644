"""Claims, the commit, and cleaning: which files belong to whom.

A take's files carry its save id. It cleans only after its own commit, only files whose names it knows, and never what
another take in this process has pending.
"""

from __future__ import annotations

import re
import threading

from snapshot.errors import SnapshotError, SnapshotNotFoundError, StorageNotFoundError
from snapshot.events import emit, log
from snapshot.manifest.document import METADATA
from snapshot.storage import Storage

_DATA = re.compile(r"data/([0-9a-z]+)-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|json)|\.json)")
_CLAIM = re.compile(r"\.take-([0-9a-z]+)(?:\.[0-9a-f]+\.tmp)?")
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-z]+)"')

_active: set[str] = set()
_lock = threading.Lock()


def claim_path(save_id: str) -> str:
    """The file that says that a take is running, or was interrupted."""
    return f".take-{save_id}"


def enter(save_id: str) -> None:
    """A take of this process begins."""
    with _lock:
        _active.add(save_id)


def leave(save_id: str) -> None:
    """It ended, one way or the other."""
    with _lock:
        _active.discard(save_id)


def save_id_of(path: str) -> str | None:
    """Whose file this is; None for what is none of ours."""
    found = _DATA.fullmatch(path) or _CLAIM.fullmatch(path)
    return found[1] if found else None


def is_of(path: str, save_id: str, rank: int | None) -> bool:
    """Whether a file is of a take, and of one of its ranks, or of any."""
    return save_id_of(path) == save_id and (
        rank is None or path.startswith((f"data/{save_id}-{rank}-", f"data/{save_id}-{rank}."))
    )


async def ours(storage: Storage) -> list[str]:
    """Every file below the snapshot that a take wrote. Data first: whose data is listed had its claim by then."""
    listed = [*await storage.list("data/"), *await storage.list(".take-")]
    return [path for path in listed if save_id_of(path) is not None]


async def standing(storage: Storage) -> str | None:
    """The save id of the snapshot that stands here; None where none does, or it cannot be told."""
    try:
        found = _SAVE_ID.search((await storage.get(METADATA))[:1000])
    except SnapshotError:
        return None
    return found[1].decode() if found else None


async def _remove_claims(storage: Storage, found: list[str]) -> list[str]:
    """Remove the claims among what was found, but for those of this process; the rest that may be removed.

    Once its claim is gone a take cannot commit any more; so what is not committed afterwards never will be.
    """
    with _lock:
        found = [path for path in found if save_id_of(path) not in _active]
    claims = [path for path in found if path.startswith(".take-")]
    if claims:
        await storage.delete(claims)
    return [path for path in found if not path.startswith(".take-")]


async def clean(storage: Storage, keep: str) -> None:
    """Remove what earlier takes left, finished or not, and what the snapshot `keep` replaced."""
    try:
        found = [path for path in await ours(storage) if save_id_of(path) != keep]
        if not found:
            return
        left = await _remove_claims(storage, found)
        now = await standing(storage)
        gone = [path for path in left if save_id_of(path) != now]
        if now is not None and gone:
            await storage.delete(gone)
    except SnapshotError as error:  # the snapshot is committed: what could not be cleaned costs space, no more
        log.warning("%s: leftovers of earlier takes could not be removed: %s", storage.url, error)
        return
    emit("cleaned", "take", str(storage.url), files=len(gone))


async def remove(storage: Storage) -> None:
    """Delete a snapshot, the manifest first, and what interrupted takes left beside it."""
    found = await ours(storage)
    data = await _remove_claims(storage, found)
    try:
        await storage.stat(METADATA)
    except StorageNotFoundError as error:
        if not found:
            raise SnapshotNotFoundError(f"{storage.url}: there is no snapshot to delete") from error
    else:
        await storage.delete([METADATA])
    await storage.delete(data)
