"""One take, step by step: agree, collect, plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from snapshot.aio import in_thread, shielded
from snapshot.distributed.exchange import Exchange, Undecided
from snapshot.errors import CommitUnknown, RankError, SnapshotError, StorageError, system_limits
from snapshot.events import Meter, emit
from snapshot.manifest.document import DEEPEST, nesting
from snapshot.plan.globs import matcher
from snapshot.plan.layout import SavePlan, location
from snapshot.plan.plan_cache import PlanCache
from snapshot.runtime.loop import LoopFuture, cancelled, in_own_thread, refuse_on_loop, run, work_on
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.save.manifest_builder import (
    RankManifest,
    build_entries,
    encode_for_leader,
    encode_own_part,
    shard_checksums,
)
from snapshot.save.optimizer_barrier import PendingCopy
from snapshot.save.prefetch import PartPrefetcher
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import Opening, expectation, open_take
from snapshot.save.replication import keep
from snapshot.save.staging import Stager
from snapshot.save.transaction import Ending, RankDone, leader_part_path, own_part_path
from snapshot.save.verify_writes import expect_written, share_of
from snapshot.save.writer import Writer, write_small
from snapshot.state.overlap_eligible import OverlapEligible
from snapshot.state.stateful import check_app_state
from snapshot.storage import Expect
from snapshot.tensors.digest import SIZE, block_count, of_range
from snapshot.url import URL
from snapshot.worker.client import WriterProcess

T = TypeVar("T")
PART_AHEAD = 32 << 20
"""How long parts are that are staged long before they are written to files: no cache holds them then, and the fewer
there are, the fewer turns of the interpreter does training lose to them."""
CHANGED = (
    "parameters or optimizer state were changed, not by an optimizer's step(), while the snapshot copied them, so "
    'nothing is committed; call wait_staged() before what changes them, or take with staging="blocking"'
)
LOOK = 0.5
"""Seconds between two looks at whether another rank has failed, while this one writes."""


_planner = PlanCache()


def plan_writes(portion: RankShare, session: Session, *, staged: bool, late: bytes = b"") -> SavePlan:
    """What is written where."""
    blobs = sum(len(blob.data) + SIZE * block_count(len(blob.data)) for blob in portion.blobs)
    limits = session.storage.limits
    payload = portion.nbytes
    at_once = payload if staged else limits.preferred_part * limits.parallel_parts if limits.alignment > 1 else 0
    at_once = min(at_once, session.budget.limit, payload)
    loads = tuple(portion.loads) if len(portion.loads) > 1 else ()
    # Where a file takes one part after the other, what cores there are is not what bounds how many are written.
    sequential = limits.in_order and limits.parts_per_file == 1
    lanes = (sequential and (session.settings.lanes or limits.parallel_files)) or session.settings.lane_count()
    return _planner.plan(portion.leaves, blobs, limits, lanes, at_once, loads, late)


class Take:
    """A take under way, on this rank."""

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        opening: Opening,
        metadata: msgspec.Raw,
        meter: Meter,
        read_back: float = 0.0,
    ) -> None:
        self._exchange = exchange
        self.session = session
        self._storage = session.storage
        self._verb = meter.verb
        self._meter = meter
        self._save_id = opening.save_id
        self.ending = Ending(exchange, session, opening.save_id, metadata)
        self.ending.expect = opening.expect
        self._claimed = opening.claimed
        self._began = time.perf_counter()
        self._staging: PartPrefetcher | None = None
        self._stager: threading.Thread | None = None
        """Stages what may be staged after the call."""
        self._process: WriterProcess | None = None
        """What writes the data files, where that is not this process."""
        self._work: LoopFuture[None] | None = None
        self._checked: LoopFuture[Expect] | None = None
        """A look at what is at the path, beside all else."""
        self.held: PendingCopy | None = None
        """What is still to be copied when the call returns."""
        self._writing = False
        self._read_back = read_back
        """The share of what was written that is read again before the commit."""

    def __enter__(self) -> Take:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What fails before writing began leaves only the storage to be closed."""
        if error is None:
            return
        if self._checked is not None:  # what it opens after the storage is closed would stay open
            self._checked.cancel()
            self._checked.settled(60)
        try:
            if self._work is not None:
                self._stop(error)
            elif self._staging is not None:
                self._staging.stop(error)
                self._staging.release()
        finally:
            if self.held is not None:
                self.held.end()
            if not self._writing:
                self._meter.close()
                self._exchange.fail(error)
                cleanup.leave(self._save_id)
                if self._claimed:
                    run(cleanup.withdraw(self._storage, self._save_id))
                run(self.session.close())
                emit("failed", self._verb, str(self.session.url), error=error)

    def prepare(
        self, portion: RankShare, plan: SavePlan | None, *, stage: bool, owned: OverlapEligible | None = None
    ) -> None:
        """Plan, or check the plan that was given. `stage`: everything will be copied, by the caller's thread, but for
        what is `owned`: that may be copied later."""
        late = b""
        owners: list[torch.Tensor] = []
        if owned:
            flat = portion.flat
            leaves = portion.leaves if self._exchange.alone else flat.leaves
            late, owners = owned.late(portion.leaves, leaves, flat.shards, flat.ties)
            try:
                self.held = PendingCopy(owned.optimizers, owners) if owners else None
            except RuntimeError:  # tensors of inference mode do not count how often they were changed
                late, owners = b"", []
            if self.held is not None:
                self.held.begin()
        made = plan_writes(portion, self.session, staged=stage, late=late)
        if plan is not None and plan.structure != made.structure:
            raise ValueError("the plan was made for other names, shapes or dtypes, or for another storage")
        self._portion = portion
        self._plan = made
        copies = stage or self._storage.limits.alignment > 1
        source = Stager(portion.leaves, copies=copies, parallel=stage)
        if self.held is not None:
            source.watch(late, owners, self.held.versions)
        budget, part_bytes = self.session.budget, self.session.settings.part_bytes
        if stage and not part_bytes and self._storage.capabilities.blocking:
            part_bytes = PART_AHEAD
        self._writer = Writer(self._storage, source, budget, self._meter.wrote, part_bytes)
        self._meter.begin(made.total_bytes)
        emit("start", self._verb, str(self.session.url), bytes=made.total_bytes)

    def check_path(self, *, overwrite: bool) -> None:
        """Begin to look at what is at the path; the writing waits for the answer."""
        self._checked = work_on(expectation(self.session, overwrite=overwrite))
        self._checked.begin()

    def fetch_from(self, source: Stager) -> None:
        """Have the planned leaves' bytes from elsewhere than from their tensors."""
        self._writer.source = source

    def stage_and_start(self, process: WriterProcess | None = None) -> LoopFuture[None]:
        """Stage what must be staged now, and begin to write: afterwards, or as soon as the budget is used up."""
        self._process = process
        source = self._writer.source
        staging = PartPrefetcher(
            self._writer, self.session.budget, self._plan.files, self._meter.staged, shared=process is not None
        )
        self._staging = staging
        count = len(self._plan.files)
        now, later = range(count - self._plan.late), range(count - self._plan.late, count)

        def begin() -> None:
            if self._work is None:
                if self._checked is not None:
                    self.ending.expect = self._checked.result()
                self._work = work_on(self.write())
                self._work.begin()

        staging.begin = begin
        staging.stage(now)
        begin()
        assert self._work is not None
        if later:
            source.parallel = False
            staging.close()
            self._stager = threading.Thread(
                target=self._stage, args=(staging, later), name="snapshot-io-stage", daemon=True
            )
            with system_limits("a thread cannot be started"):
                self._stager.start()
        else:
            self._all_staged()
        return self._work

    def _stop(self, error: BaseException) -> None:
        """Give up what was begun; what the writing failed of is more than that it was stopped."""
        assert self._staging is not None
        assert self._work is not None
        self._staging.stop(error)
        self._work.cancel()
        over = self._work.settled(60)
        self._staging.release()
        if over and isinstance(error, asyncio.CancelledError) and not self._work.cancelled():
            cause = self._work.exception()
            if cause is not None:
                raise cause from None

    def _stage(self, staging: PartPrefetcher, files: range) -> None:
        """Stage what may be staged after the call. What fails in it fails the writing, which waits for it."""
        assert self.held is not None
        try:
            staging.stage(files)
        except BaseException as error:  # noqa: BLE001 - `wait()` raises it
            staging.stop(error)
            self.held.end()
            return
        self.held.copied()
        staging.open()
        self._all_staged()

    def _all_staged(self) -> None:
        self._meter.staged(self._plan.blob_bytes)  # which never was the application's
        emit("staged", self._verb, str(self.session.url), bytes=self._plan.total_bytes)

    async def write(self) -> None:
        """Claim, write, commit, clean; if anything fails, leave nothing.

        From the commit on nothing can be interrupted: a snapshot that is there must not be taken back.
        """
        self._writing = True
        cleanup.enter(self._save_id)
        try:
            if self._exchange.rank == 0 and not self._claimed:
                await cleanup.lay_claim(self._storage, self._save_id)
            described, done = await self._while_all_go_on(self._write_files())
            if self._read_back:
                await self._while_all_go_on(expect_written(self.session, described, self._read_back, self._verb))
            if self.held is not None:
                await in_thread(self.held.let_go)
                if self.held.changed:
                    raise SnapshotError(CHANGED)
            await self.ending.finish(described, done, self._plan.structure)
            keep(self._exchange, self._portion.shared)
        except CommitUnknown as error:
            emit("failed", self._verb, str(self.session.url), error=error)
            raise
        except BaseException as error:
            if self._staging is not None:
                self._staging.stop(error)
            gone = await shielded(in_own_thread(self._exchange.fail, error))
            note = await shielded(self.ending.abort(gone))
            if note:
                error.add_note(note)
            else:
                emit("failed", self._verb, str(self.session.url), error=error)
            if isinstance(error, StorageError):  # it may come of what another rank's failure cleaned away
                first = await shielded(in_own_thread(self._first_fault))
                if isinstance(first, RankError) and first.rank != self._exchange.rank:
                    raise first from error
            raise
        finally:
            await self._end_staging()
            self._forget()
            cleanup.leave(self._save_id)
            await shielded(in_own_thread(self._exchange.close))
            await shielded(self.session.close())
            self._meter.close()
        seconds = time.perf_counter() - self._began
        emit("committed", self._verb, str(self.session.url), bytes=self._plan.total_bytes, seconds=round(seconds, 3))

    async def _end_staging(self) -> None:
        """Give its memory back, when the part that is being copied is: it was the last."""
        if self._stager is not None and self._stager.is_alive():
            await shielded(in_own_thread(self._stager.join))
        if self._staging is not None:
            self._staging.release()

    def _forget(self) -> None:
        """Let go of the application's tensors: who keeps the error, or the pending snapshot, is not to keep them."""
        if self.held is not None:
            self.held.end()
        with contextlib.suppress(AttributeError):
            self._writer.source.forget()
            del self._portion, self._writer

    def _first_fault(self) -> SnapshotError | None:
        with contextlib.suppress(SnapshotError, Undecided):
            return self._exchange.given_up()
        return None

    async def _while_all_go_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work, and stop if another rank has failed meanwhile."""
        if self._exchange.alone:
            return await work
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                error = await in_own_thread(self._exchange.given_up)
                if error is not None:
                    raise error
        except BaseException:
            await shielded(cancelled([task]))
            raise
        return task.result()

    async def _write_files(self) -> tuple[RankManifest, RankDone]:
        """Write the data files, and what describes them, for the leader to read."""
        rank, save_id = self._exchange.rank, self._save_id
        files = self._plan.files
        locations = [location(save_id, rank, n, "safetensors") for n in range(len(files))]
        binary = location(save_id, rank, len(files), "bin")
        self.ending.names = [*locations, binary, own_part_path(save_id, rank), leader_part_path(save_id, rank)]
        if self._process is None or self._staging is None:
            written = await self._writer.write(files, locations, self._staging)
        else:
            self.ending.by_another = locations
            written = await self._process.write(
                self.session.url,
                self.session.options,
                durable=self.session.durable,
                budget=self.session.budget.total,
                files=files,
                locations=locations,
                parts=self._staging.parts,
                staging=self._staging,
                progress=self._meter.wrote,
            )
        described = await in_thread(build_entries, self._portion, written, binary)
        if described.chunks:
            await write_small(self._storage, binary, described.chunks, self._meter.wrote)
        part = await in_thread(encode_own_part, described)
        if part:
            await write_small(self._storage, own_part_path(save_id, rank), [part], lambda _: None)
        tells = await in_thread(encode_for_leader, described) if rank else b""
        if tells:
            await write_small(self._storage, leader_part_path(save_id, rank), [tells], lambda _: None)
        if rank:
            await self._storage.settle()  # the leader's commit does it for what the leader wrote
        sums = shard_checksums(described) if described.cut else (b"", b"")
        return described, RankDone((len(tells), of_range(tells)), (len(part), of_range(part), len(described.own)), sums)


def encode_metadata(metadata: Mapping[str, Any] | None) -> msgspec.Raw:
    """The user's metadata as it stands in the manifest; `TypeError` for what JSON cannot hold."""
    try:
        json.dumps(metadata, allow_nan=False)  # JSON has no NaN, and msgspec would make it null
        encoded = msgspec.json.encode(dict(metadata or {}))
        if nesting(encoded) > DEEPEST:
            raise ValueError(f"it nests more than {DEEPEST} deep")
        return msgspec.Raw(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"metadata must be what JSON can hold: {error}") from error


def begin(
    exchange: Exchange,
    path: str | os.PathLike[str],
    app_state: Mapping[str, Any],
    meter: Meter,
    replicated: Sequence[str] | None,
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    opener: Callable[[URL], Session],
    verify_writes: bool | float = False,
) -> tuple[Take, Opening]:
    """Check what can be checked before anything is done, and agree with the other ranks on what is begun."""
    refuse_on_loop()
    check_app_state(app_state)
    note = encode_metadata(metadata)
    matcher(replicated or ())
    read_back = share_of(verify_writes)
    session, opening = open_take(
        exchange, URL.parse(os.fspath(path)), meter.verb, replicated or (), opener, overwrite=overwrite, claim=True
    )
    return Take(exchange, session, opening, note, meter, read_back), opening
