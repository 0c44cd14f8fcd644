"""How a take ends: all ranks have written, and the leader commits; or it fails, and nothing is left.

Until the commit is decided everything can be taken back; from then on nothing can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from snapshot.distributed.call import Call, Undecided
from snapshot.engine import commit
from snapshot.engine.describe import Described, join
from snapshot.engine.loop import in_own_thread, run
from snapshot.engine.operation import Operation
from snapshot.errors import (
    CommitUnknown,
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.manifest.document import METADATA, Part, PartEntry, decode_part, encode
from snapshot.plan.agree import total
from snapshot.storage import ABSENT, Expect, in_thread, uninterrupted
from snapshot.trace import span

T = TypeVar("T")
AT_ONCE = 64
"""How many ranks' words the leader reads side by side."""


def told_path(save_id: str, rank: int) -> str:
    """What a rank tells the leader: gone when the manifest is there."""
    return f"data/{save_id}-{rank}-0.json"


def kept_path(save_id: str, rank: int) -> str:
    """A rank's part of a large manifest."""
    return f"data/{save_id}-{rank}.json"


class Done(msgspec.Struct, array_like=True):
    """What a rank says when all of its own is on storage: which bytes describe it."""

    told: tuple[int, str]
    """Size and digest of what it tells the leader."""
    kept: tuple[int, str, int]
    """Size, digest and number of the entries that stay in a part of its own."""
    filled: tuple[bytes, bytes] = (b"", b"")
    """Where they do: its part in the sums over all shards."""


class Ending:
    """The commit of a take, or its end without one."""

    def __init__(self, call: Call, operation: Operation, save_id: str, metadata: msgspec.Raw) -> None:
        self._call = call
        self._operation = operation
        self._storage = operation.storage
        self._save_id = save_id
        self._metadata = metadata
        self._structure = ""
        self.expect: Expect = ABSENT
        """What the commit expects to stand at the path."""
        self._decided = False
        """Whether the manifest may have been sent."""
        self._unknown = False
        """Whether nobody knows what became of it: then nothing may be deleted."""

    async def finish(self, described: Described, done: Done, structure: str) -> None:
        """All ranks have written: the leader commits, and all wait for that."""
        self._structure = structure
        if self._call.alone:
            await uninterrupted(self._commit(described, [done]))
            return
        self._call.posted = True
        exchange = asyncio.ensure_future(
            in_own_thread(
                self._call.exchange, done, lambda all_: run(uninterrupted(self._commit(described, all_))), Done, bool
            )
        )
        try:
            await asyncio.shield(exchange)
        except asyncio.CancelledError as error:  # of this rank, not of the exchange: unless it is too late, give it up
            await uninterrupted(in_own_thread(self._call.fail, error))
            try:
                await uninterrupted(_awaited(exchange))
            except CommitUnknown:
                raise
            except (SnapshotError, Undecided):
                raise error from None
            return  # it was too late
        except Undecided as error:
            await self._look(error)

    async def _look(self, lost: Undecided) -> None:
        """The leader was lost after all had written: whether it committed can only be seen on storage."""
        if not await self._stands():
            raise CommitUnknown(
                f"{self._operation.url}: {lost}, after its decision to commit; the snapshot may still appear: look "
                "again later (Snapshot(path).exists())"
            ) from lost
        log.warning("%s: %s, but the snapshot is committed", self._operation.url, lost)

    async def _stands(self) -> bool:
        """Whether what stands there is this take's, for sure."""
        try:
            return await commit.standing(self._storage) == self._save_id
        except SnapshotError:
            return False

    async def _commit(self, described: Described, done: Sequence[Done]) -> bool:
        """Make all parts one manifest, and commit it. Afterwards clean up."""
        if total(each.filled[0] for each in done) != total(each.filled[1] for each in done):
            raise CorruptSnapshotError("all ranks together did not write every shard once")
        parts = [
            PartEntry(kept_path(self._save_id, rank), *each.kept[:2], [rank], each.kept[2])
            for rank, each in enumerate(done)
        ]
        at_once = asyncio.Semaphore(AT_ONCE)
        limit = self._operation.settings.manifest_bytes

        async def tells(rank: int) -> Part:
            where = told_path(self._save_id, rank)

            async def read() -> Part:
                data = await self._storage.get(where, limit=limit)
                return decode_part(data, PartEntry(where, *done[rank].told, [rank], -1), where)

            try:
                async with at_once:
                    return await self._operation.twice(where, read)
            except StorageNotFoundError as error:
                raise SnapshotError(
                    f"{error}: rank {rank} wrote it, and rank 0 does not see it; all ranks must share one storage"
                ) from error

        others = await asyncio.gather(*map(tells, range(1, len(done))))
        document = await in_thread(join, described, self._save_id, self._metadata, self._structure, parts, others)
        data = await in_thread(encode, document)
        await commit.claimed(self._storage, self._save_id)
        await in_own_thread(self._call.commit)
        sent = False
        try:
            expect = await commit.condition(self._storage, self.expect)
            sent = self._decided = True
            with span("commit", path=str(self._operation.url)):
                await self._storage.commit(commit.claim_path(self._save_id), METADATA, data, expect=expect)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self._operation.url}: another take was faster, or cleaned this one away; nothing of this one is "
                f"left ({error})"
            ) from error
        except StorageError as error:
            if not (sent and error.uncertain):
                raise
            if not await self._stands():
                self._unknown = True
                raise CommitUnknown(
                    f"{self._operation.url}: the manifest was sent, and no answer came: the snapshot may be there, or "
                    "still appear: look again later (Snapshot(path).exists()). Its files were left, and a claim, by "
                    f"which they are cleaned away if it does not ({error})"
                ) from error
        with contextlib.suppress(TimeoutError):  # what is not cleaned away now is by the next take
            async with self._not_for_long():
                if others:
                    with contextlib.suppress(SnapshotError):
                        await self._storage.delete([told_path(self._save_id, rank) for rank in range(1, len(done))])
                await commit.clean(self._storage, self._save_id)
        return True

    def _not_for_long(self) -> asyncio.Timeout:
        """Bounds the time for cleaning up over a network: whoever waits wants to know what became of the take."""
        return commit.not_for_long(self._storage)

    async def abort(self, gone: bool) -> bool:
        """Take back what this rank wrote, unless it was committed all the same; whether it was not.

        A fault in that is no more than a leftover, which the next take cleans.
        """
        if self._unknown:
            return True
        if not self._call.alone and not gone and self._call.rank:
            return True  # the leader's word was first: what is there is the leader's to remove
        with contextlib.suppress(SnapshotError, TimeoutError):
            async with self._not_for_long():
                if self._decided and await commit.standing(self._storage) == self._save_id:
                    return False
                rank = None if self._call.rank == 0 else self._call.rank
                mine = [path for path in await commit.ours(self._storage) if commit.is_of(path, self._save_id, rank)]
                claim = {commit.claim_path(self._save_id)} if self._call.rank == 0 else set()
                await self._storage.delete([*{*mine, *claim}])
        return True


async def _awaited(future: asyncio.Future[T]) -> T:
    return await future
