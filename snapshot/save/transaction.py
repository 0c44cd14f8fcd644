"""A save on storage: claim the path, write, commit or abort, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import NamedTuple

from snapshot.distributed.exchange import LEADER, Exchange, beside_loop
from snapshot.errors import (
    CommitUnknown,
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import emit, log, span
from snapshot.formats.dcp_notice import METADATA as DCP_METADATA
from snapshot.formats.dcp_notice import is_notice, remove_notice
from snapshot.io.aio import shielded
from snapshot.io.loop import LoopFuture, start
from snapshot.io.session import Session
from snapshot.io.storage import ABSENT, ANYTHING, Expect, FileStat, Storage
from snapshot.io.system import PerProcess
from snapshot.manifest.document import METADATA
from snapshot.manifest.paths import BUNDLE

# Claims: files that tell other processes that a save is running, and the pending saves of this process.

# A forked child keeps the ids: its parent's saves are still running.
_pending: PerProcess[set[str]] = PerProcess(set, set)


def claim_path(save_id: str) -> str:
    """Return the path of a save's claim, which exists while the save runs or after it was interrupted."""
    return f".take-{save_id}"


def pending_saves() -> set[str]:
    """Return the ids of this process's pending saves. Clean-up keeps their files."""
    return _pending.get()


# Clean-up: which files belong to which save, and which of them may be deleted.
#
# File names contain the id of their save. A save cleans up only after its own commit, deletes only files of known
# names, and never files of another pending save of this process.

# Save ids are 12 hexadecimal digits: a `data/train-1.json`, or a `data/2026-1-1.json`, belongs to the user.
# A process that is killed while it puts a file leaves the temporary name.
_TEMPORARY = r"(?:\.[0-9a-f]+\.tmp)?"
_DATA = re.compile(
    r"data/([0-9a-f]{12})(?:-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|json|stats)|\.(?:json|sha256))|\.signature)"
    + _TEMPORARY
)
_CLAIM = re.compile(r"\.take-([0-9a-f]{12})" + _TEMPORARY)
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-z]+)"')

BEGINNING = 200
"""Bytes at the beginning of a manifest that contain its save id. Every manifest of this library is longer."""
LAST_WORDS = 20.0
"""Seconds that clean-up may take over a network."""
DAY = 24 * 3600.0
"""Age in seconds after which a claim counts as interrupted, on storages where a commit cannot detect a deleted claim.
"""


def time_limit(storage: Storage) -> asyncio.Timeout:
    """Return a time limit for clean-up over a network."""
    return asyncio.timeout(None if storage.capabilities.local else LAST_WORDS)


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


async def read_beginning(storage: Storage) -> bytes:
    """Return the beginning of the manifest, which has the save id, in one short read. Raise if it does not exist."""
    head = bytearray(BEGINNING)
    try:
        await storage.read_into(METADATA, 0, [head])
    except CorruptSnapshotError:  # shorter than a manifest of this library
        return (await storage.get(METADATA))[:BEGINNING]
    return bytes(head)


def _find_save_id(beginning: bytes) -> str | None:
    """Return the save id in the beginning of a manifest; None if there is none."""
    found = _SAVE_ID.search(beginning)
    return found[1].decode() if found else None


async def committed_save_id(storage: Storage) -> str | None:
    """Return the save id of the committed snapshot, or None if there is none. Raise if it cannot be read."""
    try:
        return _find_save_id(await read_beginning(storage))
    except StorageNotFoundError:
        return None


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
        return (await storage.stat(claim)).age < older_than
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


async def is_busy(storage: Storage, older_than: float = DAY, listed: Sequence[str] | None = None) -> bool:
    """Return True if a take may be running here, in addition to the committed snapshot.

    `listed`: the files of takes, if they were listed just now.
    """
    found = await storage.list(".take-") if listed is None else listed
    claims = [path for path in found if path.startswith(".take-") and save_id_of(path) is not None]
    now = await committed_save_id(storage) if claims else None
    return any([save_id_of(claim) != now and await is_younger_than(storage, claim, older_than) for claim in claims])


_OTHERS = re.compile(rb'\s*(\{\s*"version"|version:|manifest:|world_size:)')


async def expect_own_manifest(storage: Storage) -> None:
    """Raise if another library wrote the manifest here. Deleting it would orphan the other library's files."""
    _expect_own(storage, await read_beginning(storage))


def _expect_own(storage: Storage, beginning: bytes) -> None:
    if _OTHERS.match(beginning):
        raise SnapshotExistsError(
            f"{storage.url}: holds a snapshot of another library, which is never replaced or deleted; "
            "delete its folder yourself"
        )


async def delete_snapshot(storage: Storage) -> None:
    """Delete a snapshot, the manifest first, and the leftovers of interrupted takes.

    `Snapshot.delete` calls `delete_checkpoint` of `snapshot.runs.facts`, which leaves a tombstone of a step first.
    """
    found = await list_save_files(storage)
    try:
        beginning = await read_beginning(storage)
    except StorageNotFoundError as error:
        if not found:
            raise SnapshotNotFoundError(f"{storage.url}: no snapshot to delete") from error
        data = await _remove_claims(storage, found)
    else:
        _expect_own(storage, beginning)
        data = await _remove_claims(storage, found, _find_save_id(beginning))
        await storage.delete([METADATA])
    await storage.delete([*data, BUNDLE])
    await remove_notice(storage)


async def delete_if_unchanged(
    storage: Storage, token: str, older_than: float, spared: Callable[[], Awaitable[bool]]
) -> bool:
    """Delete the snapshot if its manifest still has this token, and return True if it was deleted.

    The snapshot was selected earlier, so another one may have replaced it, or a take may be writing it. `spared` is
    checked last.
    """
    await expect_own_manifest(storage)
    found = await list_save_files(storage)
    if await is_busy(storage, older_than, found):
        return False
    if await spared() or (await storage.stat(METADATA)).token != token:
        return False
    await storage.delete([METADATA])
    data = await _remove_claims(storage, found, None, older_than)
    now = await committed_save_id(
        storage
    )  # a take that is not committed now has lost its claim, or began after the listing
    stale = [BUNDLE] if now is None else []
    await storage.delete([*(path for path in data if save_id_of(path) != now), *stale])
    if now is None:
        await remove_notice(storage)
    return True


# A save on storage
#
# Until the manifest may have been sent, the save can be undone; later it cannot.


async def commit_condition(storage: Storage, path: str, expect: Expect) -> Expect:
    """Return the condition for `Storage.commit`. Raise `StorageConflictError` if it is known not to hold.

    A storage without conditional writes is compared here. Two processes that check at the same moment may then both
    commit.
    """
    if storage.capabilities.conditional_put or expect is ANYTHING:
        return expect
    try:
        found: Expect = (await storage.stat(path)).token
    except StorageNotFoundError:
        found = ABSENT
    if found != expect:
        what = "is gone" if found is ABSENT else "is there already" if expect is ABSENT else "was replaced"
        raise StorageConflictError(f"{storage.url.join(path)}: {what}")
    return ANYTHING


class PathState(NamedTuple):
    """The state of a path before a save."""

    manifest: Expect = ABSENT
    """The manifest that the commit expects there."""
    is_clean: bool = False
    """True if no other save has files there, so there is nothing to clean up after the commit."""


CLAIMED_OR_DATA = (".take-", "data/")
"""Beginnings of the names that a save has in the root of a snapshot, apart from the manifest."""


async def expect_at_path(session: Session, *, overwrite: bool) -> PathState:
    """Return the state that the commit expects at the path. Raise if a snapshot exists and may not be overwritten.

    A name that a listing misses only delays the error: the commit checks again.
    """
    capabilities = session.storage.capabilities
    if not (capabilities.write and capabilities.atomic_put):
        raise SnapshotError(f"{session.url}: this storage is read-only")
    names = await session.storage.list_root()
    known = {METADATA, DCP_METADATA} if names is None else {name.rstrip("/") for name in names}
    manifest = await _stat(session, METADATA) if METADATA in known else None
    other = await _stat(session, DCP_METADATA, errno.EISDIR, errno.ENOTDIR) if DCP_METADATA in known else None
    if other is not None and not await is_notice(session.storage):
        raise SnapshotExistsError(
            f"{session.url}: holds a checkpoint of torch.distributed.checkpoint, which other tools would read instead "
            "of this one; save to another path, or delete its files"
        )
    if manifest is None:
        return PathState(is_clean=names is not None and not any(name.startswith(CLAIMED_OR_DATA) for name in names))
    if not overwrite:
        raise SnapshotExistsError(f"{session.url}: a snapshot exists already").with_cure(
            "save to another path, or pass overwrite=True"
        )
    with contextlib.suppress(StorageNotFoundError):
        await expect_own_manifest(session.storage)
    return PathState(manifest.token)


async def _stat(session: Session, path: str, *absent: int) -> FileStat | None:
    """Return the stat of a path, or None. Errors with a number in `absent` count as a missing file."""
    try:
        return await session.storage.stat(path)
    except StorageNotFoundError:
        return None
    except StorageError as error:
        if error.errno not in absent:
            raise
        return None


class State(Enum):
    """The progress of a save. Only its transaction changes it."""

    NEW = auto()
    """Nothing is stored."""
    BEGUN = auto()
    """The context was entered. Nothing is stored."""
    CLAIMED = auto()
    """The claim may be stored."""
    SHARING = auto()
    """Names of files that are shared with earlier snapshots may be stored. Nothing is written yet."""
    WRITING = auto()
    """Data files may be stored."""
    SENT = auto()
    """The manifest may have been sent, and may be stored."""
    REFUSED = auto()
    """The storage reported that the manifest is not stored. If that cannot be checked, the report counts."""
    UNKNOWN = auto()
    """The manifest was sent without a response: no file may be deleted."""
    REVOKED = auto()
    """The leader was lost and its claim was deleted: the save can no longer be committed."""
    COMMITTED = auto()
    ABORTED = auto()


class Transaction:
    """A save, from its claim until it is committed or all of its files are deleted.

    As an asynchronous context, it begins with `claim`. An error that leaves it is sent to the other ranks and aborts
    the save.
    """

    def __init__(self, session: Session, exchange: Exchange, save_id: str) -> None:
        self._session = session
        self._storage = session.storage
        self._exchange = exchange
        self.save_id = save_id
        self._found = PathState()
        self._look: LoopFuture[PathState] | None = None
        self._state = State.NEW
        self._files: Sequence[str] = ()
        self._checked: Sequence[str] = ()

    @property
    def state(self) -> State:
        """The progress of the save."""
        return self._state

    def look_at_path(self, *, overwrite: bool) -> None:
        """Begin to look at the path. The commit fails if its manifest has changed since then.

        The look runs beside what the caller does next, and `claim` waits for it.
        """
        self._look = start(expect_at_path(self._session, overwrite=overwrite))

    def expect_free(self) -> None:
        """Wait for the look at the path. Raise `SnapshotExistsError` if a snapshot is there that must be kept."""
        if self._look is not None:
            self._found = self._look.result()

    async def await_free(self) -> None:
        """As `expect_free`, for work on the loop."""
        if self._look is not None:
            self._found = await asyncio.wrap_future(self._look)

    def stop_looking(self) -> None:
        """End the look at the path: it must not open connections after the storage is closed."""
        if self._look is not None:
            self._look.cancel()
            self._look.settled(60)

    async def claim(self) -> None:
        """Store a claim at the path: a file that tells other processes that this save is running.

        Its name is unique, so it is safe on a storage without conditional writes. A claim that exists already, from
        this rank or the leader, is enough.
        """
        if self._state not in (State.NEW, State.BEGUN):
            return
        await self.await_free()
        self._state = State.CLAIMED if self._state is State.NEW else State.WRITING
        pending_saves().add(self.save_id)
        condition = ABSENT if self._storage.capabilities.conditional_put else ANYTHING
        await self._storage.put(claim_path(self.save_id), b"", expect=condition)

    def will_write(self, files: Sequence[str]) -> None:
        """Record that files are written from now on.

        `files` are this rank's files, for an abort on a storage that cannot be listed.
        """
        self._files = files
        if self._state is State.CLAIMED:
            self._state = State.WRITING

    async def begin_sharing(self, files: Sequence[str]) -> None:
        """Store a claim, if this is the leader, and record that these files of this rank may be stored from now on."""
        if self._exchange.rank == LEADER:
            await self.claim()
        pending_saves().add(self.save_id)
        self._files, self._state = files, State.SHARING

    def expect_files(self, files: Sequence[str]) -> None:
        """Record files that another process writes. The commit checks that they exist."""
        self._checked = files

    async def __aenter__(self) -> Transaction:
        if self._state is State.NEW:
            pending_saves().add(self.save_id)
            self._state = State.BEGUN if self._exchange.rank == LEADER else State.WRITING
        elif self._state in (State.CLAIMED, State.SHARING):
            self._state = State.WRITING
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, CommitUnknown):
                given_up = await shielded(beside_loop(self._exchange, self._exchange.fail, error))
                note = await shielded(self.abort(given_up))
                if note:
                    error.add_note(note)
        finally:
            self.release()

    async def commit(self, manifest: bytes, superfluous: Sequence[str] = ()) -> None:
        """Store the manifest. Then delete the `superfluous` files, and the leftovers of earlier saves."""
        await self._expect_claim()
        await self._expect_files()
        await beside_loop(self._exchange, self._exchange.commit)
        try:
            expect = await commit_condition(self._storage, METADATA, self._found.manifest)
            self._state = State.SENT
            with span("commit", path=str(self._session.url)):
                await self._storage.commit(claim_path(self.save_id), METADATA, manifest, expect=expect)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self._session.url}: another take committed first, or deleted this one's files; this take was "
                f"aborted ({error})"
            ) from error
        except StorageError as error:
            if self._state is not State.SENT:
                raise
            if not error.uncertain:
                self._state = State.REFUSED
                raise
            if not await self.is_committed():
                self._state = State.UNKNOWN
                raise CommitUnknown(
                    f"{self._session.url}: the manifest was sent without a response, so the snapshot may exist or "
                    "still appear; check again later with Snapshot(path).exists(). Its files were kept; a later take "
                    f"deletes them if it was not committed ({error})"
                ) from error
            await self._storage.settle()  # the manifest may still need a sync, which may be the failed step
        self._state = State.COMMITTED
        self.release()  # from here on, another save may replace this one and delete its files
        with contextlib.suppress(TimeoutError):  # the next save deletes what is left
            async with time_limit(self._storage):
                if superfluous:
                    with contextlib.suppress(SnapshotError):
                        await self._storage.delete(superfluous)
                if not self._found.is_clean:
                    await clean_after_commit(self._storage, self.save_id)

    async def is_committed(self) -> bool:
        """Return True if the snapshot at the path is this one. Return False also if that cannot be determined."""
        try:
            return await committed_save_id(self._storage) == self.save_id
        except SnapshotError:
            return False

    async def revoke(self) -> bool:
        """Delete the claim of a lost leader, if a commit needs it. Return True if no commit is possible any more."""
        if self._storage.capabilities.guarded_commit and not self._storage.host:  # else the claim is on another host
            with contextlib.suppress(SnapshotError):
                await self._storage.delete([claim_path(self.save_id)])
                if await committed_save_id(self._storage) != self.save_id:
                    self._state = State.REVOKED
        return self._state is State.REVOKED

    def release(self) -> None:
        """Record that this save is no longer pending: other saves may delete its leftovers."""
        pending_saves().discard(self.save_id)

    async def abort(self, given_up: bool = True) -> str:
        """Delete this rank's files. Return a note if the save was committed, or may have been.

        `given_up`: all ranks know that the save will not be committed. The next save deletes what is left.
        """
        state, leads = self._state, self._exchange.rank == LEADER
        if state in (State.NEW, State.BEGUN):
            self._state = State.ABORTED
        if state in (State.NEW, State.BEGUN, State.UNKNOWN, State.ABORTED):
            return ""
        if not (self._exchange.alone or given_up or state is State.REVOKED or leads):
            return ""  # the leader decided to commit, so the leader deletes files
        with contextlib.suppress(SnapshotError, TimeoutError):
            async with time_limit(self._storage):
                if state in (State.SENT, State.REFUSED, State.COMMITTED):
                    try:
                        if await committed_save_id(self._storage) == self.save_id:
                            return "the snapshot was committed nevertheless, but may not survive a loss of power"
                    except SnapshotError:
                        if state is not State.REFUSED:
                            return "cannot determine whether the snapshot was committed; check again later"
                if state is State.CLAIMED:
                    await self._storage.delete([claim_path(self.save_id)])
                elif leads:
                    await delete_save(self._storage, self.save_id, self._files)
                else:
                    await self._storage.delete(await self._own_files())
        self._state = State.ABORTED
        self.release()
        return ""

    async def _expect_claim(self) -> None:
        """Raise if the claim was deleted, on storages where a commit would not notice: data may be deleted, too."""
        if not self._storage.capabilities.guarded_commit:
            await self.expect_claim()

    async def expect_claim(self) -> None:
        """Raise if the claim was deleted. It is deleted before data files, so that explains missing ones."""
        try:
            await self._storage.stat(claim_path(self.save_id))
        except StorageNotFoundError as error:
            raise SnapshotExistsError(
                f"{self._storage.url}: another take, or a delete, deleted this take's files ({error})"
            ) from error

    async def _expect_files(self) -> None:
        """Raise if a file of another process is missing. A storage detects missing files of its own."""
        for name in self._checked:
            try:
                await self._storage.stat(name)
            except StorageNotFoundError as error:
                raise SnapshotExistsError(f"{error}: deleted by another save, or by `delete`") from error

    async def _own_files(self) -> Sequence[str]:
        """Return the existing files of this rank."""
        try:
            listed = await list_save_files(self._storage)
        except SnapshotError:
            return self._files
        own = set(self._files)  # a copy keeps the numbers of other ranks in its names
        return [path for path in listed if path in own or belongs_to(path, self.save_id, self._exchange.rank)]

    def __repr__(self) -> str:
        return f"Transaction({self.save_id}, {self._state.name})"
