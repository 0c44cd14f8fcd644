"""The agreement on a commit, of one rank or several: the leader merges the parts of the manifest.

`transaction.py` then puts the manifest, which commits the take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec

from snapshot.distributed.exchange import LEADER, Exchange, OutcomeUnknown
from snapshot.errors import (
    CommitUnknown,
    CorruptSnapshotError,
    RankError,
    SnapshotError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.io.aio import gather_limited, in_thread, shielded
from snapshot.io.loop import cancel_all, in_own_thread, run
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING, Storage
from snapshot.io.url import URL
from snapshot.manifest import entries as e
from snapshot.manifest.document import METADATA, PartEntry, decode_metadata, digest_in, encode
from snapshot.manifest.parts import ManifestPart, decode_part, encode_own_part
from snapshot.plan.consensus import add_sums
from snapshot.save.describe import RankManifest, build_document
from snapshot.save.findings import noted_findings, suspicions
from snapshot.save.rank_share import FEW
from snapshot.save.take_options import TakeSigner
from snapshot.save.transaction import Transaction, clean_after_commit
from snapshot.save.writer import write_small
from snapshot.tensors.digest import Root

# Work that each rank does by itself: it stops if another rank fails, whose error is raised here.

T = TypeVar("T")
LOOK = 0.5
"""Seconds between checks for failed ranks while this rank works."""


async def while_all_go_on(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and stop it if another rank fails meanwhile."""
    if exchange.alone:
        return await work
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            error = await in_own_thread(exchange.given_up)
            if error is not None:
                raise error
    except BaseException:
        await shielded(cancel_all([task]))
        raise
    return task.result()


async def raise_fault_of_another_rank(exchange: Exchange, error: BaseException) -> None:
    """Raise the error of the rank that failed first: a storage error here may come from its clean-up."""
    if isinstance(error, StorageError):
        first = await shielded(in_own_thread(_first_fault, exchange))
        if isinstance(first, RankError) and first.rank != exchange.rank:
            raise first from error


def _first_fault(exchange: Exchange) -> SnapshotError | None:
    with contextlib.suppress(SnapshotError, OutcomeUnknown):
        return exchange.given_up()
    return None


# The commit of several ranks: the leader merges their manifest parts and commits the result.

D = TypeVar("D")
PARTS_AT_ONCE = 64
"""Rank parts that the leader reads concurrently."""
FILES_AT_ONCE = 16
"""Files that the leader looks at concurrently."""


def leader_part_path(save_id: str, rank: int) -> str:
    """Return the path of the part that a rank sends to the leader. It is deleted after the commit."""
    return f"data/{save_id}-{rank}-0.json"


def own_part_path(save_id: str, rank: int) -> str:
    """Return the path of a rank's part of a large manifest."""
    return f"data/{save_id}-{rank}.json"


async def write_own_part(
    session: Session, save_id: str, rank: int, described: RankManifest
) -> tuple[bytes | bytearray, PartEntry | None]:
    """Write the rank's own part of a large manifest. Return its bytes, and its entry; none if there is no such part."""
    if not described.cut:
        return b"", None
    encoded = await in_thread(encode_own_part, described.own)
    expect_readable(session, len(encoded.data), "a part of the manifest")
    path = own_part_path(save_id, rank)
    await write_small(session.storage, path, [encoded.data])
    return encoded.data, encoded.describe(path, [rank])


class RankDone(msgspec.Struct, array_like=True):
    """A rank's report that all of its files are stored, with the sizes and digests of its manifest parts."""

    leader_part: tuple[int, str]
    """Size and digest of the part for the leader."""
    own_part: PartEntry | None = None
    """The rank's own part of a large manifest, as the manifest lists it."""
    shard_sums: tuple[bytes, bytes] = (b"", b"")
    """For a rank with its own part: its share of the checksums over all shards."""
    host: str = ""
    """The rank's host, if each host has files of its own."""
    sent_part: bytes = b""
    """The part for the leader, if the leader cannot read this rank's files."""
    signed: dict[str, Root] | None = None
    """The roots of this rank's files, if `sign` was given there."""
    nbytes: int = 0
    """Bytes of the data files that it wrote, as they are stored."""
    newest: bool = False
    """True if its own entries need the newest format."""
    told: dict[str, bytes] = {}
    """What its observers tell the leader, by their names."""


Judge = Callable[[Sequence[Mapping[str, bytes]], msgspec.Raw], tuple[msgspec.Raw, list[str]]]
"""Returns the metadata to commit, from what the observers of all ranks tell, and the observers that are left. It raises
if nothing may be committed."""


class Committed(msgspec.Struct, array_like=True):
    """The leader's answer."""

    manifest: bytes = b""
    """The committed manifest, for hosts that need a copy."""
    keepers: list[int] = []
    """Ranks that store the manifest on their host."""
    nbytes: int = 0
    """Bytes of the data files that all ranks wrote."""
    observers: list[str] = []
    """The observers that no rank has dropped."""
    digest: str = ""
    """The digest in the committed manifest, from which all other bytes of the snapshot follow."""
    suspect: tuple[str, ...] = ()
    """Why the snapshot is suspect; empty unless it is."""
    findings: tuple[str, ...] = ()
    """What else guards have found."""


async def commit_with_ranks(
    session: Session,
    exchange: Exchange,
    transaction: Transaction,
    manifest: RankManifest,
    done: RankDone,
    *,
    signer: TakeSigner | None = None,
    judge: Judge | None = None,
) -> Committed:
    """Report that this rank has finished writing, and wait for the leader's commit."""

    async def commit(reports: list[RankDone]) -> Committed:
        made = await _commit(session, transaction, manifest, reports, signer=signer, judge=judge)
        first: dict[str, int] = {}
        for rank, each in enumerate(reports):
            first.setdefault(each.host, rank)
        made.keepers = [rank for rank in first.values() if rank != LEADER]
        if not made.keepers:
            made.manifest = b""
        return made

    if exchange.alone:
        return await shielded(commit([done]))
    committed = await commit_together(session.url, exchange, transaction, done=done, commit=commit, answer=Committed)
    if committed is None:  # the leader is lost
        return Committed(nbytes=done.nbytes, observers=list(done.told))
    if exchange.rank in committed.keepers:
        await shielded(_keep_manifest(session, transaction, committed.manifest))
    return committed


class Outcome(Protocol):
    """The result of a commit, as the storage shows it."""

    async def is_committed(self) -> bool:
        """Return True if the result is complete. Return False also if that cannot be determined."""

    async def revoke(self) -> bool:
        """Prevent a commit by a lost leader. Return True if none is possible any more."""


async def commit_together(
    url: URL,
    exchange: Exchange,
    outcome: Outcome,
    *,
    done: D,
    commit: Callable[[list[D]], Coroutine[Any, Any, T]],
    answer: type[T],
) -> T | None:
    """Report that this rank has finished writing, and wait until the leader has called `commit`. Return its result.

    Return None if the leader was lost after the commit.
    """
    exchange.note_done()

    def lead(reports: list[D]) -> T:
        return run(shielded(commit(reports)))

    agreed = asyncio.ensure_future(in_own_thread(exchange.agree, done, lead, type(done), answer))
    try:
        return await asyncio.shield(agreed)
    except asyncio.CancelledError as error:  # this rank was cancelled, not the exchange: abort if it is not too late
        await shielded(in_own_thread(exchange.fail, error))
        try:
            return await shielded(_await(agreed))
        except CommitUnknown:
            raise
        except (SnapshotError, OutcomeUnknown):
            raise error from None
    except OutcomeUnknown as error:
        await _find_out(url, outcome, error)
        return None


async def _find_out(url: URL, outcome: Outcome, lost: OutcomeUnknown) -> None:
    """Find out whether the commit happened, if the leader was lost after all ranks had written.

    If the commit needs the leader's claim, deleting the claim decides it. Otherwise only the storage shows the result.
    """
    if await outcome.is_committed():
        log.warning("%s: %s, but the snapshot is committed", url, lost)
        return
    revoked = await outcome.revoke()
    if not revoked and await outcome.is_committed():
        log.warning("%s: %s, but the snapshot is committed", url, lost)
        return
    if not revoked:
        raise CommitUnknown(
            f"{url}: {lost}, after its decision to commit; the snapshot may still appear; check again later "
            "with Snapshot(path).exists()"
        ) from lost
    raise RankError(
        f"rank {LEADER}: {url}: {lost}, after its decision to commit; its claim was deleted, so the take "
        "cannot be committed any more",
        rank=LEADER,
    ) from lost


SHORTEST = len(encode(e.TensorEntry("data/0123456789ab-0-0.bin", (0, 1), "int8", (), f"xxh3:{0:032}"))) + 5
"""The least bytes of a tensor's entry in a manifest, without its path."""
LONG = 1000
"""Bytes of a long entry with its path. A take with fewer bytes in all is not measured before it writes."""


def expect_readable(session: Session, nbytes: int, what: str) -> None:
    """Raise `SnapshotError` if readers would refuse a manifest, or a part of one, with this number of bytes."""
    limit = session.settings.manifest_bytes
    if nbytes > limit:
        raise SnapshotError(
            f"{session.url}: {what} would have at least {nbytes:,} bytes, and readers accept at most {limit:,}: raise "
            "SNAPSHOT_MANIFEST_BYTES for the take and for all readers, or save fewer values, or longer tensors"
        )


async def _keep_manifest(session: Session, transaction: Transaction, manifest: bytes) -> None:
    """Store the committed manifest on this host, too. The snapshot does not depend on it, so a failure is logged."""
    try:
        await session.storage.put(METADATA, manifest, expect=ANYTHING)
        await session.storage.settle()
        await clean_after_commit(session.storage, transaction.save_id)
    except StorageError as error:
        log.warning("%s: committed, but this host has no copy of the manifest: %s", session.url, error)


async def _commit(
    session: Session,
    transaction: Transaction,
    manifest: RankManifest,
    done: Sequence[RankDone],
    *,
    signer: TakeSigner | None,
    judge: Judge | None,
) -> Committed:
    """Merge all parts into one manifest, and commit it. Its signature is stored first: a committed snapshot has it."""
    if add_sums(each.shard_sums[0] for each in done) != add_sums(each.shard_sums[1] for each in done):
        raise CorruptSnapshotError("some shards were written twice or not at all; the take was aborted")
    save_id = transaction.save_id
    observers: list[str] = []
    if judge is not None:
        metadata, observers = judge([each.told for each in done], manifest.metadata)
        manifest = replace(manifest, metadata=metadata)
    known = decode_metadata(manifest.metadata)
    parts = [each.own_part for each in done if each.own_part is not None and each.own_part.count]

    async def read(rank: int) -> ManifestPart:
        return await _read_leader_part(session, save_id, rank, done[rank])

    try:
        others = await gather_limited(range(1, len(done)), read, PARTS_AT_ONCE)
    except SnapshotError:
        await transaction.expect_claim()
        raise
    newest = any(each.newest for each in done)

    def build() -> bytes:
        return encode(build_document(manifest, save_id, parts, others, newest=newest))

    few = not others and len(manifest.own) + len(manifest.shared) <= FEW
    data = build() if few else await in_thread(build)
    expect_readable(session, len(data), "the manifest")
    if signer is not None:
        roots = {location: root for each in done for location, root in (each.signed or {}).items()}
        await signer.put_signature(session.storage, save_id, data, roots)
    stored = [rank for rank in range(1, len(done)) if not done[rank].sent_part]
    await transaction.commit(data, [leader_part_path(save_id, rank) for rank in stored])
    nbytes, verdict = sum(each.nbytes for each in done), (suspicions(known), noted_findings(known))
    return Committed(data, [], nbytes, observers, digest_in(data), *verdict)


async def expect_written(storage: Storage, shares: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raise if the leader does not find the files that the other ranks wrote. `shares`: names and sizes, by rank."""

    async def look(item: tuple[int, str, int]) -> None:
        rank, name, size = item
        try:
            found = (await storage.stat(name)).size
        except StorageNotFoundError as error:
            raise SnapshotError(
                f"{error}: rank {rank} wrote it, but rank {LEADER} cannot find it; all ranks must share one storage"
            ) from error
        if found != size:
            raise SnapshotError(f"{storage.url.join(name)}: must have {size:,} bytes from rank {rank}, got {found:,}")

    items = [(rank, name, size) for rank, share in enumerate(shares) if rank != LEADER for name, size in share]
    await gather_limited(items, look, FILES_AT_ONCE)


async def _read_leader_part(session: Session, save_id: str, rank: int, done: RankDone) -> ManifestPart:
    path = leader_part_path(save_id, rank)

    async def read() -> ManifestPart:
        data = done.sent_part or await session.storage.get(path, limit=session.settings.manifest_bytes)
        return decode_part(data, PartEntry(path, *done.leader_part, [rank], -1), path)

    try:
        return await session.read_twice(path, read)
    except StorageNotFoundError as error:
        raise SnapshotError(
            f"{error}: rank {rank} wrote it, but rank 0 cannot read it; all ranks must share one storage"
        ) from error


async def _await(future: asyncio.Future[T]) -> T:
    return await future
