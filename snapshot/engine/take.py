"""One take, step by step: agree, collect, plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import msgspec

from snapshot.distributed.call import Call, Undecided
from snapshot.engine import commit
from snapshot.engine.describe import Described, describe, filled, join, kept, told
from snapshot.engine.loop import cancelled, in_own_thread, refuse_on_loop, run, start
from snapshot.engine.opening import Opening, open_take
from snapshot.engine.operation import Operation
from snapshot.engine.portion import Portion
from snapshot.engine.sharing import keep
from snapshot.engine.staging import Source
from snapshot.engine.writer import Staging, Writer, write_small
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
from snapshot.events import Meter, emit, log
from snapshot.manifest.document import METADATA, Part, PartEntry, decode_part, encode
from snapshot.plan.agree import total
from snapshot.plan.globs import matcher
from snapshot.plan.layout import SavePlan, location, make_plan
from snapshot.state.stateful import check_app_state
from snapshot.storage import URL, Expect, in_thread, uninterrupted
from snapshot.tensors.digest import SIZE, block_count, of_range

T = TypeVar("T")
AT_ONCE = 64
"""How many ranks' words the leader reads side by side."""
LOOK = 0.5
"""Seconds between two looks at whether another rank has failed, while this one writes."""


def make(portion: Portion, operation: Operation, *, staged: bool) -> SavePlan:
    """What is written where."""
    blobs = sum(len(blob.data) + SIZE * block_count(len(blob.data)) for blob in portion.blobs)
    limits = operation.storage.limits
    payload = sum(leaf.nbytes for leaf in portion.leaves)
    at_once = payload if staged else limits.preferred_part * limits.parallel_parts if limits.alignment > 1 else 0
    at_once = min(at_once, operation.budget.limit, payload)
    loads = tuple(portion.loads) if len(portion.loads) > 1 else ()
    # Where a file takes one part after the other, what cores there are is not what bounds how many are written.
    sequential = limits.in_order and limits.parts_per_file == 1
    lanes = (sequential and (operation.settings.lanes or limits.parallel_files)) or operation.settings.lane_count()
    return make_plan(portion.leaves, blobs, limits, lanes, at_once, loads)


class Done(msgspec.Struct, array_like=True):
    """What a rank says when all of its own is on storage: which bytes describe it."""

    told: tuple[int, str]
    """Size and digest of what it tells the leader."""
    kept: tuple[int, str, int]
    """Size, digest and number of the entries that stay in a part of its own."""
    filled: tuple[bytes, bytes] = (b"", b"")
    """Where they do: its part in the sums over all shards."""


class Take:
    """A take under way, on this rank."""

    def __init__(self, call: Call, operation: Operation, opening: Opening, metadata: msgspec.Raw, meter: Meter) -> None:
        self._call = call
        self.operation = operation
        self._storage = operation.storage
        self._verb = meter.verb
        self._meter = meter
        self._save_id = opening.save_id
        self.expect: Expect = opening.expect
        """What the commit expects to stand at the path."""
        self._claimed = opening.claimed
        self._began = time.perf_counter()
        self._metadata = metadata
        self._staging: Staging | None = None
        self._writing = False
        self._decided = False
        """Whether the manifest may have been sent."""
        self._unknown = False
        """Whether nobody knows what became of it: then nothing may be deleted."""

    def __enter__(self) -> Take:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What fails before writing began leaves only the storage to be closed."""
        if error is not None and not self._writing:
            self._meter.close()
            self._call.fail(error)
            commit.leave(self._save_id)
            if self._claimed:
                run(commit.withdraw(self._storage, self._save_id))
            run(self.operation.close())

    def prepare(self, portion: Portion, plan: SavePlan | None, *, stage: bool) -> None:
        """Plan, or check the plan that was given. `stage`: everything will be copied, by the caller's thread."""
        made = make(portion, self.operation, staged=stage)
        if plan is not None and plan.structure != made.structure:
            raise ValueError("the plan was made for other names, shapes or dtypes, or for another storage")
        self._portion = portion
        self._plan = made
        copies = stage or self._storage.limits.alignment > 1
        source = Source(portion.leaves, copies=copies, parallel=stage)
        budget, part_bytes = self.operation.budget, self.operation.settings.part_bytes
        self._writer = Writer(self._storage, source, budget, self._meter.wrote, part_bytes)
        self._meter.begin(made.total_bytes)

    def stage_and_start(self, checked: Future[Expect] | None) -> Future[None]:
        """Stage everything, and begin to write: afterwards, or as soon as the budget is used up."""
        staging = Staging(self._writer, self.operation.budget, self._plan.files)
        self._staging = staging
        work: list[Future[None]] = []

        def begin() -> None:
            if not work:
                if checked is not None:
                    self.expect = checked.result()
                self._writing = True
                work.append(start(self.write()))

        staging.begin = begin
        try:
            staging.stage_all()
            begin()
        except BaseException as error:
            staging.stop(error)
            if work:
                work[0].cancel()
                wait(work, timeout=60)
            staging.release()
            cause = work[0].exception() if work and work[0].done() and not work[0].cancelled() else None
            if isinstance(error, asyncio.CancelledError) and cause is not None:
                raise cause from None  # what the writing failed of is more than that it was stopped
            raise
        self._meter.staged(self._plan.total_bytes)
        emit("staged", self._verb, str(self.operation.url), bytes=self._plan.total_bytes)
        return work[0]

    async def write(self) -> None:
        """Claim, write, commit, clean; if anything fails, leave nothing.

        From the commit on nothing can be interrupted: a snapshot that is there must not be taken back.
        """
        self._writing = True
        emit("start", self._verb, str(self.operation.url), bytes=self._plan.total_bytes)
        commit.enter(self._save_id)
        try:
            if self._call.rank == 0 and not self._claimed:
                await commit.lay_claim(self._storage, self._save_id)
            described, done = await self._while_all_go_on(self._write_files())
            await self._finish(described, done)
            keep(self._call, self._portion.shared)
        except CommitUnknown as error:
            emit("failed", self._verb, str(self.operation.url), error=error)
            raise
        except BaseException as error:
            if self._staging is not None:
                self._staging.stop(error)
            gone = await uninterrupted(in_own_thread(self._call.fail, error))
            if await uninterrupted(self._abort(gone)):
                emit("failed", self._verb, str(self.operation.url), error=error)
            else:
                error.add_note("the snapshot was committed all the same, but may not survive a loss of power")
            if isinstance(error, StorageError):  # it may come of what another rank's failure cleaned away
                first = await uninterrupted(in_own_thread(self._first_fault))
                if isinstance(first, RankError) and first.rank != self._call.rank:
                    raise first from error
            raise
        finally:
            commit.leave(self._save_id)
            await uninterrupted(in_own_thread(self._call.close))
            await uninterrupted(self.operation.close())
            self._meter.close()
        seconds = time.perf_counter() - self._began
        emit("committed", self._verb, str(self.operation.url), bytes=self._plan.total_bytes, seconds=round(seconds, 3))

    def _first_fault(self) -> SnapshotError | None:
        with contextlib.suppress(SnapshotError, Undecided):
            return self._call.given_up()
        return None

    async def _while_all_go_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work, and stop if another rank has failed meanwhile."""
        if self._call.alone:
            return await work
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                error = await in_own_thread(self._call.given_up)
                if error is not None:
                    raise error
        except BaseException:
            await uninterrupted(cancelled([task]))
            raise
        return task.result()

    async def _write_files(self) -> tuple[Described, Done]:
        """Write the data files, and what describes them, for the leader to read."""
        rank, save_id = self._call.rank, self._save_id
        files = self._plan.files
        locations = [location(save_id, rank, n, "safetensors") for n in range(len(files))]
        binary = location(save_id, rank, len(files), "bin")
        written = await self._writer.write(files, locations, self._staging)
        described = await in_thread(describe, self._portion, written, binary)
        if described.chunks:
            await write_small(self._storage, binary, described.chunks, self._meter.wrote)
        part = await in_thread(kept, described)
        if part:
            await write_small(self._storage, self._kept(rank), [part], lambda _: None)
        tells = await in_thread(told, described) if rank else b""
        if tells:
            await write_small(self._storage, self._told(rank), [tells], lambda _: None)
        sums = filled(described) if described.cut else (b"", b"")
        return described, Done((len(tells), of_range(tells)), (len(part), of_range(part), len(described.own)), sums)

    def _told(self, rank: int) -> str:
        """What a rank tells the leader: gone when the manifest is there."""
        return f"data/{self._save_id}-{rank}-0.json"

    def _kept(self, rank: int) -> str:
        """A rank's part of a large manifest."""
        return f"data/{self._save_id}-{rank}.json"

    # Commit

    async def _finish(self, described: Described, done: Done) -> None:
        """All ranks have written: the leader commits, and all wait for that."""
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
                f"{self.operation.url}: {lost}, after its decision to commit; the snapshot may still appear: look "
                "again later (Snapshot(path).exists())"
            ) from lost
        log.warning("%s: %s, but the snapshot is committed", self.operation.url, lost)

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
        parts = [PartEntry(self._kept(rank), *each.kept[:2], [rank], each.kept[2]) for rank, each in enumerate(done)]
        at_once = asyncio.Semaphore(AT_ONCE)
        limit = self.operation.settings.manifest_bytes

        async def tells(rank: int) -> Part:
            where = self._told(rank)

            async def read() -> Part:
                data = await self._storage.get(where, limit=limit)
                return decode_part(data, PartEntry(where, *done[rank].told, [rank], -1), where)

            try:
                async with at_once:
                    return await self.operation.twice(where, read)
            except StorageNotFoundError as error:
                raise SnapshotError(
                    f"{error}: rank {rank} wrote it, and rank 0 does not see it; all ranks must share one storage"
                ) from error

        others = await asyncio.gather(*map(tells, range(1, len(done))))
        document = await in_thread(join, described, self._save_id, self._metadata, self._plan.structure, parts, others)
        data = await in_thread(encode, document)
        await commit.claimed(self._storage, self._save_id)
        await in_own_thread(self._call.commit)
        sent = False
        try:
            expect = await commit.condition(self._storage, self.expect)
            sent = self._decided = True
            await self._storage.commit(commit.claim_path(self._save_id), METADATA, data, expect=expect)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self.operation.url}: another take was faster, or cleaned this one away; nothing of this one is "
                f"left ({error})"
            ) from error
        except StorageError as error:
            if not (sent and error.uncertain):
                raise
            if not await self._stands():
                self._unknown = True
                raise CommitUnknown(
                    f"{self.operation.url}: the manifest was sent, and no answer came: the snapshot may be there, or "
                    "still appear: look again later (Snapshot(path).exists()). Its files were left, and a claim, by "
                    f"which they are cleaned away if it does not ({error})"
                ) from error
        with contextlib.suppress(TimeoutError):  # what is not cleaned away now is by the next take
            async with self._not_for_long():
                if others:
                    with contextlib.suppress(SnapshotError):
                        await self._storage.delete([self._told(rank) for rank in range(1, len(done))])
                await commit.clean(self._storage, self._save_id)
        return True

    def _not_for_long(self) -> asyncio.Timeout:
        """Bounds the time for cleaning up over a network: whoever waits wants to know what became of the take."""
        return commit.not_for_long(self._storage)

    async def _abort(self, gone: bool) -> bool:
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


def as_json(metadata: Mapping[str, Any] | None) -> msgspec.Raw:
    """The user's metadata as it stands in the manifest; `TypeError` for what JSON cannot hold."""
    try:
        json.dumps(metadata, allow_nan=False)  # JSON has no NaN, and msgspec would make it null
        return msgspec.Raw(msgspec.json.encode(dict(metadata or {})))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"metadata must be what JSON can hold: {error}") from error


def begin(
    call: Call,
    path: str | os.PathLike[str],
    app_state: Mapping[str, Any],
    meter: Meter,
    replicated: Sequence[str] | None,
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    opener: Callable[[URL], Operation],
) -> tuple[Take, Opening]:
    """Check what can be checked before anything is done, and agree with the other ranks on what is begun."""
    refuse_on_loop()
    check_app_state(app_state)
    note = as_json(metadata)
    matcher(replicated or ())
    operation, opening = open_take(
        call, URL.parse(os.fspath(path)), meter.verb, replicated or (), opener, overwrite=overwrite, claim=True
    )
    return Take(call, operation, opening, note, meter), opening
