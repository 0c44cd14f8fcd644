"""Snapshot: save the state of a running application, and bring it back."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from snapshot.distributed.call import Call
from snapshot.distributed.group import ranks_of
from snapshot.engine import commit
from snapshot.engine.guard import wait_for_all
from snapshot.engine.inflight import in_flight
from snapshot.engine.loop import refuse_on_loop, run, start
from snapshot.engine.opening import expectation, open_restore, open_take, path_of
from snapshot.engine.operation import Operation
from snapshot.engine.portion import portion_of
from snapshot.engine.quiet import no_collection
from snapshot.engine.read_object import read_object, read_state_dict
from snapshot.engine.restore import Restore
from snapshot.engine.take import begin, make
from snapshot.engine.verify import verify_files
from snapshot.engine.worker import check, writer_process
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
)
from snapshot.events import Meter, ProgressArgument, emit
from snapshot.formats.safetensors import SHARD
from snapshot.manifest.document import Document, copied
from snapshot.manifest.entry import Entry
from snapshot.manifest.view import Rename
from snapshot.metadata import SnapshotMetadata
from snapshot.options import Settings
from snapshot.pending import PendingSnapshot
from snapshot.plan.layout import SavePlan
from snapshot.report import ConvertReport, RestoreReport, VerifyReport
from snapshot.state.flatten import Prepare
from snapshot.state.owned import Owned
from snapshot.state.stateful import Stateful, check_app_state
from snapshot.storage import URL

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

AppState = Mapping[str, Stateful]


class Snapshot:
    """A reference to a snapshot that exists, or that is about to.

    Args:
        path: A URL (`memory://name`), or a path of the file system.
        pg: The process group of those who restore.
        storage_options: What the storage plugin should know; see its documentation.
        allow_pickle: Read objects that were stored as pickles and that torch's `weights_only` refuses. A pickle can run
            any code: only for snapshots from whom you trust.

    >>> from snapshot import Snapshot, StateDict
    >>> progress = StateDict(step=3)
    >>> snapshot = Snapshot.take("memory://docs/first", {"progress": progress})
    >>> progress["step"] = 0
    >>> report = Snapshot("memory://docs/first").restore({"progress": progress})
    >>> progress["step"]
    3
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self._pg = pg
        self._url = URL.parse(self.path)
        self._options = dict(storage_options or {})
        self._allow_pickle = allow_pickle
        self._document: Document | None = None

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
        metadata: Mapping[str, Any] | None = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        plan: SavePlan | None = None,
    ) -> Snapshot:
        """Save the application's state, and return when it is committed.

        CPU tensors are written from their own memory. Nothing is committed unless everything is.

        Args:
            path: Where to. It must not hold a snapshot already, unless `overwrite`.
            app_state: Stateful objects by name: modules, optimizers, schedulers, dataloaders, `StateDict`, `RNGState`.
            pg: The process group of those who take part.
            replicated: Globs over `<key>/<logical path>` of what is the same on every rank.
            storage_options: What the storage plugin should know.
            _custom_tensor_prepare_func: `f(path, tensor, tracing) -> tensor`: what it returns is what is saved. Its
                dtype may differ, its shape may not.
            overwrite: Replace a snapshot that is there. The old one stays whole until the new one is.
            durable: Return only when the snapshot survives a loss of power.
            exclude: Globs of what is left out.
            memory_budget_bytes: Host memory for staging; by default 64 MiB on files, 256 MiB elsewhere.
            check_replicated: Compare what is replicated over the ranks, too.
            metadata: Anything that JSON can hold, to be found in `snapshot.metadata.metadata`.
            progress: True for a bar, or a function that is called with `Progress`.
            timeout: Seconds without a sign of life after which another rank counts as dead.
            plan: What `Snapshot.plan` returned for the same structure.

        Raises:
            SnapshotExistsError: There is a snapshot at `path`; nothing was written.
            StorageError: The storage failed; nothing is left behind.
            TypeError: A value of `app_state` is not stateful; nothing was done.
        """
        with Call(ranks_of(pg), "take", _timeout(timeout)) as call, no_collection():
            work, opening = begin(
                call, path, app_state, Meter("take", _shown(progress, pg)), replicated, overwrite, metadata,
                lambda url: Operation(url, storage_options, durable=durable, budget=memory_budget_bytes),
            )  # fmt: skip
            with work:
                if call.alone:
                    work.ending.expect = run(expectation(work.operation, overwrite=overwrite))
                portion = portion_of(call, app_state, _custom_tensor_prepare_func, exclude, opening, check_replicated)
                work.prepare(portion, plan, stage=False)
                run(work.write())
        return cls(path_of(path, opening), pg, storage_options)

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
        metadata: Mapping[str, Any] | None = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        plan: SavePlan | None = None,
        staging: str = "blocking",
        worker: str = "thread",
        when_busy: str = "wait",
    ) -> PendingSnapshot:
        """Save the application's state as it is now, and write it while the application goes on.

        Takes what `take` takes. When the call returns, everything has been copied to staging memory (which is kept for
        the next call), so whatever happens to the tensors afterwards cannot reach the snapshot. With a
        `memory_budget_bytes` below the payload, the call also waits until enough has been written for the rest to fit;
        the default is half of the memory that the host has free, shared by the processes of a job. All that is under
        way shares one budget: that of the newest call.

        Args:
            staging: `"blocking"`: the copy is complete when the call returns. `"overlapped"`: what only an optimizer's
                `step()` changes is copied while the next forward and backward pass run, and that `step()` waits for
                it, as `load_state_dict()` and `restore` do. For modules and optimizers of `app_state`, in loops that
                change parameters by nothing else without a call of `wait_staged()` before.
            worker: `"thread"`: threads of this process write. `"process"`: a process of its own does, with a low
                claim to cores and disk, which takes no turn of this interpreter.
            when_busy: If `SNAPSHOT_PENDING` takes are under way (3), `"wait"` for one of them, or `"raise"`.

        Raises:
            SnapshotBusyError: Too many are under way, and `when_busy="raise"`.

        >>> from snapshot import StateDict
        >>> pending = Snapshot.async_take("memory://docs/async", {"progress": StateDict(step=3)})
        >>> pending.wait().metadata.world_size
        1
        """
        refuse_on_loop()
        meter = Meter("async_take", _shown(progress, pg))
        with Call(ranks_of(pg), "async_take", _timeout(timeout)) as call:
            _one_of("staging", staging, "blocking", "overlapped")
            _one_of("worker", worker, "thread", "process")
            _one_of("when_busy", when_busy, "wait", "raise")
            process = None
            if worker == "process":
                check(URL.parse(os.fspath(path)), storage_options)
                process = writer_process()
            with in_flight().place(when_busy) as place, no_collection():
                default = in_flight().usual_limit()
                work, opening = begin(
                    call, path, app_state, meter, replicated, overwrite, metadata,
                    lambda url: Operation(
                        url, storage_options, durable=durable, budget=memory_budget_bytes, default_budget=default,
                        pool=place.pool,
                    ),
                )  # fmt: skip
                with work:
                    checked = start(expectation(work.operation, overwrite=overwrite)) if call.alone else None
                    portion = portion_of(
                        call, app_state, _custom_tensor_prepare_func, exclude, opening, check_replicated
                    )
                    overlapped = staging == "overlapped" and _custom_tensor_prepare_func is None
                    work.prepare(portion, plan, stage=True, owned=Owned(app_state) if overlapped else None)
                    snapshot = cls(path_of(path, opening), pg, storage_options)  # a relative path is of this folder
                    future = work.stage_and_start(checked, process)
                    place.leave_after(future)
                    pending = PendingSnapshot(snapshot.path, future, meter, snapshot, work.held)
        return pending

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
        """What a take would write: a dry run that writes nothing. The same plan may be given to `take`.

        >>> import torch
        >>> from snapshot import StateDict
        >>> print(Snapshot.plan({"state": StateDict(weight=torch.zeros(256))}, path="memory://x"))
        5.0 KiB in 1 files, 1 ranges, 0 B staged at most
          0.safetensors: 5.0 KiB, 1 ranges
        """
        with Call(ranks_of(pg), "plan", _timeout(None)) as call:
            check_app_state(app_state)
            operation, opening = open_take(
                call, URL.parse(os.fspath(path)), "plan", replicated or (),
                lambda url: Operation(url, storage_options, durable=durable, budget=memory_budget_bytes),
                claim=False,
            )  # fmt: skip
            try:
                portion = portion_of(call, app_state, _custom_tensor_prepare_func, exclude, opening, False)
                made = make(portion, operation, staged=False)
            finally:
                run(operation.close())
            call.close()
        return made

    # Load

    def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        cast: str = "error",
        verify: bool = True,
        atomic: bool = False,
        memory_budget_bytes: int | None = None,
        read_once: str | bool = "auto",
        progress: ProgressArgument = None,
        timeout: float | None = None,
    ) -> RestoreReport:
        """Bring the application's state back, in place into the tensors that `state_dict()` gives.

        Names, shapes, dtypes, and the files' presence and sizes are checked before the first byte reaches a live
        tensor.

        Args:
            app_state: What was saved, or a part of it.
            strict: Every name of a module that is missing or unexpected is an error; else it is reported.
            include: Globs of what is restored; all by default.
            exclude: Globs of what is not.
            rename: Names in the snapshot -> names in the application: a dict of paths, or a function.
            cast: Whether a dtype may differ: `"error"`, `"same_kind"` (as `torch.can_cast` has it) or `"any"`.
            verify: Check every byte's digest on the way.
            atomic: Verify every byte before any live tensor is touched: everything is read twice.
            memory_budget_bytes: Host memory for what cannot be read in place; by default 64 MiB from
                files, 256 MiB elsewhere.
            read_once: Whether ranks share what one of them has read.
            progress: True for a bar, or a function that is called with `Progress`.
            timeout: Seconds without a sign of life after which another rank counts as dead.

        Raises:
            SnapshotNotFoundError: There is no snapshot.
            RestoreError: It does not fit; `mismatches` lists everything, and nothing was touched.
            CorruptSnapshotError: A digest or a file's size is wrong; `touched` names the live tensors that were
            written.
        """
        refuse_on_loop()
        meter = Meter("restore", _shown(progress, self._pg))
        wait_for_all()
        try:
            with Call(ranks_of(self._pg), "restore", _timeout(timeout)) as call:
                check_app_state(app_state)
                began = time.perf_counter()
                operation, document = open_restore(
                    call, self._url, "restore",
                    lambda url: Operation(url, self._options, budget=memory_budget_bytes),
                )  # fmt: skip
                try:
                    report = Restore(
                        call, operation, document, strict=strict, include=include, exclude=exclude, rename=rename,
                        cast=cast, verify=verify, atomic=atomic, read_once=read_once,
                        opened=time.perf_counter() - began, allow_pickle=self._allow_pickle, meter=meter,
                    ).run(app_state)  # fmt: skip
                finally:
                    run(operation.close())
                call.close()
        except BaseException as error:
            emit("failed", "restore", str(self._url), error=error)
            raise
        finally:
            meter.close()
        emit("restored", "restore", str(self._url), bytes=report.bytes_read, seconds=round(report.total_seconds, 3))
        return report

    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        box: Sequence[slice | int] | None = None,
        verify: bool = True,
    ) -> Any:
        """Read one object; a container comes with all that is in it.

        Args:
            path: Its name in the manifest: `"0/model/layer.0.weight"`.
            obj_out: A tensor or an array of its shape, which is filled and returned. Ignored for what cannot be filled.
            memory_budget_bytes: Host memory for what cannot be read in place; by default 64 MiB from
                files, 256 MiB elsewhere.
            box: A slice for each dimension (trailing ones may be left out): only that part is read. An int is a
                slice of one that drops its dimension.
            verify: Check the digests of what is read.

        >>> import torch
        >>> from snapshot import StateDict
        >>> snapshot = Snapshot.take("memory://docs/read", {"state": StateDict(weight=torch.arange(12).view(4, 3))})
        >>> snapshot.read_object("0/state/weight", box=[slice(1, 3)])
        tensor([[3, 4, 5],
                [6, 7, 8]])
        """
        return self._read(
            memory_budget_bytes,
            lambda operation, document: read_object(
                operation, document, path, obj_out, box, verify=verify, allow_pickle=self._allow_pickle
            ),
        )

    def get_state_dict_for_key(self, key: str, replicate_from_rank0: bool = False) -> Any:
        """The state dict that this rank saved under a key of the app state, made anew; with `replicate_from_rank0` that
        of rank 0. Weights that were tied are tied again, tensors that were sharded are whole."""
        number = 0 if replicate_from_rank0 else ranks_of(self._pg).rank

        return self._read(
            None,
            lambda operation, document: read_state_dict(
                operation, document, key, number, allow_pickle=self._allow_pickle
            ),
        )

    # Look

    def get_manifest(self) -> dict[str, Entry]:
        """What is in the snapshot: an entry for each object, by `"<rank>/<logical path>"`. A copy, yours to change."""
        return copied(self._open().manifest)

    @property
    def metadata(self) -> SnapshotMetadata:
        """When, by which version, and with which metadata of your own the snapshot was taken."""
        return SnapshotMetadata.of(self._open())

    def exists(self) -> bool:
        """Whether a committed snapshot is here, or a checkpoint of another library that can be opened; only that, not
        whether it is whole."""
        operation = self._operation(None)
        try:
            return run(operation.exists())
        finally:
            run(operation.close())

    def verify(self, *, memory_budget_bytes: int | None = None, progress: ProgressArgument = None) -> VerifyReport:
        """Read every byte, and compare it with its digest. Live tensors are not involved.

        >>> import torch
        >>> from snapshot import StateDict
        >>> snapshot = Snapshot.take("memory://docs/verify", {"state": StateDict(weight=torch.zeros(3))})
        >>> bool(snapshot.verify())
        True
        """
        operation = self._operation(memory_budget_bytes)
        meter = Meter("verify", progress)
        try:
            report = run(verify_files(operation, meter))
        finally:
            run(operation.close())
            meter.close()
        emit("verified", "verify", str(self._url), ok=report.ok, bytes=report.bytes_read)
        return report

    # Convert

    def convert(
        self,
        url: str | os.PathLike[str],
        to: str = "snapshot",
        *,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD,
        overwrite: bool = False,
        durable: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
    ) -> ConvertReport:
        """Write what is here once more, in another format; in the memory budget, whatever its size. One process does
        it, also where several ranks run.

        Args:
            url: Where to: a folder; for `"torch"`, and for `"safetensors"` if it ends so, a file.
            to: `"snapshot"`; `"safetensors"`: one file, or a folder as Hugging Face has it; `"torch"`: a file as
                torch.save writes it; `"dcp"`: a folder that `torch.distributed.checkpoint.load` reads.
            select: Globs over `<key>/<logical path>` of what is wanted; all by default.
            exclude: Globs of what is not.
            rename: Names here -> names there: a dict of paths, or a function.
            dtype: Cast floating point tensors to it.
            shard_bytes: How long a file of several may be.
            overwrite: Replace what is there.
            durable: Return only when it survives a loss of power.
            verify: Check every digest, and the checksums that others' formats carry.
            storage_options: What the storage plugin of `url` should know.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a bar, or a function that is called with `Progress`.

        Raises:
            SnapshotExistsError: Something is there already; nothing was written.
            UnsupportedFormatError: The format cannot hold a tensor; nothing was written.
            UnsafeObjectError: What is here holds a pickle of more than plain values; exclude it.

        >>> import torch
        >>> from snapshot import StateDict
        >>> snapshot = Snapshot.take("memory://docs/convert", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.convert("memory://docs/model.safetensors", "safetensors").tensors
        1
        """
        from snapshot.engine.convert import Choice  # who only trains need not wait for it
        from snapshot.engine.converting import converted

        refuse_on_loop()
        choice = Choice(select, exclude, rename, dtype, verify, self._allow_pickle)
        return converted(
            self._url, self._options, URL.parse(os.fspath(url)), storage_options, to, choice,
            Meter("convert", progress), shard_bytes=shard_bytes, overwrite=overwrite, durable=durable,
            budget=memory_budget_bytes,
        )  # fmt: skip

    # Remove

    def delete(self) -> None:
        """Remove the snapshot: the manifest first, so that what an interruption leaves is no snapshot. Also removes
        what interrupted takes left here; nothing else in the folder is touched."""
        operation = self._operation(None)

        try:
            run(commit.remove(operation.storage))
        except (SnapshotNotFoundError, StorageError) as error:
            foreign = False
            with suppress(SnapshotError):
                foreign = run(operation.is_foreign())
            if not foreign and getattr(error, "errno", None) == errno.ENOTDIR:
                raise SnapshotNotFoundError(f"{self._url}: there is no snapshot to delete") from error
            if not foreign:
                raise
            raise SnapshotExistsError(
                f"{self._url}: was written by another library; it is only read, never replaced or deleted: remove it "
                "yourself"
            ) from error
        finally:
            run(operation.close())
        self._document = None
        emit("deleted", "delete", str(self._url))

    def _operation(self, budget: int | None) -> Operation:
        return Operation(self._url, self._options, budget=budget)

    def _open(self) -> Document:
        """The manifest. A snapshot never changes, so it is read once; `restore` reads it anew."""
        if self._document is None:
            operation = self._operation(None)
            try:
                self._document = run(operation.open())
            finally:
                run(operation.close())
        return self._document

    def _read(self, budget: int | None, read: Callable[[Operation, Document], Any]) -> Any:
        """Read by the manifest that is known; if the snapshot was replaced since, by the new one."""
        known = self._open()
        operation = self._operation(budget)
        try:
            run(operation.use(known))
            return read(operation, known)
        except CorruptSnapshotError:
            run(operation.close())
            operation = self._operation(budget)
            self._document = run(operation.open())
            if self._document.save_id == known.save_id:
                raise
            return read(operation, self._document)
        finally:
            run(operation.close())

    def __repr__(self) -> str:
        return f"Snapshot({str(self._url)!r})"


def _timeout(given: float | None) -> float:
    return Settings.current().timeout if given is None else given


def _shown(progress: ProgressArgument, pg: ProcessGroup | None) -> ProgressArgument:
    """One bar for all ranks is enough."""
    return None if progress is True and ranks_of(pg).rank else progress


def _one_of(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: it is one of {', '.join(map(repr, known))}")
