"""A take on one rank: plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from snapshot.aio import in_thread, shielded
from snapshot.distributed.agreed_plans import keep_plan
from snapshot.distributed.exchange import Undecided
from snapshot.errors import RankError, SnapshotError, StorageError
from snapshot.events import emit
from snapshot.per_process import PerProcess
from snapshot.plan.layout import LEFT_OUT, SavePlan, name_data_file
from snapshot.plan.plan_cache import PlanCache
from snapshot.reports import TakeReport
from snapshot.runtime.loop import cancel_all, in_own_thread
from snapshot.runtime.session import Session
from snapshot.save.commit import RankDone, commit_with_ranks, leader_part_path, own_part_path
from snapshot.save.manifest_builder import (
    RankManifest,
    build_entries,
    encode_for_leader,
    encode_own_part,
    shard_checksums,
)
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import TakeOpening
from snapshot.save.staging import Stager
from snapshot.save.transaction import State, Transaction
from snapshot.save.unchanged import Unchanged, remember_unchanged
from snapshot.save.writer import Writer, WrittenFile, write_small
from snapshot.tensors.digest import SIZE, count_blocks, digest_range

T = TypeVar("T")
LOOK = 0.5
"""Seconds between checks for failed ranks while this rank writes."""
Verify = Callable[[Session, RankManifest], Coroutine[Any, Any, None]]
"""Reads the written bytes back, and raises if they differ."""

_plans = PerProcess(PlanCache)


def plan_writes(
    share: RankShare, session: Session, *, staged: bool, groups: bytes = b"", expected: SavePlan | None = None
) -> SavePlan:
    """Return the plan of the data files. `staged`: all leaves are copied first, except those in the group LATE.

    Raise `ValueError` if an `expected` plan is for something else.
    """
    blobs = sum(len(blob.data) + SIZE * count_blocks(len(blob.data)) for blob in share.blobs)
    limits = session.storage.limits
    payload = share.nbytes
    if LEFT_OUT in groups:
        payload -= sum(leaf.nbytes for leaf, group in zip(share.leaves, groups, strict=True) if group == LEFT_OUT)
    at_once = payload if staged else limits.preferred_part * limits.parallel_parts if limits.alignment > 1 else 0
    at_once = min(at_once, session.budget.limit, payload)
    loads = tuple(share.loads) if len(share.loads) > 1 else ()
    # If files accept parts only in order, the number of files is not limited by the number of cores.
    sequential = limits.in_order and limits.parts_per_file == 1
    lanes = (sequential and (session.settings.lanes or limits.parallel_files)) or session.settings.lane_count()
    plan = _plans.get().plan(share.leaves, blobs, limits, lanes, staged_bytes=at_once, loads=loads, groups=groups)
    if expected is not None and expected.structure != plan.structure:
        raise ValueError("the plan must be for the same names, shapes, dtypes and storage")
    return plan


class Take:
    """The writing of one take: this rank's files, and the commit.

    From its first step on, `write` ends everything that the opening started: session, exchange and meter.
    """

    def __init__(
        self,
        opening: TakeOpening,
        share: RankShare,
        plan: SavePlan,
        unchanged: Unchanged,
        *,
        stager: Stager,
        metadata: msgspec.Raw,
        verify: Verify | None = None,
        part_bytes: int = 0,
    ) -> None:
        self.opening = opening
        self.session = opening.session
        self.plan = plan
        self._exchange = opening.exchange
        self._meter = opening.meter
        self._share = share
        self._stager = stager
        self._metadata = metadata
        self.unchanged = unchanged
        self._verify = verify
        self._began = time.perf_counter()
        part_bytes = self.session.settings.part_bytes or part_bytes
        self.writer = Writer(
            self.session.storage, stager, self.session.budget, self._meter.wrote, wanted_part=part_bytes
        )
        self._meter.begin(plan.total_bytes)
        self.emit("start", bytes=plan.total_bytes)

    @property
    def report(self) -> TakeReport:
        """A report of the bytes that this rank writes and shares."""
        made = self.unchanged
        base = "" if made.reference is None else made.reference.save_id
        omitted = sum(stored.nbytes for _, stored in made.omitted)
        tables = sum(len(table) for each in made.files for table in each.tables.values())
        return TakeReport(
            self.plan.total_bytes + tables, made.nbytes, len(made.files), omitted, base, tuple(made.notes)
        )

    def emit(self, name: str, **fields: Any) -> None:
        """Emit an event of this take."""
        emit(name, self._meter.verb, str(self.session.url), **fields)

    async def write(self) -> None:
        """Claim, write, commit and clean up. If a step fails, delete everything.

        From the commit on, nothing can be interrupted: a committed snapshot must not be deleted.
        """
        transaction = self.opening.transaction()
        try:
            async with transaction:
                try:
                    await transaction.claim()
                    manifest, done = await self._while_all_go_on(self._write_files(transaction))
                    if self._verify is not None:
                        await self._while_all_go_on(self._verify(self.session, manifest))
                    await self.before_commit()
                    await self.unchanged.expect_base()
                    await commit_with_ranks(self.session, self._exchange, transaction, manifest, done)
                    keep_plan(self._exchange.ranks, self._share.replication.own, self._share.replication.known_plan())
                except BaseException as error:  # before the other ranks get the error, and files are deleted
                    self.stop_staging(error)
                    raise
        except BaseException as error:
            if transaction.state not in (State.SENT, State.REFUSED, State.COMMITTED):  # the error already has a note
                self.emit("failed", error=error)
            await self._raise_fault_of_another_rank(error)
            raise
        finally:
            await self.end_staging()
            self.forget_tensors()
            await shielded(in_own_thread(self._exchange.close))
            await shielded(self.session.close())
            self._meter.close()
        seconds = time.perf_counter() - self._began
        self.emit(
            "committed", bytes=self.plan.total_bytes, shared_bytes=self.unchanged.nbytes, seconds=round(seconds, 3)
        )

    async def before_commit(self) -> None:
        """Check the application's tensors before the commit."""

    def stop_staging(self, error: BaseException) -> None:
        """Stop staging parts ahead of writing."""

    async def end_staging(self) -> None:
        """Wait until staging has ended, and release its memory."""

    def forget_tensors(self) -> None:
        """Release the application's tensors: an error or the pending snapshot must not keep them alive."""
        self._stager.forget()
        del self._share, self.writer

    async def write_parts(self, transaction: Transaction, locations: Sequence[str]) -> list[WrittenFile]:
        """Write the data files."""
        return await self.writer.write(self.plan.files, locations)

    async def _write_files(self, transaction: Transaction) -> tuple[RankManifest, RankDone]:
        """Write the data files, and the files that describe them to the leader."""
        rank, save_id, files = self._exchange.rank, transaction.save_id, self.plan.files
        storage, count = self.session.storage, self._meter.wrote
        kept, first = self.unchanged, self.unchanged.used
        locations = [name_data_file(save_id, rank, first + n, "safetensors") for n in range(len(files))]
        binary = name_data_file(save_id, rank, first + len(files), "bin")
        shared = [each.location for each in kept.files]
        own = [binary, own_part_path(save_id, rank), leader_part_path(save_id, rank)]
        transaction.will_write([*shared, *locations, *own])
        written = [*kept.files, *await self.write_parts(transaction, locations)]
        describe = partial(build_entries, structure=self.plan.structure, metadata=self._metadata)
        manifest = await in_thread(describe, self._share, written, kept, binary)
        await in_thread(remember_unchanged, save_id, self._share, kept, written)
        if manifest.chunks:
            await write_small(storage, binary, manifest.chunks, count)
        own_part = await in_thread(encode_own_part, manifest)
        if own_part:
            await write_small(storage, own_part_path(save_id, rank), [own_part])
        leader_part = await in_thread(encode_for_leader, manifest) if rank else b""
        if leader_part and not storage.host:
            await write_small(storage, leader_part_path(save_id, rank), [leader_part])
        if rank:
            await storage.settle()  # the leader's commit does it for the leader's files
        done = RankDone(
            (len(leader_part), digest_range(leader_part)),
            (len(own_part), digest_range(own_part), len(manifest.own)),
            shard_checksums(manifest) if manifest.cut else (b"", b""),
            storage.host,
            leader_part if storage.host else b"",
        )
        return manifest, done

    async def _raise_fault_of_another_rank(self, error: BaseException) -> None:
        """Raise the error of the rank that failed first: a storage error here may come from its clean-up."""
        if isinstance(error, StorageError):
            first = await shielded(in_own_thread(self._first_fault))
            if isinstance(first, RankError) and first.rank != self._exchange.rank:
                raise first from error

    def _first_fault(self) -> SnapshotError | None:
        with contextlib.suppress(SnapshotError, Undecided):
            return self._exchange.given_up()
        return None

    async def _while_all_go_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and stop it if another rank fails meanwhile."""
        if self._exchange.alone:
            return await work
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                error = await in_own_thread(self._exchange.given_up)
                if error is not None:
                    raise error
        except BaseException:
            await shielded(cancel_all([task]))
            raise
        return task.result()
