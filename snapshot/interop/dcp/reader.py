"""`dcp.load` with this library's read engine: verified reads directly into the tensors that the planner names.

DCP sees each tensor as one chunk, regardless of its stored boxes. This library's reader selects the boxes better, and
the plan stays small for any number of writing ranks.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from snapshot.distributed.group import ranks_of
from snapshot.errors import CorruptSnapshotError, RestoreError, SnapshotError
from snapshot.events import emit, log
from snapshot.interop.dcp.names import DcpNames, partial_entry, recall_names
from snapshot.interop.dcp.writer import hide_secrets, rank_folder, storage_knows
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.system import gc_paused
from snapshot.io.url import URL
from snapshot.loading.live import Binding
from snapshot.loading.open import Opened, add_layers, expect_files, open_checkpoint
from snapshot.loading.read_object import expand_trees
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import OWN_FORMATS, Document, check_tensor, check_tree, find_locations
from snapshot.manifest.rank_view import make_rank_view, suggest_names
from snapshot.progress import Meter
from snapshot.reports import RestoreIssues
from snapshot.state.flatten import inflate_tree
from snapshot.tensors.geometry import Box, is_inside
from snapshot.tensors.memory import BY_NAME

VERB = "dcp.load"
HIDES_ERRORS = (2, 9) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
"""True if `dcp.load` hides an error of `read_metadata`, and raises an AssertionError instead."""


@dataclass
class _Opened:
    """A snapshot as this rank sees it."""

    url: URL
    document: Document
    entries: dict[str, Any]
    """Entries under paths without a rank."""
    names: DcpNames
    tensors: dict[str, Any]
    """Entries of the tensor items, by name."""


class SnapshotReader(StorageReader):
    """Storage reader for `torch.distributed.checkpoint`: reads what `SnapshotWriter` or `Snapshot.take` wrote.

    A snapshot of `Snapshot.take` has the names that DCP gives the same nested state dicts, limited to the entries that
    the calling rank has. The reader is plain configuration, and can be pickled.

    Args:
        path: A URL, or a path of the file system. Optional if each load passes a `checkpoint_id`.
        storage_options: Options for the storage plugin.
        verify: Compare every byte with its digest.
        allow_pickle: Read objects that were stored as pickles and that torch's `weights_only` refuses. A pickle can run
            any code: use it only for snapshots from a trusted source.
        memory_budget_bytes: Host memory for data that cannot be read in place, as for `Snapshot.restore`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        memory_budget_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.storage_options = dict(storage_options or {})
        self.verify = verify
        self.allow_pickle = allow_pickle
        self.memory_budget_bytes = memory_budget_bytes
        self.load_id = str(uuid.uuid4())
        """Id of the next, current or last load."""
        self._opened: _Opened | None = None
        self._hidden = ""
        """Error of the last `read_metadata` without a rank."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    # Methods that DCP calls, in this order

    @property
    def checkpoint_id(self) -> str | None:
        """Path of the next load, without passwords."""
        return hide_secrets(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if there is a storage plugin for this URL or path."""
        return storage_knows(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self._opened = None
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata of the snapshot; with `rank`, of the one that this rank saved without collectives."""
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(rank)
        except Exception as error:
            if rank is None:
                self._hidden = str(error)
            elif HIDES_ERRORS and self._hidden:  # dcp.load has tried both
                log.warning("SnapshotReader: %s", self._hidden)
            raise

    def _read_metadata(self, rank: int | None) -> Metadata:
        url = self._url() if rank is None else self._url().join(rank_folder(rank))
        with self._session(url) as session, gc_paused():
            found = run(open_checkpoint(session))
            document = found.document
            expand_trees(found, document.manifest)
            self._opened = opened = _opened(url, document)
            meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=document.save_id, load_id=self.load_id)
            return Metadata(_described(opened), opened.names.planner_data, None, meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._opened is None:  # another reader read the metadata
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._known()
        return dataclasses.replace(plan, storage_data=(str(opened.url), opened.document.save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise if the ranks opened different snapshots at one path. Called on the coordinator."""
        found = {plan.storage_data for plan in plans if isinstance(plan.storage_data, tuple)}
        if len({where for where, _ in found}) < len(found):
            raise SnapshotError(f"{self._url()}: replaced while the ranks opened it; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read objects first, then tensors. Called on each rank."""
        opened = self._known()
        session = self._session(opened.url)
        meter = Meter(VERB, None)
        try:
            load = _Load(
                add_layers(session, opened.document),
                opened,
                planner,
                self.verify,
                allow_pickle=self.allow_pickle,
                meter=meter,
            )
            load.read(plan.items)
        except BaseException as error:
            emit("failed", VERB, str(opened.url), error=error)
            raise
        finally:
            run(session.close())
            meter.close()
        emit("restored", VERB, str(opened.url), bytes=load.bytes_read)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # Implementation

    def _url(self) -> URL:
        if self.path is None:
            raise ValueError("no path; pass one to SnapshotReader, or a checkpoint_id to dcp.load")
        return URL.parse(self.path)

    def _session(self, url: URL) -> Session:
        return Session(url, self.storage_options, budget=self.memory_budget_bytes)

    def _known(self) -> _Opened:
        if self._opened is None:
            raise SnapshotError("no snapshot is open; read_metadata must be called first")
        return self._opened

    def __repr__(self) -> str:
        return f"SnapshotReader({hide_secrets(self.path)!r})"


def _opened(url: URL, document: Document) -> _Opened:
    """Return the calling rank's view: its own entries and those of all ranks."""
    ranks = ranks_of(None)
    view = make_rank_view(document.manifest, ranks.rank, document.world_size, ranks.world)
    entries = {**view.entries, **view.elsewhere}
    names = recall_names(document.metadata, entries, url)
    tensors = {}
    for name, path in names.paths.items():
        if name in names.partial:
            try:
                tensors[name] = partial_entry(path, names.partial[name], entries)
            except KeyError as error:
                raise CorruptSnapshotError(f"{url}: {path} lacks {error}") from error
        elif path in entries:
            if entries[path].is_tensor:
                tensors[name] = entries[path]
        else:
            raise CorruptSnapshotError(f"{url}: the metadata map {name!r} to {path!r}, which is missing")
    return _Opened(url, document, entries, names, tensors)


def _described(opened: _Opened) -> dict[str, Any]:
    """Return DCP's description of the items, for its planners."""
    found: dict[str, Any] = {}
    origins: dict[int, torch.Size] = {}
    document = opened.document
    most = sum(file.size for file in document.files.values()) if document.format in OWN_FORMATS else None
    for name in opened.names.paths:
        entry = opened.tensors.get(name)
        if entry is None:
            found[name] = BytesStorageMetadata()
            continue
        dtype = BY_NAME.get(entry.dtype)
        if dtype is None:
            raise SnapshotError(f"{name}: unknown dtype {entry.dtype!r} in this version of torch")
        size = torch.Size(entry.shape)
        held = most is None or name in opened.names.partial or math.prod(size) * dtype.itemsize <= most
        if min(size, default=0) < 0 or not held:  # some planners allocate tensors of the described shape
            raise CorruptSnapshotError(f"{name}: {entry.dtype}{list(size)} is larger than the stored files")
        if name in opened.names.partial:
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in entry.pieces()]
        else:
            origin = origins.setdefault(len(size), torch.Size([0] * len(size)))
            chunks = [ChunkStorageMetadata(origin, size)]
        found[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return found


class _Load:
    """Reads of one rank."""

    def __init__(
        self,
        files: Opened,
        opened: _Opened,
        planner: LoadPlanner,
        verify: bool,
        *,
        allow_pickle: bool,
        meter: Meter,
    ) -> None:
        self._files = files
        self._opened = opened
        self._planner = planner
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._meter = meter
        self._checked: set[str] = set()
        self.bytes_read = 0

    def read(self, items: Sequence[ReadItem]) -> None:
        """Read all items. Raise for missing items and files before any tensor is written to."""
        objects = [item for item in items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in items if item.type is not LoadItemType.BYTE_IO]
        self._expect_files(items)
        held = self._objects(objects)
        for some in self._portions(tensors):
            self._tensors(some)
        for item, data in held:
            self._planner.load_bytes(item, data)

    def _path(self, item: ReadItem) -> str:
        name = item.storage_index.fqn
        path = self._opened.names.paths.get(name)
        if path is None:
            known = self._opened.names.paths
            raise RestoreError(f"{self._opened.url}: no item {name!r}; {suggest_names(name, known)}", [name])
        return path

    def _expect_files(self, items: Iterable[ReadItem]) -> None:
        """Raise if a required file is missing or short."""
        entries: dict[str, Any] = {}
        for item in items:
            path = self._path(item)
            entry = self._opened.tensors.get(item.storage_index.fqn)
            entries |= self._tree(path) if entry is None else {path: entry}
        run(expect_files(self._files, find_locations(entries, self._opened.document.files)))

    def _tree(self, path: str) -> dict[str, Any]:
        """Return the entry of an object, and those below it."""
        every, entry = self._opened.entries, self._opened.entries[path]
        found = {path: entry}
        for name in entry.components():
            below = f"{path}/{name}"
            if below not in every:
                raise CorruptSnapshotError(f"{self._opened.url}: {path} refers to {name}, which is missing")
            found |= self._tree(below)
        return found

    # Objects

    def _objects(self, items: Sequence[ReadItem]) -> list[tuple[ReadItem, io.BytesIO]]:
        """Return each object as bytes that `torch.load` reads. Objects that were stored typed are pickled for that."""
        read_plan = ReadPlan(self._opened.document.files, allow_pickle=self._allow_pickle)
        trees = {}
        for item in items:
            path = self._path(item)
            if path not in trees:
                trees[path] = tree = self._tree(path)
                check_tree(path, tree)
                Binding({}, {}, RestoreIssues(), exact=False).bind(tree)  # to the allowed classes
                for below, entry in tree.items():
                    if not entry.is_container:
                        read_plan.new(below, entry)
        self.bytes_read += read_plan.execute(self._files, verify=self._verify, meter=self._meter).bytes_read
        return [(item, self._bytes(item, trees, read_plan.values)) for item in items]

    def _bytes(self, item: ReadItem, trees: dict[str, Any], values: dict[str, Any]) -> io.BytesIO:
        path = self._path(item)
        value = inflate_tree(path, trees[path], values)
        if item.storage_index.fqn in self._opened.names.raw:
            return io.BytesIO(value)
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data

    # Tensors

    def _portions(self, items: Sequence[ReadItem]) -> Iterator[list[tuple[ReadItem, torch.Tensor]]]:
        """Yield all tensors at once, or portions within the budget if the planner may create them on request.

        A portion has at most one read into the same memory, so that the later one wins, as with torch.
        """
        plain = _is_plain(self._planner)
        budget = self._files.budget.limit
        chosen: list[tuple[ReadItem, torch.Tensor]] = []
        places: set[int] = set()
        size = 0
        for item in items:
            target = self._planner.resolve_tensor(item).detach()
            place = target.data_ptr() if target.device.type != "meta" else 0
            if chosen and ((place and place in places) or (not plain and size + target.nbytes > budget)):
                yield chosen
                chosen, places, size = [], set(), 0
            chosen.append((item, target))
            places.add(place)
            size += target.nbytes
        yield chosen

    def _tensors(self, chosen: Sequence[tuple[ReadItem, torch.Tensor]]) -> None:
        with gc_paused():
            read_plan = self._wanted(chosen)
        self.bytes_read += read_plan.execute(self._files, verify=self._verify, meter=self._meter).bytes_read
        for item, target in chosen:
            self._planner.commit_tensor(item, target)

    def _wanted(self, chosen: Sequence[tuple[ReadItem, torch.Tensor]]) -> ReadPlan:
        opened = self._opened
        files = opened.document.files
        read_plan = ReadPlan(files, allow_pickle=self._allow_pickle)
        equal = self._request_equal(read_plan, chosen)
        for number, (item, target) in enumerate(chosen):
            if number in equal:
                continue
            name = item.storage_index.fqn
            path, entry = self._path(item), opened.tensors.get(name)
            if entry is None:
                raise RestoreError(f"{path}: not a tensor in the snapshot, but one in the application", [path])
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            if tuple(target.shape) != sizes:
                raise RestoreError(f"{path}: target must have shape {list(sizes)}, got {list(target.shape)}", [path])
            partial = name in opened.names.partial
            if path not in self._checked:
                check_tensor(path, entry, files, partial=partial)
                self._checked.add(path)
            box = _box(item.storage_index, offsets, sizes, partial=partial)
            if not is_inside(box, entry.shape):
                raise RestoreError(f"{path}: {box} is not within shape {list(entry.shape)}", [path])
            if sizes == entry.shape:
                read_plan.into(path, entry, target, live=True)
            else:
                read_plan.into_box(path, entry, box, target, live=True)
        return read_plan

    def _request_equal(self, read_plan: ReadPlan, chosen: Sequence[tuple[ReadItem, torch.Tensor]]) -> set[int]:
        """Request whole tensors that are read straight into plain ones, and return their positions."""
        found = [
            (number, self._path(item), entry, target)
            for number, (item, target) in enumerate(chosen)
            if type(entry := self._opened.tensors.get(item.storage_index.fqn)) is e.TensorEntry
            and type(target) is torch.Tensor
            and tuple(item.lengths) == entry.shape
        ]
        if not found:
            return set()
        numbers, paths, entries, tensors = zip(*found, strict=True)
        return {numbers[at] for at in read_plan.request_equal(paths, entries, tensors)}


def _box(index: MetadataIndex, offsets: tuple[int, ...], sizes: tuple[int, ...], *, partial: bool) -> Box:
    """Return the requested box of the whole tensor. Only chunks of `partial` tensors have offsets other than 0."""
    begin = index.offset if partial and index.offset is not None else (0,) * len(offsets)
    return Box(tuple(a + b for a, b in zip(begin, offsets, strict=True)), sizes)


def _is_plain(planner: LoadPlanner) -> bool:
    """Return True if a planner reads into parts of the state dict itself, as torch's default planner does."""
    kind = type(planner)
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(kind, name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    )
