"""A take in the background: staged by the call, written while the application continues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import torch

from snapshot.aio import in_thread, shielded
from snapshot.errors import SnapshotError, system_limits
from snapshot.plan.layout import SavePlan
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.loop import LoopFuture, in_own_thread, work_on
from snapshot.runtime.pinning import permit_capture
from snapshot.save.optimizer_barrier import PendingCopy
from snapshot.save.prefetch import PartPrefetcher
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import TakeOpening
from snapshot.save.staging import Stager
from snapshot.save.take import Take, Verify
from snapshot.save.transaction import Transaction
from snapshot.save.unchanged import Unchanged
from snapshot.save.writer import PartSink, WrittenFile
from snapshot.signing.keys import Signer
from snapshot.state.overlap_eligible import OverlapEligible

PART_AHEAD = 32 << 20
"""Bytes of a part that is staged long before it is written.

The part has left the CPU caches by then, and fewer parts take the interpreter lock from training less often.
"""
CHANGED = (
    "parameters or optimizer state changed outside an optimizer's step() while they were copied, so nothing was "
    'committed; call wait_staged() before such changes, or use staging="blocking"'
)


class LateCopies:
    """The leaves that are copied after the call returns; an optimizer's `step()` waits for them.

    As a context, an error that leaves it lets the `step()` continue.
    """

    def __init__(self, opening: TakeOpening, share: RankShare, app_state: Mapping[str, Any] | None) -> None:
        self.marks = b""
        """One byte per leaf: 1 if it is copied after the call."""
        self.owners: list[torch.Tensor] = []
        """Tensors whose version counters show that a leaf was changed."""
        self.pending: PendingCopy | None = None
        eligible = OverlapEligible(app_state) if app_state is not None else None
        if not eligible:
            return
        flat = share.flat
        leaves = share.leaves if opening.exchange.alone else flat.leaves
        marks, owners = eligible.find_late(share.leaves, leaves, flat.shards, flat.ties)
        if not owners:
            self.marks = marks
            return
        try:
            self.pending = PendingCopy(eligible.optimizers, owners)
        except RuntimeError:  # tensors of inference mode have no version counter
            return
        self.marks, self.owners = marks, owners
        self.pending.begin()

    def __enter__(self) -> LateCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.pending is not None:
            self.pending.end()


class BackgroundTake(Take):
    """A take whose parts are staged ahead of writing, by the caller and by a thread.

    As a context, an error of the call ends the take, even if writing has begun.
    """

    def __init__(
        self,
        opening: TakeOpening,
        share: RankShare,
        plan: SavePlan,
        unchanged: Unchanged,
        late: LateCopies,
        *,
        metadata: msgspec.Raw,
        verify: Verify | None,
        sink: PartSink | None,
        packing: MemoryBudget | None,
        signer: Signer | None,
    ) -> None:
        stager = Stager(share.leaves, copies=True, parallel=True)
        if late.pending is not None:
            stager.watch(late.marks, late.owners, late.pending.versions)
        part_bytes = PART_AHEAD if opening.session.storage.capabilities.blocking else 0
        super().__init__(
            opening,
            share,
            plan,
            unchanged,
            stager=stager,
            metadata=metadata,
            verify=verify,
            part_bytes=part_bytes,
            packing=packing,
            signer=signer,
        )
        self._late = late.pending
        self._sink = sink
        """A writer process that writes the data files in place of this process."""
        self._prefetcher = PartPrefetcher(
            self.writer, self.session.budget, plan.files, self._meter.staged, self._begin, shared=sink is not None
        )
        self._thread: threading.Thread | None = None
        self._work: LoopFuture[None] | None = None

    def stage_and_start(self) -> LoopFuture[None]:
        """Stage what must be staged in the call, and start writing: afterwards, or as soon as the budget is used up."""
        count = len(self.plan.files)
        now, later = range(count - self.plan.late), range(count - self.plan.late, count)
        if self._sink is None:
            self._stager.digest_ahead(self.plan.files[: now.stop], self.session.budget)
        self._prefetcher.stage(now)
        self._stager.end_digests()
        work = self._begin()
        if later:
            self._stager.copy_alone()
            self._prefetcher.close()
            self._thread = threading.Thread(
                target=self._stage_late, args=(later,), name="snapshot-io-stage", daemon=True
            )
            with system_limits("cannot start a thread"):
                self._thread.start()
        else:
            if self._late is not None:  # all that would be copied late is shared
                self._late.copied()
            self._all_staged()
        return work

    def __enter__(self) -> BackgroundTake:
        return self

    def _begin(self) -> LoopFuture[None]:
        if self._work is None:
            self.opening.transaction()  # an existing snapshot is an error of the call
            self._work = work_on(self.write())
            self._work.begin()
        return self._work

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything that was started. If writing failed, raise that error: it is the cause."""
        if error is None:
            return
        self._stager.end_digests()
        self._prefetcher.stop(error)
        if self._work is None:
            self._prefetcher.release()
            return
        self._work.cancel()
        over = self._work.settled(60)
        self._prefetcher.release()
        if over and isinstance(error, asyncio.CancelledError) and not self._work.cancelled():
            cause = self._work.exception()
            if cause is not None:
                raise cause from None

    def _stage_late(self, files: range) -> None:
        """Stage what may be staged after the call. An error fails the writer, which waits for the parts."""
        assert self._late is not None
        if self._stager.pinning(self.session.budget, 0) is not None:
            permit_capture()
        try:
            self._prefetcher.stage(files)
        except BaseException as error:  # noqa: BLE001 - `wait()` raises it
            self._prefetcher.stop(error)
            self._late.end()
            return
        self._late.copied()
        self._all_staged()  # before the last parts can be written
        self._prefetcher.open()

    def _all_staged(self) -> None:
        self._meter.staged(self.plan.blob_bytes)  # encoded bytes, not the application's memory
        seconds = round(time.perf_counter() - self._began, 3)
        self.emit("staged", bytes=self.plan.total_bytes, seconds=seconds)

    async def write_parts(self, transaction: Transaction, locations: Sequence[str]) -> list[WrittenFile]:
        if self._sink is None:
            return await self.writer.write(self.plan.files, locations, self._prefetcher)
        transaction.expect_files(locations)
        return await self._sink.write(
            self.session,
            self.plan.files,
            locations,
            self._prefetcher.parts,
            staging=self._prefetcher,
            progress=self._meter.wrote,
            packing=self.writer.packing,
            signed=self.writer.signed,
        )

    async def before_commit(self) -> None:
        if self._late is not None:
            await in_thread(self._late.let_go)
            if self._late.changed:
                raise SnapshotError(CHANGED)

    def stop_staging(self, error: BaseException) -> None:
        self._prefetcher.stop(error)

    async def end_staging(self) -> None:
        if self._thread is not None and self._thread.is_alive():  # it copies no part after the current one
            await shielded(in_own_thread(self._thread.join))
        self._prefetcher.release()

    def forget_tensors(self) -> None:
        if self._late is not None:
            self._late.end()
        super().forget_tensors()
