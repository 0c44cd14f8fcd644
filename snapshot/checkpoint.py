"""Operations on one checkpoint of any format: read, list, verify, compare, convert, copy, delete.

They need no ranks and no application; `Snapshot` adds both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snapshot.distributed.group import ranks_of
from snapshot.errors import (
    CorruptSnapshotError,
)
from snapshot.events import emit
from snapshot.formats.safetensors import SHARD
from snapshot.loading.mapping import map_document
from snapshot.loading.open import checkpoint_exists, open_document, read_from
from snapshot.loading.read_object import read_object, read_state_dict
from snapshot.manifest.document import Document, copy_manifest
from snapshot.manifest.entry import Entry
from snapshot.maps.tensor_map import TensorMap
from snapshot.metadata import SnapshotMetadata
from snapshot.plan.renaming import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import ConvertReport, CopyReport, Diff, VerifyReport
from snapshot.runtime.loop import refuse_on_loop, run
from snapshot.runtime.session import Session
from snapshot.tiers.deletion import delete_checkpoint
from snapshot.url import URL
from snapshot.verbs.verification import verify_files

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Checkpoint:
    """A checkpoint at a URL, written by this library or by another one. `Snapshot` is its public subclass."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.pg = pg
        self._url = URL.parse(self.path)
        self._options = dict(storage_options or {})
        self._allow_pickle = allow_pickle
        self._document: Document | None = None

    def source(self) -> tuple[URL, Mapping[str, Any]]:
        """Return the URL and the storage options, for a take that is based on this snapshot."""
        return self._url, self._options

    # Inspect

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
                MiB for files and 256 MiB for other storages.
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
        return self._read(
            memory_budget_bytes,
            lambda session, document: read_object(
                session,
                map_document(session, document, map),
                path,
                obj_out,
                box,
                verify=verify,
                allow_pickle=self._allow_pickle,
            ),
        )

    def get_state_dict_for_key(
        self, key: str, replicate_from_rank0: bool = False, *, map: TensorMap | None = None
    ) -> Any:
        """Return the state dict that this rank saved under a key of the app state, as new objects.

        Tied weights are tied again, and sharded tensors are whole. With `replicate_from_rank0`, return the state dict
        of rank 0. With `map`, return the tensors that its recipes make.
        """
        number = 0 if replicate_from_rank0 else ranks_of(self.pg).rank

        return self._read(
            None,
            lambda session, document: read_state_dict(
                session, map_document(session, document, map), key, number, allow_pickle=self._allow_pickle
            ),
        )

    def get_manifest(self) -> dict[str, Entry]:
        """Return a copy of the manifest: an entry for each object, by `"<rank>/<logical path>"`."""
        return copy_manifest(self._open().manifest)

    @property
    def metadata(self) -> SnapshotMetadata:
        """Time, library version and user metadata of the snapshot."""
        return SnapshotMetadata.of(self._open())

    def exists(self) -> bool:
        """Return True if a committed snapshot is here, or a readable checkpoint of another library.

        This does not verify the data files.
        """
        session = self.new_session(None)
        try:
            return run(checkpoint_exists(session))
        finally:
            run(session.close())

    def verify(
        self,
        *,
        quick: bool = False,
        resume: str | os.PathLike[str] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
    ) -> VerifyReport:
        """Read every byte and compare it with its digest. Live tensors are not used.

        Args:
            quick: Check only the manifest, and the presence and size of each file.
            resume: A local journal file. An interrupted verification continues where it stopped if it gets the same
                file again. A verification without faults deletes the file. Each journal belongs to one snapshot.
            memory_budget_bytes: Host memory for read buffers. The default is 64 MiB for files and 256 MiB for other
                storages.
            progress: True for a progress bar, or a function that is called with `Progress`.

        Raises:
            CorruptSnapshotError: The manifest is damaged. All other faults are in the report.
            ValueError: `resume` is not a journal of this snapshot.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/verify", {"state": StateDict(weight=torch.zeros(3))})
        >>> bool(snapshot.verify())
        True
        """
        session = self.new_session(memory_budget_bytes)
        meter = Meter("verify", progress)
        try:
            report = run(verify_files(session, meter, quick=quick, resume=resume))
        finally:
            run(session.close())
            meter.close()
        emit("verified", "verify", str(self._url), ok=report.ok, bytes=report.bytes_read)
        return report

    @staticmethod
    def diff(
        a: Checkpoint | str | os.PathLike[str],
        b: Checkpoint | str | os.PathLike[str],
        *,
        values: bool = False,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
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
        from snapshot.verbs.comparison import compare_snapshots  # training jobs do not pay for this import

        refuse_on_loop()
        sides = [each if isinstance(each, Checkpoint) else Checkpoint(each) for each in (a, b)]
        return compare_snapshots(
            [each.new_session for each in sides],
            values=values,
            select=select,
            exclude=exclude,
            rename=rename,
            budget=memory_budget_bytes,
            meter=Meter("diff", progress),
        )

    # Convert

    def convert(
        self,
        url: str | os.PathLike[str],
        to: str = "snapshot",
        *,
        select: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        map: TensorMap | None = None,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD,
        overwrite: bool = False,
        durable: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
    ) -> ConvertReport:
        """Convert this checkpoint to another format, within the memory budget.

        One process converts, even if several ranks run.

        Args:
            url: The destination: a folder. For `"torch"`, and for a name ending in `.safetensors`, a file.
            to: `"snapshot"`; `"safetensors"`: one file, or a folder as Hugging Face has it; `"torch"`: a file as
                torch.save writes it; `"dcp"`: a folder that `torch.distributed.checkpoint.load` reads.
            select: Globs over `<key>/<logical path>` to convert; all by default.
            exclude: Globs to leave out.
            rename: Names here -> names there: a dict of paths, or a function.
            map: Recipes that turn the tensors into others: other names, splits, stacks and transpositions. The result
                has the state of one rank. All other arguments refer to the new names.
            dtype: Cast floating-point tensors to this dtype.
            shard_bytes: The maximum size of each file if there are several.
            overwrite: Replace an existing checkpoint.
            durable: Return only when the result survives a loss of power.
            verify: Verify every digest, and the checksums of other libraries' formats.
            storage_options: Options for the storage plugin of `url`.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a progress bar, or a function that is called with `Progress`.

        Raises:
            SnapshotExistsError: The destination exists; nothing was written.
            RestoreError: The map or a new name does not fit; nothing was written.
            UnsupportedFormatError: The format cannot hold a tensor; nothing was written.
            UnsafeObjectError: An object is a pickle of more than plain values; exclude it.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/convert", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.convert("memory://docs/model.safetensors", "safetensors").tensors
        1
        """
        from snapshot.verbs.conversion import convert_checkpoint
        from snapshot.verbs.to_snapshot import Selection  # training jobs do not pay for this import

        refuse_on_loop()
        choice = Selection(select, exclude, rename, dtype, verify, self._allow_pickle, map)
        return convert_checkpoint(
            self._url,
            self._options,
            URL.parse(os.fspath(url)),
            storage_options,
            to=to,
            choice=choice,
            meter=Meter("convert", progress),
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            durable=durable,
            budget=memory_budget_bytes,
        )

    def copy(
        self,
        url: str | os.PathLike[str],
        select: Sequence[str] = (),
        *,
        exclude: Sequence[str] = (),
        overwrite: bool = False,
        durable: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
    ) -> CopyReport:
        """Copy this checkpoint to another storage or path.

        One process copies, even if several ranks run.

        A whole snapshot is copied byte for byte, and keeps its time, version and metadata; only its file names
        change. A selection becomes a new snapshot with the current time. A checkpoint of another library is copied
        file by file, without unrelated files of its folder.

        Args:
            url: The destination: a folder, or a file if the source is a single file of another library.
            select: Globs over `<key>/<logical path>` to copy; all by default.
            exclude: Globs to leave out.
            overwrite: Replace an existing checkpoint. An existing snapshot stays whole until the new one is committed.
            durable: Return only when the copy survives a loss of power.
            verify: Verify every digest during the copy, and the checksums of other libraries' formats.
            storage_options: Options for the storage plugin of `url`.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a progress bar, or a function that is called with `Progress`.

        Raises:
            SnapshotExistsError: The destination exists; nothing was written.
            CorruptSnapshotError: The source is damaged; nothing was committed, and the partial copy was deleted.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/here", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.copy("memory://docs/there").checked
        'digests'
        """
        from snapshot.verbs.copy import copy_checkpoint
        from snapshot.verbs.to_snapshot import Selection  # training jobs do not pay for this import

        refuse_on_loop()
        return copy_checkpoint(
            self._url,
            self._options,
            URL.parse(os.fspath(url)),
            storage_options,
            choice=Selection(select, exclude, verify=verify, allow_pickle=self._allow_pickle),
            meter=Meter("copy", progress),
            overwrite=overwrite,
            durable=durable,
            budget=memory_budget_bytes,
        )

    # Delete

    def delete(self) -> None:
        """Delete the snapshot and the leftovers of interrupted takes; other files in the folder are not touched.

        The manifest is deleted first, so an interrupted deletion leaves no partial snapshot.
        """
        session = self.new_session(None)
        try:
            delete_checkpoint(session)
        finally:
            run(session.close())
        self._document = None
        emit("deleted", "delete", str(self._url))

    def new_session(self, budget: int | None) -> Session:
        """Open a session at the URL. The caller closes it."""
        return Session(self._url, self._options, budget=budget)

    def _open(self) -> Document:
        """Return the manifest. It is read once, since a snapshot never changes; `restore` reads it again."""
        if self._document is None:
            session = self.new_session(None)
            try:
                self._document = run(open_document(session))
            finally:
                run(session.close())
        return self._document

    def _read(self, budget: int | None, read: Callable[[Session, Document], Any]) -> Any:
        """Read with the cached manifest, or with the new one if the snapshot was replaced since."""
        known = self._open()
        session = self.new_session(budget)
        try:
            run(read_from(session, known))
            return read(session, known)
        except CorruptSnapshotError:
            run(session.close())
            session = self.new_session(budget)
            self._document = run(open_document(session))
            if self._document.save_id == known.save_id:
                raise
            return read(session, self._document)
        finally:
            run(session.close())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._url)!r})"
