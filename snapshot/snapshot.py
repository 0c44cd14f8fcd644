"""Snapshot: save and restore the state of a running application."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from snapshot.checkpoint import Checkpoint
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.events import emit
from snapshot.load.restore import Restore
from snapshot.load.restore_options import Cast, Mismatched, RestoreOptions
from snapshot.load.same_snapshot import open_restore
from snapshot.options import Settings
from snapshot.pending import PendingTake
from snapshot.plan.layout import SavePlan
from snapshot.plan.renaming import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import RestoreReport
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import refuse_on_loop, run
from snapshot.runtime.session import Session
from snapshot.save.background_take import BackgroundTake, LateCopies
from snapshot.save.begin import begin_take, session_for_take
from snapshot.save.concurrency import take_slots
from snapshot.save.optimizer_barrier import wait_for_copies
from snapshot.save.rank_share import collect_rank_share
from snapshot.save.rendezvous import open_dry_run
from snapshot.save.staging import Stager
from snapshot.save.take import Take, plan_writes
from snapshot.save.take_options import Staging, TakeOptions, WhenBusy, Worker
from snapshot.state.prepared import Prepare
from snapshot.state.stateful import Stateful, check_app_state
from snapshot.url import URL
from snapshot.verbs.verify_writes import verify_written
from snapshot.worker.client import expect_reachable, writer_process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AppState = Mapping[str, Stateful]


class PendingSnapshot(PendingTake["Snapshot"]):
    """The result of `Snapshot.async_take`, with the state at the time of that call.

    At interpreter exit, a pending take is finished even without `wait()`, and its failure is logged.
    """


class Snapshot(Checkpoint):
    """A reference to a snapshot, which need not exist yet.

    Args:
        path: A URL (`memory://name`), or a path of the file system.
        pg: The process group of the ranks that restore.
        storage_options: Options for the storage plugin; see its documentation.
        allow_pickle: Unpickle objects that torch's `weights_only` refuses. A pickle can run any code, so use this
            only for trusted snapshots.

    >>> from snapshot import Snapshot, StateDict
    >>> progress = StateDict(step=3)
    >>> snapshot = Snapshot.take("memory://docs/first", {"progress": progress})
    >>> progress["step"] = 0
    >>> report = Snapshot("memory://docs/first").restore({"progress": progress})
    >>> progress["step"]
    3
    """

    # Save

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        overwrite: bool = False,
        durable: bool = True,
        exclude: Sequence[str] = (),
        memory_budget_bytes: int | None = None,
        check_replicated: bool = False,
        verify_writes: bool | float = False,
        metadata: Mapping[str, Any] | None = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        plan: SavePlan | None = None,
    ) -> Snapshot:
        """Save the application's state and return when it is committed.

        CPU tensors are written from their own memory. The commit is atomic: all of the state, or nothing.

        Args:
            path: The destination. It must not hold a snapshot, unless `overwrite` is set.
            app_state: Stateful objects by name: modules, optimizers, schedulers, dataloaders, `StateDict`, `RNGState`.
            pg: The process group of the ranks that save.
            replicated: Globs over `<key>/<logical path>` of values that are equal on every rank.
            storage_options: Options for the storage plugin.
            _custom_tensor_prepare_func: `f(path, tensor, tracing) -> tensor`: the returned tensor is saved. Its dtype
                may differ, its shape must not. For a sharded tensor it gets this rank's shard. A rank without a shard
                passes an empty tensor and `tracing=True`, since all ranks must store one dtype.
            overwrite: Replace an existing snapshot. The old one stays whole until the new one is committed.
            durable: Return only when the snapshot survives a loss of power.
            exclude: Globs to leave out.
            memory_budget_bytes: Host memory for staging; by default 64 MiB on files, 256 MiB elsewhere.
            check_replicated: Also compare replicated values across ranks.
            verify_writes: Read the written bytes back and compare them with their digests before the commit. True for
                all bytes, or a fraction from 0 to 1, chosen at random. On files the page cache is dropped first, so
                that the disk is read.
            metadata: Any JSON value; it is returned as `snapshot.metadata.metadata`.
            progress: True for a progress bar, or a function that is called with `Progress`.
            timeout: Seconds without a heartbeat after which another rank counts as dead.
            plan: A plan that `Snapshot.plan` returned for the same structure.

        Raises:
            SnapshotExistsError: A snapshot exists at `path`; nothing was written.
            StorageError: A storage operation failed; partial files were deleted.
            CorruptSnapshotError: Bytes that were read back differ from the written ones; nothing was committed.
            TypeError: A value of `app_state` is not stateful; nothing was written.
        """
        with Exchange(ranks_of(pg), "take", _timeout(timeout)) as exchange, gc_paused():
            refuse_on_loop()
            options = TakeOptions(
                replicated=replicated,
                storage_options=storage_options,
                prepare=_custom_tensor_prepare_func,
                overwrite=overwrite,
                durable=durable,
                exclude=exclude,
                memory_budget_bytes=memory_budget_bytes,
                check_replicated=check_replicated,
                verify_writes=verify_writes,
                metadata=metadata,
                plan=plan,
            )
            check_app_state(app_state)
            meter = Meter("take", _shown(progress, pg))
            with begin_take(exchange, path, options, meter) as opening:
                opening.look_at_path()
                opening.transaction()  # raises for an existing snapshot before any state is collected
                share = collect_rank_share(exchange, app_state, options, opening.globs)
                made = plan_writes(share, opening.session, staged=False, expected=options.plan)
                stager = Stager(share.leaves, copies=opening.session.storage.limits.alignment > 1)
                with stager.digesting(made.files, opening.session.budget):
                    verify = verify_written(options.verify_share, "take")
                    take = Take(opening, share, made, stager=stager, metadata=options.metadata_json, verify=verify)
                    run(take.write())
        return cls(opening.path_as_given(path), pg, storage_options)

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        overwrite: bool = False,
        durable: bool = True,
        exclude: Sequence[str] = (),
        memory_budget_bytes: int | None = None,
        check_replicated: bool = False,
        verify_writes: bool | float = False,
        metadata: Mapping[str, Any] | None = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        plan: SavePlan | None = None,
        staging: Staging = "blocking",
        worker: Worker = "thread",
        when_busy: WhenBusy = "wait",
    ) -> PendingSnapshot:
        """Save the application's current state in the background.

        Accepts all arguments of `take`. When the call returns, the state has been copied to staging memory, so later
        changes to the tensors do not reach the snapshot. Staging memory is kept for the next call. If the state
        exceeds `memory_budget_bytes`, the call also waits until enough has been written for the rest to fit. The
        default budget is half of the host's free memory, shared by the processes of a job. All pending takes share
        the budget of the newest call.

        Args:
            staging: `"blocking"`: the copy is complete when the call returns. `"overlapped"`: parameters and
                optimizer state are copied during the next forward and backward pass. The next `optimizer.step()`,
                `load_state_dict()` or `restore` waits for the copy. Call `wait_staged()` before changing parameters
                in any other way.
            worker: `"thread"`: threads of this process write. `"process"`: a separate process writes, with low CPU
                and disk priority, without taking this interpreter's lock.
            when_busy: If `SNAPSHOT_PENDING` takes (3 by default) are pending: `"wait"` for one of them, or `"raise"`.

        Raises:
            SnapshotBusyError: The limit of pending takes is reached, and `when_busy="raise"`.

        >>> from snapshot import StateDict
        >>> pending = Snapshot.async_take("memory://docs/async", {"progress": StateDict(step=3)})
        >>> pending.wait().metadata.world_size
        1
        """
        refuse_on_loop()
        with Exchange(ranks_of(pg), "async_take", _timeout(timeout)) as exchange:
            options = TakeOptions(
                replicated=replicated,
                storage_options=storage_options,
                prepare=_custom_tensor_prepare_func,
                overwrite=overwrite,
                durable=durable,
                exclude=exclude,
                memory_budget_bytes=memory_budget_bytes,
                check_replicated=check_replicated,
                verify_writes=verify_writes,
                metadata=metadata,
                plan=plan,
                staging=staging,
                worker=worker,
                when_busy=when_busy,
            )
            check_app_state(app_state)
            sink = None
            if options.worker == "process":
                expect_reachable(URL.parse(os.fspath(path)), storage_options)
                sink = writer_process()
            meter = Meter("async_take", _shown(progress, pg))
            with (
                take_slots().take(options.when_busy) as slot,
                gc_paused(),
                begin_take(exchange, path, options, meter, slot) as opening,
            ):
                opening.look_at_path()
                share = collect_rank_share(exchange, app_state, options, opening.globs)
                overlapped = options.staging == "overlapped" and options.prepare is None
                with LateCopies(opening, share, app_state if overlapped else None) as late:
                    made = plan_writes(share, opening.session, staged=True, late=late.marks, expected=options.plan)
                    verify = verify_written(options.verify_share, "async_take")
                    with BackgroundTake(
                        opening, share, made, late, metadata=options.metadata_json, verify=verify, sink=sink
                    ) as take:
                        snapshot = cls(opening.path_as_given(path), pg, storage_options)
                        work = take.stage_and_start()
                        slot.leave_after(work)
                        return PendingSnapshot(
                            snapshot.path, work, meter, snapshot, held=late.pending, save_id=opening.save_id
                        )

    @classmethod
    def plan(
        cls,
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        path: str | os.PathLike[str] = ".",
        storage_options: Mapping[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        durable: bool = True,
        exclude: Sequence[str] = (),
        memory_budget_bytes: int | None = None,
    ) -> SavePlan:
        """Plan a take without writing anything. The plan can be passed to `take`.

        >>> import torch
        >>> from snapshot import StateDict
        >>> print(Snapshot.plan({"state": StateDict(weight=torch.zeros(256))}, path="memory://x"))
        5.0 KiB in 1 file, 1 range, 0 B staged at most
          0.safetensors: 5.0 KiB, 1 range
        """
        with Exchange(ranks_of(pg), "plan", _timeout(None)) as exchange:
            check_app_state(app_state)
            options = TakeOptions(
                replicated=replicated,
                storage_options=storage_options,
                prepare=_custom_tensor_prepare_func,
                durable=durable,
                exclude=exclude,
                memory_budget_bytes=memory_budget_bytes,
            )
            session, globs = open_dry_run(
                exchange, URL.parse(os.fspath(path)), replicated or (), partial(session_for_take, options)
            )
            try:
                share = collect_rank_share(exchange, app_state, options, globs)
                made = plan_writes(share, session, staged=False)
            finally:
                run(session.close())
            exchange.close()
        return made

    # Load

    def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        exact: bool = False,
        mismatched: Mismatched = "error",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        cast: Cast = "error",
        verify: bool = True,
        atomic: bool = False,
        memory_budget_bytes: int | None = None,
        read_once: Literal["auto"] | bool = "auto",
        progress: ProgressArgument = None,
        timeout: float | None = None,
    ) -> RestoreReport:
        """Restore the application's state, in place into the tensors that `state_dict()` returns.

        Names, shapes, dtypes, and the files' presence and sizes are checked before the first byte reaches a live
        tensor.

        Args:
            app_state: The app state that was saved, or a part of it.
            strict: Raise if the snapshot lacks a name, if it has a module's name that the application lacks, or if
                the optimizer is of another kind. With False, restore what matches and list the rest in the report.
            exact: Remove the keys of a `StateDict` that the snapshot lacks; otherwise they keep their values.
            mismatched: The action for a tensor of another shape: `"error"`, or `"skip"` to leave it unchanged.
            include: Globs to restore; all by default.
            exclude: Globs to leave out.
            rename: Names in the snapshot -> names in the application: a function, or a dict of paths, of prefixes
                (`{"model/a": "model/enc"}`), or of globs (`{"model/h.*.w": "model/layers.*.w"}`).
            cast: Whether a dtype may differ: `"error"`, `"same_kind"` (as `torch.can_cast` has it) or `"any"`.
            verify: Verify the digest of every byte that is read.
            atomic: Verify every byte before any live tensor is written. This reads everything twice.
            memory_budget_bytes: Host memory for reads that cannot go to their destination directly. The default is 64
                MiB for files and 256 MiB for other storages.
            read_once: Whether one rank reads replicated data and sends it to the others.
            progress: True for a progress bar, or a function that is called with `Progress`.
            timeout: Seconds without a heartbeat after which another rank counts as dead.

        Raises:
            SnapshotNotFoundError: No snapshot exists at the path.
            RestoreError: The snapshot does not fit the application. `mismatches` lists every reason; no live tensor
                was written.
            CorruptSnapshotError: A digest or a file size is wrong. `touched` names the live tensors that were
                written.
        """
        return self.restore_with(
            app_state,
            RestoreOptions(
                strict=strict,
                exact=exact,
                mismatched=mismatched,
                include=include,
                exclude=exclude,
                rename=rename,
                cast=cast,
                verify=verify,
                atomic=atomic,
                memory_budget_bytes=memory_budget_bytes,
                read_once=read_once,
                progress=progress,
                timeout=timeout,
            ),
            set(),
        )

    def restore_with(self, app_state: AppState, options: RestoreOptions, touched: set[str]) -> RestoreReport:
        """Restore with prepared options. See `Restore` for `touched`."""
        refuse_on_loop()
        meter = Meter("restore", _shown(options.progress, self.pg))
        wait_for_copies()
        try:
            with Exchange(ranks_of(self.pg), "restore", _timeout(options.timeout)) as exchange:
                options.check()
                check_app_state(app_state)
                began = time.perf_counter()
                session, document = open_restore(
                    exchange,
                    self._url,
                    "restore",
                    lambda url: Session(url, self._options, budget=options.memory_budget_bytes),
                )
                try:
                    report = Restore(
                        exchange,
                        session,
                        document,
                        options,
                        opened=time.perf_counter() - began,
                        allow_pickle=self._allow_pickle,
                        meter=meter,
                        touched=touched,
                    ).run(app_state)
                finally:
                    run(session.close())
                exchange.close()
        except BaseException as error:
            emit("failed", "restore", str(self._url), error=error)
            raise
        finally:
            meter.close()
        emit("restored", "restore", str(self._url), bytes=report.bytes_read, seconds=round(report.total_seconds, 3))
        return report


def _timeout(given: float | None) -> float:
    return Settings.current().timeout if given is None else given


def _shown(progress: ProgressArgument, pg: ProcessGroup | None) -> ProgressArgument:
    """Show one progress bar for all ranks."""
    return None if progress is True and ranks_of(pg).rank else progress
