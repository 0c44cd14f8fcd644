"""A take on one rank, once it is planned: claim, write, commit. `take.py` has all steps of a take in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from snapshot.distributed.exchange import beside_loop
from snapshot.events import emit
from snapshot.io.aio import in_thread, shielded
from snapshot.io.loop import LoopFuture, work_on
from snapshot.io.session import Session
from snapshot.io.system import PerProcess
from snapshot.manifest.document import encode_metadata
from snapshot.manifest.entries import needs_third_format
from snapshot.plan.layout import LEFT_OUT, SavePlan, name_data_file
from snapshot.plan.plan_cache import PlanCache
from snapshot.reports import TakeReport
from snapshot.save.begin import Claim
from snapshot.save.commit import (
    LONG,
    SHORTEST,
    RankDone,
    commit_with_ranks,
    expect_readable,
    leader_part_path,
    own_part_path,
    raise_fault_of_another_rank,
    while_all_go_on,
    write_own_part,
)
from snapshot.save.describe import RankManifest, build_entries, describe_alone, encode_for_leader, shard_checksums
from snapshot.save.observers import Observers
from snapshot.save.pace import note_speed
from snapshot.save.rank_share import Share
from snapshot.save.reuse import NO_REUSE, Reuse, remember_unchanged
from snapshot.save.staging import PartSource
from snapshot.save.step_barrier import PendingCopy
from snapshot.save.take_options import TakeSigner
from snapshot.save.transaction import State, Transaction
from snapshot.save.writer import PartSink, Writer, WrittenFile, write_small
from snapshot.tensors.digest import SIZE, FileTree, Root, count_blocks, digest_range, root_of, tree_of

if TYPE_CHECKING:
    from snapshot.save.compression import Packing

Verify = Callable[[Session, RankManifest], Coroutine[Any, Any, None]]
"""Reads the written bytes back, and raises if they differ."""
SENT = 4096
"""Maximum bytes of a part that is sent to the leader through the store, if the storage is remote."""

_plans = PerProcess(PlanCache)


def plan_writes(
    share: Share,
    session: Session,
    *,
    staged: bool,
    groups: bytes = b"",
    expected: SavePlan | None = None,
    packing: Packing | None = None,
) -> SavePlan:
    """Return the plan of the data files. `staged`: all leaves are copied first, except those in the group LATE.

    With `packing`, files are short enough to be compressed in its memory.

    Raise `ValueError` if an `expected` plan is for something else.
    """
    blobs = sum(len(blob.data) + SIZE * count_blocks(len(blob.data)) for blob in share.blobs)
    limits = session.storage.limits
    payload = share.nbytes
    if LEFT_OUT in groups:
        payload -= sum(leaf.nbytes for leaf, group in zip(share.leaves, groups, strict=True) if group == LEFT_OUT)
    # What is in memory at once limits the length of parts. Without staging, only direct I/O copies anything.
    at_once = payload if staged else limits.preferred_part * limits.parallel_parts if limits.alignment > 1 else 0
    at_once = min(at_once, session.budget.limit, payload)
    loads = tuple(share.loads) if len(share.loads) > 1 else ()
    # If files accept parts only in order, the number of files is not limited by the number of cores.
    sequential = limits.in_order and limits.parts_per_file == 1
    lanes = (sequential and (session.settings.lanes or limits.parallel_files)) or session.settings.lane_count()
    longest = packing.longest_file(payload) if packing is not None else 0
    plan = _plans.get().plan(
        share.leaves, blobs, limits, lanes, staged_bytes=at_once, loads=loads, groups=groups, longest=longest
    )
    if expected is not None and expected.structure != plan.structure:
        raise ValueError("the plan must be for the same names, shapes, dtypes and storage")
    return plan


class AtCommit(NamedTuple):
    """What a take adds, checks and signs when it commits."""

    metadata: msgspec.Raw
    later: Future[Mapping[str, Any]] | None = None
    """Metadata that is known only before the commit."""
    verify: Verify | None = None
    signer: TakeSigner | None = None
    observers: Observers | None = None


class Take:
    """One take on this rank: its files, and the commit.

    From its first step on, `write_and_commit` ends everything that the claim has: session, exchange and meter.
    """

    def __init__(
        self,
        claim: Claim,
        share: Share,
        plan: SavePlan,
        *,
        source: PartSource,
        packing: Packing | None,
        commit: AtCommit,
        reuse: Reuse = NO_REUSE,
        sink: PartSink | None = None,
    ) -> None:
        """`sink`: writes the data files in place of this process, from parts that the source stages ahead."""
        signer = commit.signer
        if signer is not None:
            signer.expect_signable(claim.session.storage, leads=claim.exchange.rank == 0)
        self._signer = signer
        self.claim = claim
        self.session = claim.session
        self.plan = plan
        self._exchange = claim.exchange
        self._meter = claim.meter
        self._share = share
        self._source = source
        self._sink = sink
        self._metadata, self._later = commit.metadata, commit.later
        self._reuse = reuse
        self._verify = commit.verify
        self._observers = commit.observers or Observers()
        self.committed_bytes = 0
        """Bytes of the data files that all ranks wrote, as they are stored, after the commit."""
        self._began = time.perf_counter()
        self.work: LoopFuture[None] | None = None
        self.writer = Writer(
            self.session.storage,
            source,
            self.session.budget,
            self._meter.wrote,
            wanted_part=self.session.settings.part_bytes or source.part_bytes,
            packing=packing,
            signed=signer is not None,
        )
        self._meter.begin(plan.total_bytes)
        self.emit("start", bytes=plan.total_bytes)

    @property
    def report(self) -> TakeReport:
        """A report of the bytes that this rank writes and shares."""
        made, omitted = self._reuse, self._reuse.omitted
        tables = [each.tables for each in made.files]
        if omitted is not None:
            tables.append(dict(omitted.tables))
        return TakeReport(
            self.plan.total_bytes + sum(len(table) for each in tables for table in each.values()),
            made.nbytes,
            len(made.files),
            omitted.nbytes if omitted is not None else 0,
            omitted.base.save_id if omitted is not None else "",
            tuple(made.notes),
            self._observers.findings,
        )

    @property
    def late(self) -> PendingCopy | None:
        """The copies that an optimizer's `step()` waits for, before the take starts."""
        return self._source.late

    def emit(self, name: str, **fields: Any) -> None:
        """Emit an event of this take."""
        emit(name, self._meter.verb, str(self.session.url), **fields)

    def start(self) -> LoopFuture[None]:
        """Stage what must be staged in this call, start to write in the background, and return the work."""
        return self._source.begin(self.writer.parts, self._start_to_write)

    def _start_to_write(self) -> LoopFuture[None]:
        """Start to write, once."""
        if self.work is None:
            self.claim.transaction.expect_free()  # an existing snapshot is an error of the call
            self.work = self._source.work = work_on(self.write_and_commit())
            self.work.begin()  # an error of the call finds what is to be cancelled, wherever it comes
        return self.work

    async def write_and_commit(self) -> None:
        """Claim, write, commit and clean up. If a step fails, delete everything.

        From the commit on, nothing can be interrupted: a committed snapshot must not be deleted.
        """
        transaction = self.claim.transaction
        try:
            async with transaction:
                try:
                    await transaction.claim()
                    manifest, done = await while_all_go_on(self._exchange, self._write_files(transaction))
                    if self._verify is not None:
                        await while_all_go_on(self._exchange, self._verify(self.session, manifest))
                    if self._later is not None and self._exchange.rank == 0:
                        known = await while_all_go_on(self._exchange, self._await_metadata(self._later))
                        manifest = replace(manifest, metadata=known)
                    await self._source.check()
                    if self._reuse.omitted is not None:
                        await self._reuse.omitted.expect_base()
                    committed = await commit_with_ranks(
                        self.session,
                        self._exchange,
                        transaction,
                        manifest,
                        done,
                        signer=self._signer,
                        judge=self._observers.judge,
                    )
                    self.committed_bytes = committed.nbytes
                    self._observers.keep(committed.observers)
                    self._observers.committed()
                    self._share.committed()
                except BaseException as error:  # before the other ranks get the error, and files are deleted
                    self._source.stop(error)
                    raise
        except BaseException as error:
            if transaction.state not in (State.SENT, State.REFUSED, State.COMMITTED):  # the error already has a note
                self.emit("failed", error=error)
            await raise_fault_of_another_rank(self._exchange, error)
            raise
        finally:
            await self._source.end()
            self._forget_tensors()
            await shielded(beside_loop(self._exchange, self._exchange.close))
            await shielded(self.session.close())
            self._meter.close()
        seconds = time.perf_counter() - self._began
        verdict = {"digest": committed.digest, "suspect": committed.suspect, "findings": committed.findings}
        nbytes, shared = self.plan.total_bytes, self._reuse.nbytes
        self.emit("committed", bytes=nbytes, shared_bytes=shared, seconds=round(seconds, 3), **verdict)

    async def _await_metadata(self, later: Future[Mapping[str, Any]]) -> msgspec.Raw:
        found: Mapping[str, Any] = await asyncio.wrap_future(later)
        return encode_metadata(found)

    def _forget_tensors(self) -> None:
        """Release the application's tensors: an error or the pending snapshot must not keep them alive."""
        self._source.forget()
        self._observers.forget()
        del self._share, self.writer, self._source

    async def _write_files(self, transaction: Transaction) -> tuple[RankManifest, RankDone]:
        """Write the data files, and the files that describe them to the leader."""
        rank, save_id, files = self._exchange.rank, transaction.save_id, self.plan.files
        storage, count = self.session.storage, self._meter.wrote
        kept, first = self._reuse.files, self._reuse.first_number
        locations = [name_data_file(save_id, rank, first + n, "safetensors") for n in range(len(files))]
        binary = name_data_file(save_id, rank, first + len(files), "bin")
        shared = [each.location for each in kept]
        beside = {
            suffix: name_data_file(save_id, rank, first + len(files), suffix.removeprefix("."))
            for suffix in self._observers.suffixes
        }
        own = [binary, *beside.values(), own_part_path(save_id, rank), leader_part_path(save_id, rank)]
        if self._signer is not None:
            own += self._signer.files_of(save_id, binary)
        if len(self._share.leaves) * LONG > self.session.settings.manifest_bytes:
            shortest = sum(SHORTEST + len(each.path) for each in self._share.leaves)
            if not self._exchange.alone:
                shortest //= 2  # the rank's own entries and the shared ones may be in two files
            expect_readable(self.session, shortest, "the manifest")
        transaction.will_write([*shared, *locations, *own])
        began = time.perf_counter()
        fresh = await self._write_data(locations)
        stored = sum(each.file.size if each.packed is None else each.packed.size for each in fresh)
        packed = self.writer.packing is not None
        note_speed(
            self.session,
            sum(file.size for file in files),
            time.perf_counter() - began,
            stored=stored,
            packed=packed,
        )
        written = [*kept, *fresh]
        describe = partial(self._describe, save_id, written, binary)
        manifest = describe() if self._share.is_small else await in_thread(describe)
        if manifest.chunks:
            await write_small(storage, binary, manifest.chunks, count)
        small = {binary: manifest.chunks} if manifest.chunks else {}
        for suffix, content in (await in_thread(self._observers.files)).items() if beside else ():
            path = beside[suffix]
            small[path] = [content]
            manifest.files[path] = describe_alone(content)
            await write_small(storage, path, small[path], count)
        own_part, described = await write_own_part(self.session, save_id, rank, manifest)
        leader_part = await in_thread(encode_for_leader, manifest) if rank else b""
        expect_readable(self.session, len(leader_part), "a part of the manifest")
        sends = bool(storage.host) or self._may_send(leader_part)
        if leader_part and not sends:
            await write_small(storage, leader_part_path(save_id, rank), [leader_part])
        signed: dict[str, Root] | None = None
        if self._signer is not None:
            trees = await self._hash_files(written, small, own_part)
            await self._signer.put_leaves(storage, trees)
            signed = {location: root_of(tree) for location, tree in trees.items()}
        if rank:
            await storage.settle()  # the leader's commit does it for the leader's files
        done = RankDone(
            (len(leader_part), digest_range(leader_part)),
            described,
            shard_checksums(manifest) if manifest.cut else (b"", b""),
            storage.host,
            leader_part if sends else b"",
            signed,
            stored,
            needs_third_format(manifest.own.values()) or (described is not None and described.index is not None),
            self._observers.tell(),
        )
        return manifest, done

    async def _write_data(self, locations: Sequence[str]) -> list[WrittenFile]:
        """Write the data files, here or in a writer process."""
        files, writer = self.plan.files, self.writer
        if self._sink is None:
            return await writer.write(files, locations)
        self.claim.transaction.expect_files(locations)
        return await self._sink.write(
            self.session,
            files,
            locations,
            self._source,
            parts=[writer.parts(file) for file in files],
            progress=self._meter.wrote,
            packing=writer.packing,
            signed=writer.signed,
        )

    def _describe(self, save_id: str, written: Sequence[WrittenFile], binary: str) -> RankManifest:
        """Build this rank's entries. The leaves are released."""
        share = self._share
        remember_unchanged(save_id, share, self._reuse, written)
        self._source.forget()
        made = build_entries(
            share, written, binary, structure=self.plan.structure, metadata=self._metadata, reuse=self._reuse
        )
        self._observers.described(share.flat.entries)
        return made

    def _may_send(self, leader_part: bytes) -> bool:
        """Return True if a part for the leader is sent through the ranks' store. As a file, it needs three requests.

        The last rank's part is a file: the leader reads it, and so finds out that all ranks have one storage. On a file
        system all parts are files: hosts may lack a mount, one by one.
        """
        remote = not self.session.storage.capabilities.local
        return remote and len(leader_part) <= SENT and self._exchange.rank != self._exchange.world - 1

    async def _hash_files(
        self,
        written: Sequence[WrittenFile],
        small: Mapping[str, Sequence[bytes | bytearray]],
        own_part: bytes | bytearray,
    ) -> dict[str, FileTree]:
        """Return the hashes of this rank's files."""
        trees = {each.location: each.tree for each in written if each.tree is not None}
        for location, chunks in small.items():
            trees[location] = await in_thread(tree_of, *chunks)
        if own_part:
            trees[own_part_path(self.claim.save_id, self._exchange.rank)] = await in_thread(tree_of, own_part)
        return trees
