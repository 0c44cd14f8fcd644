"""What stands at a URL, whoever wrote it: read, listed, verified, compared, converted, copied, removed.

Nothing here needs ranks, or an application; `Snapshot` adds both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from snapshot.distributed.group import ranks_of
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
)
from snapshot.events import emit
from snapshot.formats.safetensors import SHARD
from snapshot.load.open import checkpoint_exists, is_foreign, open_document, read_from
from snapshot.load.read_object import read_object, read_state_dict
from snapshot.manifest.document import Document, copy_manifest
from snapshot.manifest.entry import Entry
from snapshot.metadata import SnapshotMetadata
from snapshot.plan.renaming import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import ConvertReport, CopyReport, Diff, VerifyReport
from snapshot.runtime.loop import refuse_on_loop, run
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.url import URL
from snapshot.verbs.verification import verify_files

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Checkpoint:
    """What stands at a URL. Its users know it as a part of `Snapshot`."""

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

    # Look

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
            path: Its name in the manifest, `"0/model/layer.0.weight"`; or without the rank, `"model/layer.0.weight"`,
                unless several ranks have an object of that name each for itself.
            obj_out: A tensor or an array of its shape, which is filled and returned; of a DTensor or ShardedTensor
                what this rank holds. A dataclass's instance or a wrapped tensor is filled field by field, and a member
                of an Enum tells its class. Ignored for what cannot be filled.
            memory_budget_bytes: Host memory for what cannot be read in place; by default 64 MiB from
                files, 256 MiB elsewhere.
            box: A slice for each dimension (trailing ones may be left out): only that part is read. An int is a
                slice of one that drops its dimension.
            verify: Check the digests of what is read.

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
                session, document, path, obj_out, box, verify=verify, allow_pickle=self._allow_pickle
            ),
        )

    def get_state_dict_for_key(self, key: str, replicate_from_rank0: bool = False) -> Any:
        """Return the state dict that this rank saved under a key of the app state, made anew; with
        `replicate_from_rank0` that of rank 0. Weights that were tied are tied again, tensors that were sharded are
        whole."""
        number = 0 if replicate_from_rank0 else ranks_of(self.pg).rank

        return self._read(
            None,
            lambda session, document: read_state_dict(session, document, key, number, allow_pickle=self._allow_pickle),
        )

    def get_manifest(self) -> dict[str, Entry]:
        """Return what is in the snapshot: an entry for each object, by `"<rank>/<logical path>"`. A copy, yours to
        change."""
        return copy_manifest(self._open().manifest)

    @property
    def metadata(self) -> SnapshotMetadata:
        """When, by which version, and with which metadata of your own the snapshot was taken."""
        return SnapshotMetadata.of(self._open())

    def exists(self) -> bool:
        """Whether a committed snapshot is here, or a checkpoint of another library that can be opened; only that, not
        whether it is whole."""
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
        """Read every byte, and compare it with its digest. Live tensors are not involved.

        Args:
            quick: Only look whether the files are there, and as long as they were; and at the manifest itself.
            resume: A local file in which it is noted how far the verification has come. One that was interrupted goes
                on there if it is given the same file again, which is removed when all is well. It is of one snapshot.
            memory_budget_bytes: Host memory for what is read; by default 64 MiB from files, 256 MiB elsewhere.
            progress: True for a bar, or a function that is called with `Progress`.

        Raises:
            CorruptSnapshotError: The manifest itself is damaged. All other faults are in the report.
            ValueError: `resume` is a file of something else.

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
        """Return what differs between two snapshots: nothing, if a restore of either gives the same.

        Two of ours are compared by the digests in their manifests, and no data is read, where their tensors are cut
        alike. Else, and where one is another library's, what has to be is read, part by part. However tensors are cut
        or sharded, and over how many ranks, is no difference. What belongs to one rank alone is compared with what
        that rank has in the other.

        Args:
            a: A snapshot, or a path.
            b: Another one. `added` is what only this one has.
            values: Also read the tensors that differ, if they are of one shape, to say by how much.
            select: Globs over `<key>/<logical path>` of what is compared; all by default.
            exclude: Globs of what is not.
            rename: Names in `a` -> names in `b`: a dict of paths, or a function; an empty name takes a level away.
            memory_budget_bytes: Host memory for what has to be read.
            progress: True for a bar, or a function that is called with `Progress`.

        Raises:
            CorruptSnapshotError: What was read is not what was written.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> a = Snapshot.take("memory://docs/a", {"model": StateDict(w=torch.zeros(3), b=torch.zeros(1))})
        >>> b = Snapshot.take("memory://docs/b", {"model": StateDict(w=torch.ones(3), b=torch.zeros(1))})
        >>> print(Snapshot.diff(a, b, values=True))
        1 changed, 1 the same; 1 entry had to be read: 24 B
          ~ model/w: 3 of 3 differ, at most by 1, norm 1.73205
        """
        from snapshot.verbs.comparison import compare_snapshots  # who only trains need not wait for it

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
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/convert", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.convert("memory://docs/model.safetensors", "safetensors").tensors
        1
        """
        from snapshot.verbs.conversion import convert_checkpoint
        from snapshot.verbs.to_snapshot import Selection  # who only trains need not wait for it

        refuse_on_loop()
        choice = Selection(select, exclude, rename, dtype, verify, self._allow_pickle)
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
        """Write what is here once more, elsewhere: as it is, from any storage to any other. One process does it, also
        where several ranks run.

        A whole snapshot passes byte for byte, and keeps its time, version and metadata; only its files have other
        names. A part of one is written anew, and is a snapshot of now. A checkpoint of another library is copied file
        by file: those that it consists of, and no others that lie beside them.

        Args:
            url: Where to; a file, where what is here is a single file of another library.
            select: Globs over `<key>/<logical path>` of what is wanted; all by default.
            exclude: Globs of what is not.
            overwrite: Replace what is there. A snapshot stays whole until the new one is.
            durable: Return only when it survives a loss of power.
            verify: Compare every byte with its digest as it passes, and the checksums that others' formats carry.
            storage_options: What the storage plugin of `url` should know.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a bar, or a function that is called with `Progress`.

        Raises:
            SnapshotExistsError: Something is there already; nothing was written.
            CorruptSnapshotError: What is here is damaged; nothing was committed, and nothing is left of the copy.

        >>> import torch
        >>> from snapshot import Snapshot, StateDict
        >>> snapshot = Snapshot.take("memory://docs/here", {"model": StateDict(weight=torch.zeros(3))})
        >>> snapshot.copy("memory://docs/there").checked
        'digests'
        """
        from snapshot.verbs.copy import copy_checkpoint
        from snapshot.verbs.to_snapshot import Selection  # who only trains need not wait for it

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

    # Remove

    def delete(self) -> None:
        """Remove the snapshot: the manifest first, so that what an interruption leaves is no snapshot. Also removes
        what interrupted takes left here; nothing else in the folder is touched."""
        session = self.new_session(None)

        try:
            run(cleanup.delete_snapshot(session.storage))
        except (SnapshotNotFoundError, StorageError) as error:
            foreign = False
            with suppress(SnapshotError):
                foreign = run(is_foreign(session))
            if not foreign and getattr(error, "errno", None) == errno.ENOTDIR:
                raise SnapshotNotFoundError(f"{self._url}: there is no snapshot to delete") from error
            if not foreign:
                raise
            raise SnapshotExistsError(
                f"{self._url}: was written by another library; it is only read, never replaced or deleted: remove it "
                "yourself"
            ) from error
        finally:
            run(session.close())
        self._document = None
        emit("deleted", "delete", str(self._url))

    def new_session(self, budget: int | None) -> Session:
        """Open a session at the URL; the caller closes it."""
        return Session(self._url, self._options, budget=budget)

    def _open(self) -> Document:
        """Return the manifest. A snapshot never changes, so it is read once; `restore` reads it anew."""
        if self._document is None:
            session = self.new_session(None)
            try:
                self._document = run(open_document(session))
            finally:
                run(session.close())
        return self._document

    def _read(self, budget: int | None, read: Callable[[Session, Document], Any]) -> Any:
        """Read by the manifest that is known; if the snapshot was replaced since, by the new one."""
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
