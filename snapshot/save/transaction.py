"""How a take ends: all ranks have written, and the leader commits; or it fails, and nothing is left.

Until the commit is decided everything can be taken back; from then on nothing can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from snapshot.aio import in_thread, shielded
from snapshot.distributed.exchange import LEADER, Exchange, Undecided
from snapshot.errors import (
    CommitUnknown,
    CorruptSnapshotError,
    RankError,
    SnapshotError,
    SnapshotExistsError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.manifest.document import METADATA, ManifestPart, PartEntry, decode_part, encode
from snapshot.plan.consensus import total
from snapshot.runtime.loop import in_own_thread, run
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.save.manifest_builder import RankManifest, build_document
from snapshot.storage import ABSENT, Expect
from snapshot.trace import span

T = TypeVar("T")
AT_ONCE = 64
"""How many ranks' words the leader reads side by side."""


def leader_part_path(save_id: str, rank: int) -> str:
    """What a rank tells the leader: gone when the manifest is there."""
    return f"data/{save_id}-{rank}-0.json"


def own_part_path(save_id: str, rank: int) -> str:
    """A rank's part of a large manifest."""
    return f"data/{save_id}-{rank}.json"


class RankDone(msgspec.Struct, array_like=True):
    """What a rank says when all of its own is on storage: which bytes describe it."""

    told: tuple[int, str]
    """Size and digest of what it tells the leader."""
    kept: tuple[int, str, int]
    """Size, digest and number of the entries that stay in a part of its own."""
    filled: tuple[bytes, bytes] = (b"", b"")
    """Where they do: its part in the sums over all shards."""


class Ending:
    """The commit of a take, or its end without one."""

    def __init__(self, exchange: Exchange, session: Session, save_id: str, metadata: msgspec.Raw) -> None:
        self._exchange = exchange
        self._session = session
        self._storage = session.storage
        self._save_id = save_id
        self._metadata = metadata
        self._structure = ""
        self.expect: Expect = ABSENT
        """What the commit expects to stand at the path."""
        self._decided = False
        """Whether the manifest may have been sent."""
        self._unknown = False
        """Whether nobody knows what became of it: then nothing may be deleted."""
        self._gone = False
        """Whether the leader was lost, and cannot commit any more."""
        self._refused = False
        """Whether the storage said that the manifest is not there: where nobody can look, that is believed."""
        self.by_another: list[str] = []
        """The files that a writer process has written."""
        self.names: list[str] = []
        """The files that this rank may have made, for where nobody can list them."""

    async def finish(self, described: RankManifest, done: RankDone, structure: str) -> None:
        """All ranks have written: the leader commits, and all wait for that."""
        self._structure = structure
        if self._exchange.alone:
            await shielded(self._commit(described, [done]))
            return
        self._exchange.posted = True
        exchange = asyncio.ensure_future(
            in_own_thread(
                self._exchange.agree,
                done,
                lambda all_: run(shielded(self._commit(described, all_))),
                RankDone,
                bool,
            )
        )
        try:
            await asyncio.shield(exchange)
        except asyncio.CancelledError as error:  # of this rank, not of the exchange: unless it is too late, give it up
            await shielded(in_own_thread(self._exchange.fail, error))
            try:
                await shielded(_awaited(exchange))
            except CommitUnknown:
                raise
            except (SnapshotError, Undecided):
                raise error from None
            return  # it was too late
        except Undecided as error:
            await self._look(error)

    async def _look(self, lost: Undecided) -> None:
        """The leader was lost after all had written. Where a commit needs its claim, taking that away decides it; else
        whether it commits can only be seen on storage."""
        if await self._stands() or await self._late():
            log.warning("%s: %s, but the snapshot is committed", self._session.url, lost)
            return
        if not self._gone:
            raise CommitUnknown(
                f"{self._session.url}: {lost}, after its decision to commit; the snapshot may still appear: look "
                "again later (Snapshot(path).exists())"
            ) from lost
        raise RankError(
            f"rank {LEADER}: {self._session.url}: {lost}, after its decision to commit; its claim was taken away, so "
            "nothing was committed, nor can be",
            rank=LEADER,
        ) from lost

    async def _late(self) -> bool:
        """Take the claim away, where a commit needs it; whether the commit was there before."""
        if self._storage.capabilities.guarded_commit:
            with contextlib.suppress(SnapshotError):
                await self._storage.delete([cleanup.claim_path(self._save_id)])
                self._gone = await cleanup.standing(self._storage) != self._save_id
                return not self._gone
        return False

    async def _stands(self) -> bool:
        """Whether what stands there is this take's, for sure."""
        try:
            return await cleanup.standing(self._storage) == self._save_id
        except SnapshotError:
            return False

    async def _commit(self, described: RankManifest, done: Sequence[RankDone]) -> bool:
        """Make all parts one manifest, and commit it."""
        if total(each.filled[0] for each in done) != total(each.filled[1] for each in done):
            raise CorruptSnapshotError("all ranks together did not write every shard once")
        parts = [
            PartEntry(own_part_path(self._save_id, rank), *each.kept[:2], [rank], each.kept[2])
            for rank, each in enumerate(done)
        ]
        at_once = asyncio.Semaphore(AT_ONCE)
        limit = self._session.settings.manifest_bytes

        async def tells(rank: int) -> ManifestPart:
            where = leader_part_path(self._save_id, rank)

            async def read() -> ManifestPart:
                data = await self._storage.get(where, limit=limit)
                return decode_part(data, PartEntry(where, *done[rank].told, [rank], -1), where)

            try:
                async with at_once:
                    return await self._session.twice(where, read)
            except StorageNotFoundError as error:
                raise SnapshotError(
                    f"{error}: rank {rank} wrote it, and rank 0 does not see it; all ranks must share one storage"
                ) from error

        others = await asyncio.gather(*map(tells, range(1, len(done))))
        document = await in_thread(
            build_document, described, self._save_id, self._metadata, self._structure, parts, others
        )
        data = await in_thread(encode, document)
        return await self.commit(data, [leader_part_path(self._save_id, rank) for rank in range(1, len(done))])

    async def commit(self, data: bytes, told: Sequence[str] = ()) -> bool:
        """Commit a manifest whose files are written. Afterwards clean up, and remove what the ranks told the leader."""
        await cleanup.claimed(self._storage, self._save_id)
        await self._expect_written()
        await in_own_thread(self._exchange.commit)
        sent = False
        try:
            expect = await cleanup.condition(self._storage, self.expect)
            sent = self._decided = True
            with span("commit", path=str(self._session.url)):
                await self._storage.commit(cleanup.claim_path(self._save_id), METADATA, data, expect=expect)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self._session.url}: another take was faster, or cleaned this one away; nothing of this one is "
                f"left ({error})"
            ) from error
        except StorageError as error:
            if not (sent and error.uncertain):
                self._refused = True
                raise
            if await self._stands():
                await self._storage.settle()  # what stands there may have to be synced, and may be what failed
            else:
                self._unknown = True
                raise CommitUnknown(
                    f"{self._session.url}: the manifest was sent, and no answer came: the snapshot may be there, or "
                    "still appear: look again later (Snapshot(path).exists()). Its files were left, and a claim, by "
                    f"which they are cleaned away if it does not ({error})"
                ) from error
        cleanup.leave(self._save_id)  # from now on whoever replaces it may clean it away
        with contextlib.suppress(TimeoutError):  # what is not cleaned away now is by the next take
            async with self._not_for_long():
                if told:
                    with contextlib.suppress(SnapshotError):
                        await self._storage.delete(told)
                await cleanup.clean(self._storage, self._save_id)
        return True

    async def _expect_written(self) -> None:
        """Raise if what another process has written is gone; what this one wrote its storage expects itself."""
        for name in self.by_another:
            try:
                await self._storage.stat(name)
            except StorageNotFoundError as error:
                raise SnapshotExistsError(f"{error}: was cleaned away by another take or delete") from error

    def _not_for_long(self) -> asyncio.Timeout:
        """Bounds the time for cleaning up over a network: whoever waits wants to know what became of the take."""
        return cleanup.not_for_long(self._storage)

    async def abort(self, gone: bool) -> str:
        """Take back what this rank wrote, unless it was committed all the same: then, what is to be said of that.

        A fault in that is no more than a leftover, which the next take cleans.
        """
        if self._unknown:
            return ""
        if not (self._exchange.alone or gone or self._gone) and self._exchange.rank:
            return ""  # the leader's word was first: what is there is the leader's to remove
        with contextlib.suppress(SnapshotError, TimeoutError):
            async with self._not_for_long():
                if self._decided:
                    try:
                        if await cleanup.standing(self._storage) == self._save_id:
                            return "the snapshot was committed all the same, but may not survive a loss of power"
                    except SnapshotError:
                        if not self._refused:
                            return "whether the snapshot was committed cannot be seen: look again later"
                claim = {cleanup.claim_path(self._save_id)} if self._exchange.rank == 0 else set()
                await self._storage.delete([*{*await self._mine(), *claim}])
        return ""

    async def _mine(self) -> list[str]:
        """The files of this rank; of the leader, all of the take."""
        rank = None if self._exchange.rank == 0 else self._exchange.rank
        try:
            return [path for path in await cleanup.ours(self._storage) if cleanup.is_of(path, self._save_id, rank)]
        except SnapshotError:
            return self.names


async def _awaited(future: asyncio.Future[T]) -> T:
    return await future
