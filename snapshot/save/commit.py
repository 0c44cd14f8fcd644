"""All ranks have written: the leader joins what they wrote into one manifest and commits it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from snapshot.aio import gather_limited, in_thread, shielded
from snapshot.distributed.exchange import LEADER, Exchange, Undecided
from snapshot.errors import CommitUnknown, CorruptSnapshotError, RankError, SnapshotError, StorageNotFoundError
from snapshot.events import log
from snapshot.manifest.document import ManifestPart, PartEntry, decode_part, encode
from snapshot.plan.consensus import add_sums
from snapshot.runtime.loop import in_own_thread, run
from snapshot.runtime.session import Session
from snapshot.save.manifest_builder import RankManifest, build_document
from snapshot.save.transaction import Transaction

T = TypeVar("T")
PARTS_AT_ONCE = 64
"""Parts of ranks that the leader reads concurrently."""


def leader_part_path(save_id: str, rank: int) -> str:
    """Return the path of what a rank sends the leader. It is deleted when the manifest is there."""
    return f"data/{save_id}-{rank}-0.json"


def own_part_path(save_id: str, rank: int) -> str:
    """Return the path of a rank's part of a large manifest."""
    return f"data/{save_id}-{rank}.json"


class RankDone(msgspec.Struct, array_like=True):
    """What a rank reports when all of its files are on storage: which bytes describe them."""

    leader_part: tuple[int, str]
    """Size and digest of what it sends the leader."""
    own_part: tuple[int, str, int]
    """Size and digest of the part of its own, and the number of its entries."""
    shard_sums: tuple[bytes, bytes] = (b"", b"")
    """With a part of its own: its share in the sums over all shards."""


async def commit_with_ranks(
    session: Session, exchange: Exchange, transaction: Transaction, manifest: RankManifest, done: RankDone
) -> None:
    """Report that this rank has written, and wait until the leader has committed."""
    if exchange.alone:
        await shielded(_commit(session, transaction, manifest, [done]))
        return
    exchange.note_done()

    def lead(reports: list[RankDone]) -> bool:
        run(shielded(_commit(session, transaction, manifest, reports)))
        return True

    agreed = asyncio.ensure_future(in_own_thread(exchange.agree, done, lead, RankDone, bool))
    try:
        await asyncio.shield(agreed)
    except asyncio.CancelledError as error:  # of this rank, not of the exchange: unless it is too late, give it up
        await shielded(in_own_thread(exchange.fail, error))
        try:
            await shielded(_await(agreed))
        except CommitUnknown:
            raise
        except (SnapshotError, Undecided):
            raise error from None
    except Undecided as error:
        await _find_out(session, transaction, error)


async def _find_out(session: Session, transaction: Transaction, lost: Undecided) -> None:
    """Find out what became of the commit, if the leader was lost after all ranks had written. Deleting its claim
    decides the commit, if that needs the claim; otherwise only the storage shows whether the leader commits."""
    if await transaction.is_committed():
        log.warning("%s: %s, but the snapshot is committed", session.url, lost)
        return
    revoked = await transaction.revoke()
    if not revoked and await transaction.is_committed():
        log.warning("%s: %s, but the snapshot is committed", session.url, lost)
        return
    if not revoked:
        raise CommitUnknown(
            f"{session.url}: {lost}, after its decision to commit; the snapshot may still appear: look again later "
            "(Snapshot(path).exists())"
        ) from lost
    raise RankError(
        f"rank {LEADER}: {session.url}: {lost}, after its decision to commit; its claim was deleted, so nothing was "
        "committed, nor can be",
        rank=LEADER,
    ) from lost


async def _commit(session: Session, transaction: Transaction, manifest: RankManifest, done: Sequence[RankDone]) -> None:
    """Join all parts into one manifest, and commit it."""
    if add_sums(each.shard_sums[0] for each in done) != add_sums(each.shard_sums[1] for each in done):
        raise CorruptSnapshotError("some shards were written twice or not at all; nothing was committed")
    save_id = transaction.save_id
    parts = [
        PartEntry(own_part_path(save_id, rank), *each.own_part[:2], [rank], each.own_part[2])
        for rank, each in enumerate(done)
    ]

    async def read(rank: int) -> ManifestPart:
        return await _read_leader_part(session, save_id, rank, done[rank])

    others = await gather_limited(range(1, len(done)), read, PARTS_AT_ONCE)
    document = await in_thread(build_document, manifest, save_id, parts, others)
    data = await in_thread(encode, document)
    await transaction.commit(data, [leader_part_path(save_id, rank) for rank in range(1, len(done))])


async def _read_leader_part(session: Session, save_id: str, rank: int, done: RankDone) -> ManifestPart:
    path = leader_part_path(save_id, rank)

    async def read() -> ManifestPart:
        data = await session.storage.get(path, limit=session.settings.manifest_bytes)
        return decode_part(data, PartEntry(path, *done.leader_part, [rank], -1), path)

    try:
        return await session.read_twice(path, read)
    except StorageNotFoundError as error:
        raise SnapshotError(
            f"{error}: rank {rank} wrote it, and rank 0 does not see it; all ranks must share one storage"
        ) from error


async def _await(future: asyncio.Future[T]) -> T:
    return await future
