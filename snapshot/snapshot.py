"""Snapshot: save and restore the state of a running application."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from snapshot.checkpoint import Checkpoint
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.events import emit
from snapshot.io.loop import refuse_on_loop, run
from snapshot.io.session import Session
from snapshot.io.url import locate_source, seal_of
from snapshot.loading.choose import Accept, Cast, Mismatched, RestoreOptions, Unused
from snapshot.loading.left_out import attach_base
from snapshot.loading.open import open_restore
from snapshot.loading.restore import Restore
from snapshot.maps.tensor_map import TensorMap
from snapshot.opened import of_object, seal_with
from snapshot.pending import PendingTake
from snapshot.plan.layout import SavePlan
from snapshot.plan.names import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import RestoreReport, TakeReport
from snapshot.save.background_take import wait_for_copies
from snapshot.save.take_options import AllowPickle, BaseArgument, Compression, Only, Staging, WhenBusy, Worker
from snapshot.signing.keys import Key
from snapshot.signing.seal import signer_of
from snapshot.state.leaves import Prepare
from snapshot.state.stateful import check_app_state
from snapshot.takes import AppState, StartedTake, plan_take, run_take, shown_once, start_take, timeout_or_default

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PendingSnapshot(PendingTake["Snapshot"]):
    """The result of `Snapshot.async_take`, with the state at the time of that call.

    At interpreter exit, a pending take is finished even without `wait()`, and its failure is logged.
    """

    @property
    def report(self) -> TakeReport | None:
        """The bytes that the take writes and shares on this rank."""
        return self._snapshot.report


class Snapshot(Checkpoint):
    """A reference to a snapshot, which need not exist yet.

    Args:
        path: A URL (`memory://name`), or a path of the file system.
        pg: The process group of the ranks that restore.
        storage_options: Options for the storage plugin; see its documentation.
        allow_pickle: Unpickle objects that torch's `weights_only` refuses. A pickle can run any code, so use this
            only for trusted snapshots.
        key: An Ed25519 public key: the path of a PEM file, or a key object of `cryptography`. Every byte that this
            object reads must then have the key's signature. See docs/signatures.md.

    >>> from snapshot import Snapshot, StateDict
    >>> progress = StateDict(step=3)
    >>> snapshot = Snapshot.take("memory://docs/first", {"progress": progress})
    >>> progress["step"] = 0
    >>> report = Snapshot("memory://docs/first").restore({"progress": progress})
    >>> progress["step"]
    3
    """

    report: TakeReport | None = None
    """The bytes that the take wrote and shared on this rank, if a take returned this object."""

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
        base: BaseArgument = None,
        only: Only | None = None,
        compression: Compression | None = None,
        sign: Key | None = None,
        allow_pickle: AllowPickle = "warn",
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
            base: An earlier snapshot. Its files whose tensors are unchanged are shared instead of written, if the
                storage can. Each snapshot remains complete: any of them can be deleted or copied. With a list of two
                bases, the newest first, the newest two snapshots always have separate physical copies. See
                docs/incremental.md.
            only: `"trainable"`: leave out frozen parameters (`requires_grad=False`) that are bit-equal in `base`. A
                restore compares them with the live tensors, or reads them from the base.
            compression: `"zstd"`: compress the data files without loss, which saves time on slow links. `"auto"`: only
                if earlier takes of this process show that it does. See docs/compression.md.
            sign: An Ed25519 private key: sign the snapshot, before it is committed. The path of a PEM file, or a key
                object of `cryptography`. Ranks other than 0 may pass the public key. See docs/signatures.md.
            allow_pickle: The action for objects that only a pickle can hold, which a restore refuses by default:
                `"warn"`, `"error"`, or True to store them without a word. Message and error name each object.

        Raises:
            MissingExtraError: zstandard is not installed and `compression` is set, or cryptography and `sign`.
            SnapshotExistsError: A snapshot exists at `path`; nothing was written.
            StorageError: A storage operation failed; partial files were deleted.
            CorruptSnapshotError: Bytes that were read back differ from the written ones; nothing was committed.
            TypeError: A value of `app_state` is not stateful; nothing was written.
            UnsafeObjectError: An object needs a pickle, and `allow_pickle="error"`; nothing was written.
        """
        given = {
            "replicated": replicated,
            "storage_options": storage_options,
            "prepare": _custom_tensor_prepare_func,
            "overwrite": overwrite,
            "durable": durable,
            "exclude": exclude,
            "memory_budget_bytes": memory_budget_bytes,
            "check_replicated": check_replicated,
            "verify_writes": verify_writes,
            "metadata": metadata,
            "plan": plan,
            "base": base,
            "only": only,
            "compression": compression,
            "sign": sign,
            "allow_pickle": allow_pickle,
        }
        place, report = run_take(path, app_state, pg, given, progress=progress, timeout=timeout)
        return cls._taken(place, pg, storage_options, report)

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
        base: BaseArgument = None,
        only: Only | None = None,
        compression: Compression | None = None,
        sign: Key | None = None,
        allow_pickle: AllowPickle = "warn",
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
        given = {
            "replicated": replicated,
            "storage_options": storage_options,
            "prepare": _custom_tensor_prepare_func,
            "overwrite": overwrite,
            "durable": durable,
            "exclude": exclude,
            "memory_budget_bytes": memory_budget_bytes,
            "check_replicated": check_replicated,
            "verify_writes": verify_writes,
            "metadata": metadata,
            "plan": plan,
            "base": base,
            "only": only,
            "compression": compression,
            "sign": sign,
            "allow_pickle": allow_pickle,
            "staging": staging,
            "worker": worker,
            "when_busy": when_busy,
        }

        def pending(begun: StartedTake) -> PendingSnapshot:
            snapshot = cls._taken(begun.path, pg, storage_options, begun.report)
            return PendingSnapshot(
                snapshot.path, begun.work, begun.meter, snapshot, held=begun.late, save_id=begun.save_id
            )

        return start_take(path, app_state, pg, given, pending, progress=progress, timeout=timeout)

    @classmethod
    def _taken(
        cls,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None,
        storage_options: Mapping[str, Any] | None,
        report: TakeReport,
    ) -> Self:
        snapshot = cls(path, pg, storage_options)
        snapshot.report = report
        return snapshot

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
        given = {
            "replicated": replicated,
            "storage_options": storage_options,
            "prepare": _custom_tensor_prepare_func,
            "durable": durable,
            "exclude": exclude,
            "memory_budget_bytes": memory_budget_bytes,
        }
        return plan_take(path, app_state, pg, given)

    # Load

    @of_object
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
        map: TensorMap | None = None,
        cast: Cast = "error",
        verify: bool = True,
        atomic: bool = False,
        memory_budget_bytes: int | None = None,
        read_once: Literal["auto"] | bool = "auto",
        base: str | os.PathLike[str] | Snapshot | None = None,
        unused: Unused = "warn",
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
            map: Recipes that turn the snapshot's tensors into those of the application: other names, splits, stacks
                and transpositions. All other arguments refer to the new names.
            cast: Whether a dtype may differ: `"error"`, `"same_kind"` (as `torch.can_cast` has it) or `"any"`.
            verify: Verify the digest of every byte that is read.
            atomic: Verify every byte before any live tensor is written. This reads everything twice.
            memory_budget_bytes: Host memory for reads that cannot go to their destination directly. The default is 64
                MiB for files and 256 MiB for other storages.
            read_once: Whether one rank reads replicated data and sends it to the others.
            base: The base of a snapshot that was taken with `only="trainable"`, or a copy of the base. What the
                snapshot left out is read from there. Without it, that is compared with the live tensors, and any
                difference is an error, also with `strict=False`.
            unused: The action for keys of the snapshot that `app_state` lacks, such as a forgotten optimizer: `"warn"`
                logs one line, `"error"` raises, and `"ignore"` is silent. The report lists them, except with
                `"ignore"`. Keys that `include` or `exclude` leave out do not count.
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
                map=map,
                cast=cast,
                verify=verify,
                atomic=atomic,
                memory_budget_bytes=memory_budget_bytes,
                read_once=read_once,
                base=base,
                unused=unused,
                progress=progress,
                timeout=timeout,
            ),
            set(),
        )

    def restore_with(
        self, app_state: AppState, options: RestoreOptions, touched: set[str], accept: Accept | None = None
    ) -> RestoreReport:
        """Restore with prepared options. See `Restore` for `touched`. `accept` may refuse the manifest, by an error."""
        refuse_on_loop()
        meter = Meter("restore", shown_once(options.progress, self.pg))
        wait_for_copies()
        try:
            with Exchange(ranks_of(self.pg), "restore", timeout_or_default(options.timeout)) as exchange:
                options.check()
                check_app_state(app_state)
                seal = seal_with(options.key) or self.seal
                began = time.perf_counter()
                session, document = open_restore(
                    exchange,
                    self._url,
                    "restore",
                    lambda url: Session(url, self._options, budget=options.memory_budget_bytes, seal=seal),
                    keys=[signer_of(seal), *([] if options.base is None else [signer_of(seal_of(options.base))])],
                )
                try:
                    if accept is not None:
                        accept(document)
                    if options.base is not None:
                        run(
                            attach_base(
                                session, document, *locate_source(options.base, self._options), seal_of(options.base)
                            )
                        )
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
