"""Claims, the commit, and cleaning: which files belong to whom.

A take's files carry its save id. It cleans only after its own commit, only files whose names it knows, and never what
another take in this process has pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable

from snapshot.errors import (
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageConflictError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.formats.notice import remove_notice
from snapshot.manifest.document import METADATA
from snapshot.storage import ABSENT, ANYTHING, Expect, Storage

# Save ids are 12 hexadecimal digits: a `data/train-1.json`, or a `data/2026-1-1.json`, is somebody else's.
_DATA = re.compile(r"data/([0-9a-f]{12})-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|json)|\.json)")
_CLAIM = re.compile(r"\.take-([0-9a-f]{12})(?:\.[0-9a-f]+\.tmp)?")
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-z]+)"')

LAST_WORDS = 20.0
"""Seconds that cleaning up may take over a network."""
DAY = 24 * 3600.0
"""Seconds after which a claim counts as that of an interrupted take, where a commit does not notice that it is gone."""

_active: set[str] = set()
_lock = threading.Lock()
# no fork while another thread holds it: nobody in the child would ever give it back
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def claim_path(save_id: str) -> str:
    """The file that says that a take is running, or was interrupted."""
    return f".take-{save_id}"


async def lay_claim(storage: Storage, save_id: str) -> None:
    """Say that a take is running, to others by a file and to this process by its save id, until `leave`.

    The file's name is nobody else's, so that nothing is lost where no condition can be set.
    """
    enter(save_id)
    expect = ABSENT if storage.capabilities.conditional_put else ANYTHING
    await storage.put(claim_path(save_id), b"", expect=expect)


async def claimed(storage: Storage, save_id: str) -> None:
    """Raise if the claim was cleaned away, where a commit would not notice: its data may be gone, too."""
    if storage.capabilities.guarded_commit:
        return
    try:
        await storage.stat(claim_path(save_id))
    except StorageNotFoundError as error:
        raise SnapshotExistsError(
            f"{storage.url}: another take, or a delete, has cleaned this take away ({error})"
        ) from error


async def withdraw(storage: Storage, save_id: str) -> None:
    """Take the claim back: nothing was written."""
    with contextlib.suppress(SnapshotError, TimeoutError):
        async with not_for_long(storage):
            await storage.delete([claim_path(save_id)])


def not_for_long(storage: Storage) -> asyncio.Timeout:
    """Bounds the time for cleaning up over a network."""
    return asyncio.timeout(None if storage.capabilities.blocking else LAST_WORDS)


async def condition(storage: Storage, expect: Expect) -> Expect:
    """What a commit may ask of the storage. Where that compares nothing, compare here: who looks at the very same
    moment sees the same, and both may commit."""
    if storage.capabilities.conditional_put or expect is ANYTHING:
        return expect
    try:
        stands: Expect = (await storage.stat(METADATA)).token
    except StorageNotFoundError:
        stands = ABSENT
    if stands != expect:
        found = "is gone" if stands is ABSENT else "is there already" if expect is ABSENT else "was replaced"
        raise StorageConflictError(f"{storage.url.join(METADATA)}: {found}")
    return ANYTHING


def enter(save_id: str) -> None:
    """Note that a take of this process is pending: others of it spare its files. `lay_claim` does it, too."""
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
    """The save id of the snapshot that stands here; None where none of ours does. Raises what keeps it from looking."""
    try:
        found = _SAVE_ID.search((await storage.get(METADATA))[:1000])
    except StorageNotFoundError:
        return None
    return found[1].decode() if found else None


async def _remove_claims(
    storage: Storage, found: list[str], committed: str | None = None, older_than: float = DAY
) -> list[str]:
    """Remove the claims among what was found, but for those of this process; the rest that may be removed.

    Once its claim is gone a take cannot commit any more; so what is not committed afterwards never will be. Where the
    storage cannot promise that, a claim that is younger than a day may be of a take that is still running.
    """
    with _lock:
        found = [path for path in found if save_id_of(path) not in _active]
    claims = [path for path in found if path.startswith(".take-")]
    if claims and not storage.capabilities.guarded_commit:
        young = {save_id_of(claim) for claim in claims if await _young(storage, claim, older_than)} - {committed}
        found = [path for path in found if save_id_of(path) not in young]
        claims = [claim for claim in claims if save_id_of(claim) not in young]
    if claims:
        await storage.delete(claims)
        await _sweep(storage, {save_id for claim in claims if (save_id := save_id_of(claim))}, older_than)
    return [path for path in found if not path.startswith(".take-")]


async def _young(storage: Storage, claim: str, older_than: float) -> bool:
    try:
        return (await storage.stat(claim)).mtime > time.time() - older_than
    except StorageNotFoundError:
        return False


async def _sweep(storage: Storage, save_ids: set[str], older_than: float = DAY) -> None:
    """Drop the uploads that takes which were killed a day ago did not finish: theirs, and nobody else's."""
    try:
        for save_id in save_ids:
            for prefix in (f"data/{save_id}-", f"data/.{save_id}-", f".{claim_path(save_id)}"):
                swept = await storage.sweep(prefix, older_than)
                if swept:
                    emit("swept", "take", str(storage.url), uploads=len(swept))
    except SnapshotError as error:  # a permission of its own on many stores; what is left costs space, no more
        log.info("%s: unfinished uploads could not be looked for: %s", storage.url, error)


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


async def leftovers(storage: Storage, older_than: float = DAY) -> list[str]:
    """The files of takes that are not committed here and are over: whose claim is gone, as after a deletion that was
    cut off, or is older than so many seconds. A younger claim may be of a take that still runs somewhere."""
    found = await ours(storage)
    with _lock:
        spared = {*_active}
    for claim in (path for path in found if path.startswith(".take-")):
        if await _young(storage, claim, older_than):
            spared.add(save_id_of(claim) or "")
    if found:  # last: what had no claim any more may have been committed
        now = await standing(storage)
        if now is None and METADATA in await storage.list(METADATA):
            return []  # whose data this is cannot be read any more
        spared.add(now or "")
    return [path for path in found if save_id_of(path) not in spared]


async def clear(storage: Storage, older_than: float = DAY) -> list[str]:
    """Remove those, and the uploads that their takes did not finish; what was removed."""
    found = await leftovers(storage, older_than)
    if found:
        left = await _remove_claims(storage, found, None, older_than)
        now = await standing(storage)
        await storage.delete([path for path in left if save_id_of(path) != now])
    return found


async def is_busy(storage: Storage, older_than: float = DAY) -> bool:
    """Whether a take may be running here, beside what is committed."""
    claims = [path for path in await storage.list(".take-") if save_id_of(path) is not None]
    now = await standing(storage) if claims else None
    return any([save_id_of(claim) != now and await _young(storage, claim, older_than) for claim in claims])


_OTHERS = re.compile(rb'\s*(\{\s*"version"|version:|manifest:|world_size:)')


async def expect_ours(storage: Storage) -> None:
    """Raise if the manifest that stands here is of another library: its files would be left with nothing that names
    them."""
    size = (await storage.stat(METADATA)).size
    head = bytearray(min(size, 256))
    await storage.read_into(METADATA, 0, [head])
    if _OTHERS.match(head):
        raise SnapshotExistsError(
            f"{storage.url}: holds a snapshot that another library wrote; it is only read, never replaced or deleted: "
            "remove its folder yourself"
        )


async def remove(storage: Storage) -> None:
    """Delete a snapshot, the manifest first, and what interrupted takes left beside it."""
    with contextlib.suppress(StorageNotFoundError):
        await expect_ours(storage)
    found = await ours(storage)
    data = await _remove_claims(storage, found, await standing(storage))
    try:
        await storage.stat(METADATA)
    except StorageNotFoundError as error:
        if not found:
            raise SnapshotNotFoundError(f"{storage.url}: there is no snapshot to delete") from error
    else:
        await storage.delete([METADATA])
    await storage.delete(data)
    await remove_notice(storage)


async def remove_this(storage: Storage, token: str, older_than: float, spared: Callable[[], Awaitable[bool]]) -> bool:
    """`remove`, of the snapshot whose manifest has this token: it was chosen some time ago, and another may stand in
    its place, or a take may be writing it. `spared` is asked last. False where it is not removed."""
    await expect_ours(storage)
    if await is_busy(storage, older_than):
        return False
    found = await ours(storage)
    if await spared() or (await storage.stat(METADATA)).token != token:
        return False
    await storage.delete([METADATA])
    data = await _remove_claims(storage, found, None, older_than)
    now = await standing(storage)  # a take that is not committed by now has lost its claim, or began after the list
    await storage.delete([path for path in data if save_id_of(path) != now])
    if now is None:
        await remove_notice(storage)
    return True
