"""A save on storage: claim the path, write, commit or abort, clean up.

Until the manifest may have been sent, the save can be undone; later it cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import Enum, auto
from types import TracebackType

from snapshot.aio import shielded
from snapshot.distributed.exchange import LEADER, Exchange
from snapshot.errors import (
    CommitUnknown,
    SnapshotError,
    SnapshotExistsError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.manifest.document import METADATA
from snapshot.runtime.loop import in_own_thread
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.save.claims import claim_path, pending_saves
from snapshot.storage import ABSENT, ANYTHING, Expect
from snapshot.trace import span


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
        self._expect: Expect = ABSENT
        self._state = State.NEW
        self._files: Sequence[str] = ()
        self._checked: Sequence[str] = ()

    @property
    def state(self) -> State:
        """The progress of the save."""
        return self._state

    def expect(self, found: Expect) -> None:
        """Record the state of the path: the commit fails if it has changed by then."""
        self._expect = found

    async def claim(self) -> None:
        """Store a claim at the path: a file that tells other processes that this save is running.

        Its name is unique, so it is safe on a storage without conditional writes. A claim that exists already, from
        this rank or the leader, is enough.
        """
        if self._state not in (State.NEW, State.BEGUN):
            return
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
                given_up = await shielded(in_own_thread(self._exchange.fail, error))
                note = await shielded(self.abort(given_up))
                if note:
                    error.add_note(note)
        finally:
            self.release()

    async def commit(self, manifest: bytes, superfluous: Sequence[str] = ()) -> None:
        """Store the manifest. Then delete the `superfluous` files, and the leftovers of earlier saves."""
        await self._expect_claim()
        await self._expect_files()
        await in_own_thread(self._exchange.commit)
        try:
            expect = await self._condition()
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
            async with cleanup.time_limit(self._storage):
                if superfluous:
                    with contextlib.suppress(SnapshotError):
                        await self._storage.delete(superfluous)
                await cleanup.clean_after_commit(self._storage, self.save_id)

    async def is_committed(self) -> bool:
        """Return True if the snapshot at the path is this one. Return False also if that cannot be determined."""
        try:
            return await cleanup.committed_save_id(self._storage) == self.save_id
        except SnapshotError:
            return False

    async def revoke(self) -> bool:
        """Delete the claim of a lost leader, if a commit needs it. Return True if no commit is possible any more."""
        if self._storage.capabilities.guarded_commit and not self._storage.host:  # else the claim is on another host
            with contextlib.suppress(SnapshotError):
                await self._storage.delete([claim_path(self.save_id)])
                if await cleanup.committed_save_id(self._storage) != self.save_id:
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
            async with cleanup.time_limit(self._storage):
                if state in (State.SENT, State.REFUSED, State.COMMITTED):
                    try:
                        if await cleanup.committed_save_id(self._storage) == self.save_id:
                            return "the snapshot was committed nevertheless, but may not survive a loss of power"
                    except SnapshotError:
                        if state is not State.REFUSED:
                            return "cannot determine whether the snapshot was committed; check again later"
                if state is State.CLAIMED:
                    await self._storage.delete([claim_path(self.save_id)])
                elif leads:
                    await cleanup.delete_save(self._storage, self.save_id, self._files)
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

    async def _condition(self) -> Expect:
        """Return the condition of the commit.

        A storage without conditional writes is compared here. Two processes that check at the same moment may then both
        commit.
        """
        if self._storage.capabilities.conditional_put or self._expect is ANYTHING:
            return self._expect
        try:
            found: Expect = (await self._storage.stat(METADATA)).token
        except StorageNotFoundError:
            found = ABSENT
        if found != self._expect:
            what = "is gone" if found is ABSENT else "is there already" if self._expect is ABSENT else "was replaced"
            raise StorageConflictError(f"{self._storage.url.join(METADATA)}: {what}")
        return ANYTHING

    async def _own_files(self) -> Sequence[str]:
        """Return the existing files of this rank."""
        try:
            listed = await cleanup.list_save_files(self._storage)
        except SnapshotError:
            return self._files
        own = set(self._files)  # a copy keeps the numbers of other ranks in its names
        return [path for path in listed if path in own or cleanup.belongs_to(path, self.save_id, self._exchange.rank)]

    def __repr__(self) -> str:
        return f"Transaction({self.save_id}, {self._state.name})"
