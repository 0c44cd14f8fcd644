"""Operations on one checkpoint of any format: read, list, verify, compare, convert, copy, delete.

They need no ranks and no application; `Snapshot` adds both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snapshot.distributed.exchange import call_of
from snapshot.distributed.group import ranks_of
from snapshot.events import emit
from snapshot.formats.hugging_face import SHARD
from snapshot.io.loop import refuse_on_loop, run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.mapping import map_document
from snapshot.loading.open import checkpoint_exists
from snapshot.loading.read_object import read_object, read_state_dict
from snapshot.manifest.document import SnapshotMetadata, copy_manifest
from snapshot.manifest.values import Entry
from snapshot.maps.tensor_map import TensorMap
from snapshot.opened import OpenedCheckpoint, of_object
from snapshot.plan.names import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import ConvertReport, CopyReport, Diff, VerifyReport
from snapshot.signing.keys import Key, load_signer
from snapshot.signing.seal import Recorder
from snapshot.tiers.deletion import delete_checkpoint
from snapshot.transform.verify import sign_files, verify_checkpoint

if TYPE_CHECKING:
    import torch

    from snapshot.save.take_options import Compression


class Checkpoint(OpenedCheckpoint):
    """A checkpoint at a URL, written by this library or by another one. `Snapshot` is its public subclass."""

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

    @of_object
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

    @of_object
    def get_manifest(self) -> dict[str, Entry]:
        """Return a copy of the manifest: an entry for each object, by `"<rank>/<logical path>"`."""
        return copy_manifest(self._open().manifest)

    @property
    def metadata(self) -> SnapshotMetadata:
        """Time, library version and user metadata of the snapshot."""
        return SnapshotMetadata.of(self._open())

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
            memory_budget_bytes: Host memory for read buffers. The default is 64 MiB for files and 256 MiB for other
                storages.
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
        with call_of("verify", self.pg, ranks=ranks) as exchange:
            session = self.new_session(memory_budget_bytes)
            return verify_checkpoint(session, Meter("verify", progress), exchange=exchange, quick=quick, resume=resume)

    @of_object
    def sign(
        self, key: Key, *, memory_budget_bytes: int | None = None, progress: ProgressArgument = None
    ) -> VerifyReport:
        """Sign the committed snapshot. Every byte is read once, compared with its digest, and hashed with SHA-256.

        A snapshot has one signature: signing it again replaces it. See docs/signatures.md.

        Args:
            key: An Ed25519 private key: the path of a PEM file, or a key object of the package `cryptography`.
            memory_budget_bytes: Host memory for read buffers.
            progress: True for a progress bar, or a function that is called with `Progress`.

        Raises:
            CorruptSnapshotError: A byte does not match its digest; nothing was signed.
            MissingExtraError: cryptography is not installed.
        """
        signer = load_signer(key, "key", private=True)
        recorder = Recorder()
        session = Session(self._url, self._options, budget=memory_budget_bytes, seal=recorder)
        meter = Meter("sign", progress)
        try:
            report = sign_files(session, recorder, signer, meter)
        finally:
            run(session.close())
            meter.close()
        emit("signed", "sign", str(self._url), key=report.signer, bytes=report.bytes_read)
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

        refuse_on_loop()
        sides = [each if isinstance(each, Checkpoint) else Checkpoint(each) for each in (a, b)]
        with call_of("diff", sides[0].pg, ranks=ranks) as exchange:
            return compare_snapshots(
                [each.new_session for each in sides],
                values=values,
                select=select,
                exclude=exclude,
                rename=rename,
                budget=memory_budget_bytes,
                meter=Meter("diff", progress),
                exchange=exchange,
            )

    # Convert

    @of_object
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
        compression: Compression | None = None,
        overwrite: bool = False,
        durable: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> ConvertReport:
        """Convert this checkpoint to another format, within the memory budget.

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
            compression: `"zstd"`: compress the data files, for `to="snapshot"`. See docs/compression.md.
            overwrite: Replace an existing checkpoint.
            durable: Return only when the result survives a loss of power.
            verify: Verify every digest, and the checksums of other libraries' formats.
            storage_options: Options for the storage plugin of `url`.
            memory_budget_bytes: Host memory: half of it for reading, half for writing.
            progress: True for a progress bar, or a function that is called with `Progress`.
            ranks: Share the work with all ranks of `pg`, which all call. By default this process works alone.

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
        from snapshot.transform.convert import convert_checkpoint
        from snapshot.transform.to_snapshot import Selection  # training jobs do not pay for this import

        refuse_on_loop()
        choice = Selection(select, exclude, rename, dtype, verify, self._allow_pickle, map, compression)
        with call_of("convert", self.pg, ranks=ranks) as exchange:
            return convert_checkpoint(
                self._url,
                self._options,
                URL.parse(os.fspath(url)),
                storage_options,
                seal=self.seal,
                to=to,
                choice=choice,
                meter=Meter("convert", progress),
                shard_bytes=shard_bytes,
                overwrite=overwrite,
                durable=durable,
                budget=memory_budget_bytes,
                exchange=exchange,
            )

    @of_object
    def copy(
        self,
        url: str | os.PathLike[str],
        select: Sequence[str] = (),
        *,
        exclude: Sequence[str] = (),
        compression: Compression | None = None,
        overwrite: bool = False,
        durable: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        progress: ProgressArgument = None,
        ranks: bool = False,
    ) -> CopyReport:
        """Copy this checkpoint to another storage or path.

        A whole snapshot is copied byte for byte, and keeps its time, version and metadata; only its file names
        change. A selection, and a copy that is compressed, become a new snapshot with the current time. A checkpoint
        of another library is copied file by file, without unrelated files of its folder.

        Args:
            url: The destination: a folder, or a file if the source is a single file of another library.
            select: Globs over `<key>/<logical path>` to copy; all by default.
            exclude: Globs to leave out.
            compression: `"zstd"`: compress the data files. By default they are copied as they are stored.
            overwrite: Replace an existing checkpoint. An existing snapshot stays whole until the new one is committed.
            durable: Return only when the copy survives a loss of power.
            verify: Verify every digest during the copy, and the checksums of other libraries' formats.
            storage_options: Options for the storage plugin of `url`.
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
        from snapshot.transform.to_snapshot import Selection  # training jobs do not pay for this import

        refuse_on_loop()
        choice = Selection(select, exclude, verify=verify, allow_pickle=self._allow_pickle, compression=compression)
        with call_of("copy", self.pg, ranks=ranks) as exchange:
            return copy_checkpoint(
                self._url,
                self._options,
                URL.parse(os.fspath(url)),
                storage_options,
                seal=self.seal,
                choice=choice,
                meter=Meter("copy", progress),
                overwrite=overwrite,
                durable=durable,
                budget=memory_budget_bytes,
                exchange=exchange,
            )

    # Delete

    @of_object
    def delete(self) -> None:
        """Delete the snapshot and the leftovers of interrupted takes; other files in the folder are not touched.

        The manifest is deleted first, so an interrupted deletion leaves no partial snapshot.
        """
        self._use(delete_checkpoint)
        self._document = None
        emit("deleted", "delete", str(self._url))
