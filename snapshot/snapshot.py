"""Snapshot: save and restore the state of a running application, and all other operations on one checkpoint."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from snapshot import extensions
from snapshot.distributed.group import ranks_of
from snapshot.distributed.operation import operation
from snapshot.events import emit
from snapshot.io.loop import run
from snapshot.io.session import Key, Seal, Session, signer_of
from snapshot.io.system import gc_paused
from snapshot.io.url import URL, Location, expect_mapping, locate_source
from snapshot.loading.left_out import attach_base
from snapshot.loading.open import KnownManifest, checkpoint_exists, open_restore
from snapshot.loading.read_object import read_object, read_state_dict
from snapshot.loading.restore import Restore
from snapshot.loading.restore_options import RESTORE_OPTIONS, Accept, RestoreOptions, Unused
from snapshot.manifest.document import SnapshotMetadata, copy_manifest
from snapshot.manifest.values import Entry
from snapshot.options import EXPLAINED, drop_frames, expect_options, with_given, with_options
from snapshot.pending import PendingTake
from snapshot.plan.layout import SavePlan
from snapshot.plan.names import Rename
from snapshot.progress import ProgressArgument
from snapshot.reports import ConvertReport, CopyReport, Diff, RestoreReport, TakeReport, VerifyReport
from snapshot.save.observers import GROUP, HEALTH, observe_restore
from snapshot.save.step_barrier import wait_for_copies
from snapshot.save.take import AppState, StartedTake, plan_take, run_take, shown_once, start_take
from snapshot.save.take_options import (
    BaseArgument,
    TakeCall,
    TakeOptions,
    find_keys,
    seal_with,
)
from snapshot.state.leaves import Prepare
from snapshot.state.stateful import check_app_state

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from snapshot.loading.open import Opened
    from snapshot.maps.tensor_map import TensorMap
    from snapshot.transform.target import Target

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def of_object(method: F) -> F:
    """Let a method name the mistake if it is called on the class: `Snapshot.restore(path, ...)`."""

    @functools.wraps(method)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not arguments or not isinstance(arguments[0], Snapshot):
            shown = repr(arguments[0]) if arguments and isinstance(arguments[0], (str, os.PathLike)) else "path"
            raise TypeError(
                f"{method.__name__}() must be called on a snapshot, not on the class: "
                f"Snapshot({shown}).{method.__name__}(...)"
            )
        outer = sys.exception()
        try:
            return method(*arguments, **named)
        except EXPLAINED as error:
            drop_frames(error, outer)
            raise

    return cast(F, checked)


class PendingSnapshot(PendingTake["Snapshot"]):
    """The result of `Snapshot.async_take`, with the state at the time of that call.

    At interpreter exit, a pending take is finished even without `wait()`, and its failure is logged.
    """

    @property
    def report(self) -> TakeReport | None:
        """The bytes that the take writes and shares on this rank."""
        return self._snapshot.report

    @report.setter
    def report(self, report: TakeReport | None) -> None:
        self._snapshot.report = report


class Snapshot:
    """A reference to a snapshot, which need not exist yet.

    Args:
        path: A URL (`memory://name`), or a path of the file system.
        pg: The process group of the ranks that restore.
        storage_options: Options for the storage plugin; see its documentation.
        allow_pickle: Unpickle objects that torch's `weights_only` refuses. A pickle can run any code, so use this
            only for trusted snapshots.
        key: An Ed25519 public key: the path of a PEM file, or a key object of `cryptography`. Every byte that this
            object reads must then have the key's signature. An ECDSA key only serves `verify`. See
            docs/guides/signatures.md.

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

    # Open

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        key: Key | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.pg = pg
        self.seal = seal_with(key)
        self._url = URL.parse(self.path)
        self._options = dict(expect_mapping(storage_options))
        self.allow_pickle = allow_pickle
        self._manifest = KnownManifest(self.new_session)

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Snapshot) -> Snapshot:
        """Return a snapshot; a path becomes one."""
        if not isinstance(source, (str, os.PathLike, Snapshot)):
            raise TypeError(f"a checkpoint must be a path, a URL or a Snapshot, got {source!r}")
        return source if isinstance(source, Snapshot) else Snapshot(source)

    @property
    def location(self) -> Location:
        """The parsed URL with its options, and the check of the key."""
        return Location(self._url, self._options, self.seal)

    def new_session(self, budget: int | None) -> Session:
        """Open a session at the URL. The caller closes it."""
        return Session(self._url, self._options, budget=budget, seal=self.seal)

    def _use(self, work: Callable[[Session], T]) -> T:
        """Do something in a new session."""
        with self.new_session(None) as session:
            return work(session)

    # Save

    @classmethod
    @with_options(TakeOptions)
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
        metadata: Mapping[str, Any] | None = None,
        base: BaseArgument = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        options: TakeOptions | None = None,
    ) -> Snapshot:
        """Save the application's state and return when it is committed.

        The commit is atomic: all of the state, or nothing. CPU tensors are written from their own memory. Where a file
        system is written with direct I/O, they are copied to aligned memory, part by part.

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
            metadata: A mapping of JSON values; it is returned as `snapshot.metadata.metadata`.
            base: An earlier snapshot. Its files whose tensors are unchanged are shared instead of written, if the
                storage can. Each snapshot remains complete: any of them can be deleted or copied. With a list of two
                bases, the newest first, the newest two snapshots always have separate physical copies. See
                docs/guides/incremental.md.
            progress: True for a progress bar, or a function that is called with `Progress`.
            timeout: Seconds without a heartbeat after which another rank counts as dead.
            options: All other choices: `durable`, `exclude`, `compression`, ... See `TakeOptions`.

        Raises:
            MissingExtraError: A package that an option needs is not installed, such as zstandard for `compression`.
            SnapshotExistsError: A snapshot exists at `path`; nothing was written.
            StorageError: A storage operation failed; partial files were deleted.
            CorruptSnapshotError: Bytes that were read back differ from the written ones; nothing was committed.
            TypeError: A value of `app_state` is not stateful; nothing was written.
            UnsafeObjectError: An object needs a pickle, and `allow_pickle="error"`; nothing was written.
            SuspectStateError: A guard found something, and `guards="refuse"`; nothing was committed.
        """
        call = TakeCall(
            options,
            replicated=replicated,
            storage_options=storage_options,
            prepare=_custom_tensor_prepare_func,
            overwrite=overwrite,
            metadata=metadata,
            base=base,
            progress=progress,
            timeout=timeout,
        )
        return cls._taken(*run_take(path, app_state, pg, call), pg, storage_options)

    @classmethod
    @with_options(TakeOptions)
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
        metadata: Mapping[str, Any] | None = None,
        base: BaseArgument = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        options: TakeOptions | None = None,
    ) -> PendingSnapshot:
        """Save the application's current state in the background. Arguments are those of `take`.

        When the call returns, the state has been copied to staging memory, so later changes to the tensors do not reach
        the snapshot. Staging memory is kept for the next call. If the state exceeds the memory budget, the call also
        waits until enough has been written for the rest to fit.

        The options `staging`, `worker` and `when_busy` choose how.

        Raises:
            SnapshotBusyError: The limit of pending takes is reached, and `when_busy="raise"`.

        >>> from snapshot import StateDict
        >>> pending = Snapshot.async_take("memory://docs/async", {"progress": StateDict(step=3)})
        >>> pending.wait().metadata.world_size
        1
        """

        def pending(begun: StartedTake) -> PendingSnapshot:
            snapshot = cls._taken(begun.path, begun.report, pg, storage_options)
            return PendingSnapshot(
                snapshot.path, begun.work, begun.meter, snapshot, held=begun.late, save_id=begun.save_id
            )

        call = TakeCall(
            options,
            replicated=replicated,
            storage_options=storage_options,
            prepare=_custom_tensor_prepare_func,
            overwrite=overwrite,
            metadata=metadata,
            base=base,
            progress=progress,
            timeout=timeout,
        )
        return start_take(path, app_state, pg, call, pending)

    @classmethod
    def _taken(
        cls,
        path: str | os.PathLike[str],
        report: TakeReport,
        pg: ProcessGroup | None,
        storage_options: Mapping[str, Any] | None,
    ) -> Self:
        snapshot = cls(path, pg, storage_options)
        snapshot.report = report
        return snapshot

    @classmethod
    @with_options(TakeOptions)
    def plan(
        cls,
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        path: str | os.PathLike[str] = ".",
        storage_options: Mapping[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        options: TakeOptions | None = None,
    ) -> SavePlan:
        """Plan a take without writing anything. The plan can be passed to `take`, as `TakeOptions(plan=...)`.

        Of the options, those count that change what is written, and `timeout`.

        >>> import torch
        >>> from snapshot import StateDict
        >>> print(Snapshot.plan({"state": StateDict(weight=torch.zeros(256))}, path="memory://x"))
        5.0 KiB in 1 file, 1 range, 0 B staged at most
          0.safetensors: 5.0 KiB, 1 range
        """
        call = TakeCall(
            options, replicated=replicated, storage_options=storage_options, prepare=_custom_tensor_prepare_func
        )
        return plan_take(path, app_state, pg, call)

    # Load

    @of_object
    @with_options(RestoreOptions)
    def restore(
        self,
        app_state: AppState,
        strict: bool | None = None,
        *,
        select: Sequence[str] | None = None,
        rename: Rename | None = None,
        unused: Unused | None = None,
        progress: ProgressArgument = None,
        timeout: float | None = None,
        options: RestoreOptions | None = None,
    ) -> RestoreReport:
        """Restore the application's state, in place into the tensors that `state_dict()` returns.

        Names, shapes, dtypes, and the files' presence and sizes are checked before the first byte reaches a live
        tensor.

        Args:
            app_state: The app state that was saved, or a part of it.
            strict: Raise if the snapshot lacks a name, if it has a module's name that the application lacks, or if
                the optimizer is of another kind. That is the default. With False, restore what matches and list the
                rest in the report.
            select: Globs to restore; all by default.
            rename: Names in the snapshot -> names in the application: a function, or a dict of paths, of prefixes
                (`{"model/a": "model/enc"}`), or of globs (`{"model/h.*.w": "model/layers.*.w"}`).
            unused: The action for keys of the snapshot that `app_state` lacks, such as a forgotten optimizer: `"warn"`
                logs one line, `"error"` raises, and `"ignore"` is silent; `"warn"` by default. The report lists them,
                except with `"ignore"`. Keys that `select` or `exclude` leave out do not count.
            progress: True for a progress bar, or a function that is called with `Progress`.
            timeout: Seconds without a heartbeat after which another rank counts as dead.
            options: All other choices: `exclude`, `mismatched`, `cast`, `map`, ... See `RestoreOptions`.

        Raises:
            SnapshotNotFoundError: No snapshot exists at the path.
            RestoreError: The snapshot does not fit the application. `mismatches` lists every reason; no live tensor
                was written.
            CorruptSnapshotError: A digest or a file size is wrong. `touched` names the live tensors that were
                written.
        """
        given = {
            "strict": strict,
            "select": select,
            "rename": rename,
            "unused": unused,
            "progress": progress,
            "timeout": timeout,
        }
        chosen = with_given(RESTORE_OPTIONS if options is None else options, RestoreOptions, given)
        return self.restore_with(app_state, chosen, set())

    @gc_paused()  # until all that it made is freed: what is left would be examined at once
    def restore_with(
        self,
        app_state: AppState,
        options: RestoreOptions,
        touched: set[str],
        accept: Accept | None = None,
        seal: Seal | None = None,
    ) -> RestoreReport:
        """Restore for a manager. See `Restore` for `touched`.

        `accept` may refuse the manifest, by an error. `seal` is the check that the files must pass, if not this
        object's.
        """
        wait_for_copies()
        known = options if isinstance(options, RestoreOptions) else RESTORE_OPTIONS  # for now: the check is below
        with operation(
            "restore",
            self._url,
            pg=self.pg,
            ranks=True,
            budget=known.memory_budget_bytes,
            progress=shown_once(known.progress, self.pg),
            timeout=known.timeout,
        ) as op:
            expect_options(options, RestoreOptions)
            options.check()
            check_app_state(app_state)
            seal = seal or self.seal
            base = None if options.base is None else locate_source(options.base, self.location)
            began = op.seconds
            opened = open_restore(
                op.exchange,
                self._url,
                "restore",
                partial(Session, options=self._options, budget=options.memory_budget_bytes, seal=seal),
                keys=[signer_of(seal), *([] if base is None else [signer_of(base.seal)])],
            )
            with opened.session:
                if accept is not None:
                    accept(opened.document)
                if base is not None:
                    opened, _ = run(attach_base(opened, base))
                if options.map is not None:
                    from snapshot.loading.mapping import dequantise_weights  # few restores have a map

                    opened = dequantise_weights(opened, options.map)
                seconds = op.seconds - began
                restore = Restore(op, opened, options, seconds=seconds, allow_pickle=self.allow_pickle, touched=touched)
                report = restore.run(app_state)
            if options.environment == "log" and op.exchange.rank == 0:
                observe_restore(self._url, opened.document.metadata, app_state, op.exchange.world)
            op.emit("restored", bytes=report.bytes_read, seconds=round(report.total_seconds, 3))
        return report

    # Inspect

    @of_object
    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        box: Sequence[slice | int] | None = None,
        map: TensorMap | None = None,
        verify: bool = True,
    ) -> Any:
        """Read one object. A container is returned with its contents.

        Args:
            path: Its name in the manifest, such as `"0/model/layer.0.weight"`. The rank may be omitted
                (`"model/layer.0.weight"`) unless several ranks have their own object of that name.
            obj_out: A tensor or array of the same shape, which is filled and returned. Only this rank's shards of a
                DTensor or ShardedTensor are filled. A dataclass instance or wrapped tensor is filled field by field,
                and an Enum member provides its class. Ignored for types that cannot be filled.
            memory_budget_bytes: Host memory for reads that cannot go to their destination directly. The default is 64
                MiB for files, and 256 MiB for other storages or with a GPU.
            box: A slice for each dimension; trailing dimensions may be omitted. Only that part is read. An int
                selects one index and drops its dimension.
            map: Recipes that turn the snapshot's tensors into others; `path` is one of the new names.
            verify: Verify the digests of the bytes that are read.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/read", {"state": StateDict(weight=torch.arange(12).view(4, 3))})
        >>> snapshot.read_object("state/weight", box=[slice(1, 3)])
        tensor([[3, 4, 5],
                [6, 7, 8]])
        """
        return self._manifest.read(
            memory_budget_bytes,
            lambda opened: read_object(
                _with_map(opened, map),
                path,
                obj_out,
                box,
                verify=verify,
                allow_pickle=self.allow_pickle,
            ),
            path if map is None else None,
        )

    @of_object
    def get_state_dict_for_key(
        self, key: str, replicate_from_rank0: bool = False, *, map: TensorMap | None = None
    ) -> Any:
        """Return the state dict that this rank saved under a key of the app state, as new objects.

        Tied weights are tied again, and sharded tensors are whole. With `replicate_from_rank0`, return the state dict
        of rank 0. With `map`, return the tensors that its recipes make.
        """
        number = 0 if replicate_from_rank0 else ranks_of(self.pg).rank
        return self._manifest.read(
            None,
            lambda opened: read_state_dict(_with_map(opened, map), key, number, allow_pickle=self.allow_pickle),
        )

    @of_object
    def get_manifest(self) -> dict[str, Entry]:
        """Return a copy of the manifest: an entry for each object, by `"<rank>/<logical path>"`."""
        return copy_manifest(self._manifest.open().manifest)

    @of_object
    def get_statistics(self) -> dict[str, Any]:
        """Return what a take with `statistics=True` measured, by name in the manifest; empty without it.

        >>> import snapshot, torch
        >>> state = {"s": snapshot.StateDict(w=torch.tensor([3.0, 0.0, -4.0]))}
        >>> options = snapshot.TakeOptions(statistics=True)
        >>> snapshot.Snapshot.take("memory://docs/measured", state, options=options).get_statistics()["0/s/w"]
        TensorStatistics(count=3, nan=0, infinite=0, zero=1, norm=5.0, min=-4.0, max=3.0)
        """
        health = extensions.require(GROUP, HEALTH, "get_statistics")
        found: dict[str, Any] = self._manifest.read(None, health.read_statistics)
        return found

    @property
    def metadata(self) -> SnapshotMetadata:
        """Time, library version and user metadata of the snapshot."""
        return SnapshotMetadata.of(self._manifest.open())

    @of_object
    def exists(self) -> bool:
        """Return True if a committed snapshot is here, or a readable checkpoint of another library.

        This verifies neither the data files nor a signature.
        """
        return self._use(lambda session: run(checkpoint_exists(session)))

    @of_object
    def verify(
        self,
        *,
        quick: bool = False,
        resume: str | os.PathLike[str] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> VerifyReport:
        """Read every byte and compare it with its digest. Live tensors are not used.

        Args:
            quick: Check only the manifest, and the presence and size of each file.
            resume: A local journal file. An interrupted verification continues where it stopped if it gets the same
                file again. A verification without faults deletes the file. Each journal belongs to one snapshot.
            memory_budget_bytes: Host memory for read buffers. The default is 64 MiB for files, and 256 MiB for other
                storages or with a GPU.
            progress: True for a progress bar, or a function that is called with `Progress`.
            ranks: Share the work with all ranks of `pg`, which all call. By default this process works alone.

        Raises:
            CorruptSnapshotError: The manifest is damaged. All other faults are in the report.
            ValueError: `resume` is not a journal of this snapshot.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/verify", {"state": StateDict(weight=torch.zeros(3))})
        >>> bool(snapshot.verify())
        True
        """
        from snapshot.transform.verify import verify_checkpoint

        with operation(
            "verify", self._url, pg=self.pg, ranks=ranks, budget=memory_budget_bytes, progress=progress
        ) as op:
            return verify_checkpoint(op, self.location, quick=quick, resume=resume)

    @of_object
    def sign(
        self, key: Key, *, memory_budget_bytes: int | None = None, progress: ProgressArgument = None
    ) -> VerifyReport:
        """Sign the committed snapshot. Every byte is read once, compared with its digest, and hashed with SHA-256.

        A snapshot has one signature: signing it again replaces it. See docs/guides/signatures.md.

        Args:
            key: An Ed25519 private key, or an ECDSA one for other tools: the path of a PEM file, or a key object.
            memory_budget_bytes: Host memory for read buffers.
            progress: True for a progress bar, or a function that is called with `Progress`.

        Raises:
            CorruptSnapshotError: A byte does not match its digest; nothing was signed.
            MissingExtraError: cryptography is not installed.
        """
        keys = find_keys("key")
        signer = keys.load_signer(key, "key", private=True)
        with operation("sign", self._url, budget=memory_budget_bytes, progress=progress) as op:
            return keys.sign(op, self.location, signer)

    @staticmethod
    def diff(
        a: Snapshot | str | os.PathLike[str],
        b: Snapshot | str | os.PathLike[str],
        *,
        values: bool = False,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> Diff:
        """Return the differences between two snapshots: none, if both restore the same state.

        Tensors that are split the same way in both snapshots are compared by the digests in the manifests, without
        reading data. Other tensors, and those of other libraries' checkpoints, are read part by part. Splits, shards
        and the number of ranks do not count as differences. An entry of a single rank is compared with the same
        rank's entry.

        Args:
            a: A snapshot, or a path.
            b: Another snapshot, or a path. `added` lists the entries that only this one has.
            values: Also read tensors that differ and have equal shapes, and report by how much they differ.
            select: Globs over `<key>/<logical path>` to compare; all by default.
            exclude: Globs to leave out.
            rename: Names in `a` -> names in `b`: a dict of paths, or a function. An empty name removes a level.
            memory_budget_bytes: Host memory for read buffers.
            progress: True for a progress bar, or a function that is called with `Progress`.
            ranks: Share the work with all ranks of `pg`, which all call. By default this process works alone.

        Raises:
            CorruptSnapshotError: Bytes that were read do not match their digests.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> a = Snapshot.take("memory://docs/a", {"model": StateDict(w=torch.zeros(3), b=torch.zeros(1))})
        >>> b = Snapshot.take("memory://docs/b", {"model": StateDict(w=torch.ones(3), b=torch.zeros(1))})
        >>> print(Snapshot.diff(a, b, values=True))
        1 changed, 1 the same; 1 entry had to be read: 24 B
          ~ model/w: 3 of 3 differ, at most by 1, norm 1.73205
        """
        from snapshot.transform.diff import compare_snapshots  # training jobs do not pay for this import

        sides = [Snapshot.of(a), Snapshot.of(b)]
        places = [each.location for each in sides]
        with operation(
            "diff", places[1].url, pg=sides[0].pg, ranks=ranks, budget=memory_budget_bytes, progress=progress
        ) as op:
            return compare_snapshots(op, places, values=values, select=select, exclude=exclude, rename=rename)

    # Convert

    @of_object
    def convert(
        self,
        target: str | os.PathLike[str] | Target,
        *,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        map: TensorMap | None = None,
        dtype: torch.dtype | None = None,
        verify: bool = True,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> ConvertReport:
        """Convert this checkpoint to another format, within the memory budget.

        Args:
            target: The destination: a path whose suffix tells the format, or a `Target` with its format and options.
            select: Globs over `<key>/<logical path>` to convert; all by default.
            exclude: Globs to leave out.
            rename: Names here -> names there: a dict of paths, or a function.
            map: Recipes that turn the tensors into others: other names, splits, stacks and transpositions. The result
                has the state of one rank. All other arguments refer to the new names.
            dtype: Cast floating-point tensors to this dtype.
            verify: Verify every digest, and the checksums of other libraries' formats.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a progress bar, or a function that is called with `Progress`.
            ranks: Share the work with all ranks of `pg`, which all call. By default this process works alone.

        Raises:
            SnapshotExistsError: The destination exists; nothing was written.
            RestoreError: The map or a new name does not fit; nothing was written.
            UnsupportedFormatError: The format cannot hold a tensor; nothing was written.
            UnsafeObjectError: An object is a pickle of more than plain values; exclude it.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict, Target
        >>> snapshot = Snapshot.take("memory://docs/convert", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.convert("memory://docs/model.safetensors").tensors
        1
        >>> snapshot.convert(Target("memory://docs/of-dcp", "dcp")).format
        'dcp'
        """
        from snapshot.transform.convert import convert_checkpoint
        from snapshot.transform.target import Selection, Target  # training jobs do not pay for these imports

        made = Target.of(target)
        choice = Selection(select, exclude, rename, dtype, verify, self.allow_pickle, map)
        with operation(
            "convert", made.place.url, pg=self.pg, ranks=ranks, budget=memory_budget_bytes, progress=progress
        ) as op:
            return convert_checkpoint(op, self.location, made, choice)

    @of_object
    def copy(
        self,
        target: str | os.PathLike[str] | Target,
        *,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        verify: bool = True,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> CopyReport:
        """Copy this checkpoint to another storage or path.

        A whole snapshot is copied byte for byte, and keeps its time, version and metadata; only its file names
        change. A selection, and a copy that is compressed, become a new snapshot with the current time. A checkpoint
        of another library is copied file by file, without unrelated files of its folder.

        Args:
            target: The destination: a path, or a `Target` with options. It is a folder, or a file if the source is a
                single file of another library. By default, files are copied as they are stored, compressed or not.
            select: Globs over `<key>/<logical path>` to copy; all by default.
            exclude: Globs to leave out.
            verify: Verify every digest during the copy, and the checksums of other libraries' formats.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a progress bar, or a function that is called with `Progress`.
            ranks: Share the work with all ranks of `pg`, which all call. By default this process works alone.

        Raises:
            SnapshotExistsError: The destination exists; nothing was written.
            CorruptSnapshotError: The source is damaged; nothing was committed, and the partial copy was deleted.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/here", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.copy("memory://docs/there").checked
        'digests'
        """
        from snapshot.transform.copy import copy_checkpoint
        from snapshot.transform.target import Selection, Target  # training jobs do not pay for these imports

        made = Target.of(target)
        choice = Selection(select, exclude, verify=verify, allow_pickle=self.allow_pickle)
        with operation(
            "copy", made.place.url, pg=self.pg, ranks=ranks, budget=memory_budget_bytes, progress=progress
        ) as op:
            return copy_checkpoint(op, self.location, made, choice)

    # Delete

    @of_object
    def delete(self) -> None:
        """Delete the snapshot and the leftovers of interrupted takes; other files in the folder are not touched.

        The manifest is deleted first, so an interrupted deletion leaves no partial snapshot.
        """
        from snapshot.runs.facts import delete_checkpoint

        self._use(delete_checkpoint)
        self._manifest.forget()
        emit("deleted", "delete", str(self._url))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._url)!r})"


def _with_map(opened: Opened, tensor_map: TensorMap | None) -> Opened:
    """Return a checkpoint with mapped tensors, as the state of a single rank, if there is a map."""
    if tensor_map is None:
        return opened
    from snapshot.loading.mapping import map_checkpoint

    return map_checkpoint(opened, tensor_map)
