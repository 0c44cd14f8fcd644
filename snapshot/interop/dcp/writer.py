"""`dcp.save` with this library's write engine: the result is a snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import count
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import SnapshotError, SnapshotExistsError
from snapshot.events import emit, log
from snapshot.formats.dcp_notice import put_notice
from snapshot.interop.dcp.names import VERB, Keys, WrittenItems, flat_paths, join_and_commit, nested_paths
from snapshot.io.aio import in_thread, shielded
from snapshot.io.loop import finish_before_exit, run, start
from snapshot.io.registry import plugin_for
from snapshot.io.session import Session
from snapshot.io.storage import exists
from snapshot.io.system import PerProcess, gc_paused
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, merge
from snapshot.manifest.paths import encode_component
from snapshot.plan.layout import name_data_file
from snapshot.progress import unmetered
from snapshot.save.collect import report_pickles
from snapshot.save.describe import RankManifest, build_entries
from snapshot.save.planned_take import plan_writes
from snapshot.save.rank_share import RankShare
from snapshot.save.staging import Stager
from snapshot.save.transaction import Transaction, claim_path, delete_save, time_limit
from snapshot.save.writer import Writer, write_small
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Blob
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.geometry import Box
from snapshot.text import with_article

# Write of one rank's share of a DCP plan: its items become flattened leaves, and those data files.

_OWN = ("resolve_data", "lookup_object", "transform_object")


def write_items(session: Session, save_id: str, rank: int, plan: SavePlan, planner: SavePlanner) -> WrittenItems:
    """Write the items of a plan, and return the entries and files."""
    told = WrittenItems()
    names = list(dict.fromkeys(item.index.fqn for item in plan.items))
    paths = nested_paths(names, plan.planner_data)
    keys = plan.planner_data if paths is not None else None
    pickled: list[str] = []
    lossy: list[str] = []
    number = 0
    for items in _cut_rounds(plan.items, planner, session.budget.limit):
        round_ = _Round(flat_paths(names) if paths is None else paths, keys, planner)
        with gc_paused():  # not during writes, which may take minutes in the background
            round_.add(items)
        written = run(round_.write(session, save_id, rank, number))
        number = written.next_number
        merge(told.entries, round_.entries(written.described), f"rank {rank}")  # joins the shards of one tensor
        told.files.update(written.described.files)
        told.raw += round_.raw
        pickled += round_.flat.pickled
        lossy += round_.flat.lossy
    report_pickles(pickled, lossy)
    return told


def is_plain(planner: SavePlanner) -> bool:
    """Return True if a planner passes objects of the state dict unchanged, as torch's default planner does."""
    kind = type(planner)
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in _OWN
    )


def _cut_rounds(items: Sequence[WriteItem], planner: SavePlanner, budget: int) -> Iterator[Sequence[WriteItem]]:
    """Yield all items, or portions within the budget if the planner may create a tensor for each request."""
    if is_plain(planner):
        yield items
        return
    chosen: list[WriteItem] = []
    size = 0
    for item in items:
        nbytes = _nbytes(item)
        if chosen and size + nbytes > budget:
            yield chosen
            chosen, size = [], 0
        chosen.append(item)
        size += nbytes
    yield chosen


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


@dataclass
class _Written:
    described: RankManifest
    next_number: int


class _Round:
    """Items of a plan that are written together."""

    def __init__(self, paths: dict[str, str], keys: dict[str, Keys] | None, planner: SavePlanner) -> None:
        self._paths = paths
        self._keys = keys
        self._planner = planner
        self._plain = is_plain(planner)
        self._names: list[str] = []
        self._boxes: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {}
        self.flat = Flattened(classes=False)
        self.raw: list[str] = []

    def add(self, items: Iterable[WriteItem]) -> None:
        """Request each item's value from the planner, and flatten it."""
        state: dict[str, Any] = {}
        holders: dict[Keys, dict[str, Any]] = {(): state}
        every = self._keys
        blobs: list[tuple[str, bytes]] = []
        for item in items:
            name = item.index.fqn
            if item.type is WriteItemType.SHARD:
                found = self._boxes.setdefault(name, [])
                if not found:
                    self._names.append(name)
                found.append((item, self._tensor(item)))
                continue
            self._names.append(name)
            if item.type is WriteItemType.BYTE_IO:
                known, value = self._value(item)
                if not known:
                    blobs.append((name, value))
                    continue
            else:
                value = self._tensor(item)
            if every is not None:
                keys = every[name]
                holder = holders.get(keys[:-1])
                if holder is None:
                    holder = _holder(holders, keys[:-1])
                holder[str(keys[-1])] = value
            else:
                state[name] = value
        for key in [key for key, value in state.items() if type(value) is dict]:
            self.flat.add(encode_component(key), state.pop(key))  # `add` reuses the schema of the previous one
        self.flat.add_named("", state, 0)
        for name, data in blobs:
            self._blob(name, data)
        for name, boxes in self._boxes.items():
            self._sharded(name, boxes)

    def _tensor(self, item: WriteItem) -> torch.Tensor:
        value = self._planner.resolve_data(item)
        if not isinstance(value, torch.Tensor):
            raise SnapshotError(
                f"{item.index.fqn}: the planner must return a tensor, got {with_article(type(value).__name__)}"
            )
        return value

    def _value(self, item: WriteItem) -> tuple[bool, Any]:
        """Return (True, the value), or (False, its bytes) if they cannot be decoded."""
        if self._plain:  # the object itself: pickling would dominate the cost of small values
            return True, self._planner.lookup_object(item.index)  # type: ignore[attr-defined]
        data = self._planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise SnapshotError(
                f"{item.index.fqn}: the planner must return a BytesIO, got {with_article(type(data).__name__)}"
            )
        held = data.getvalue()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return True, torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a foreign pickle may raise anything; its bytes are stored
            return False, held

    def _blob(self, name: str, data: bytes) -> None:
        path = self._paths[name]
        self.flat.entries[path] = None
        if _is_archive(data):
            self.flat.blobs.append(Blob(path, data, "torch_save", "object"))
            self.flat.pickled.append(path)
        else:
            self.flat.blobs.append(Blob(path, data, "bytes", "builtins.bytes"))
            self.raw.append(name)

    def _sharded(self, name: str, boxes: list[tuple[WriteItem, torch.Tensor]]) -> None:
        """Add this rank's boxes of a tensor. The boxes of other ranks are not needed here."""
        path, pieces = self._paths[name], []
        data = boxes[0][0].tensor_data
        if data is None:
            raise SnapshotError(f"{name}: the planner must set `tensor_data` of a shard, got None")
        shape, dtype = tuple(data.size), boxes[0][1].dtype
        for item, tensor in boxes:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if tuple(tensor.shape) != box.sizes or tensor.dtype != dtype:
                raise SnapshotError(
                    f"{name}: part at {box} must be {dtype}{list(box.sizes)}, got {tensor.dtype}{list(tensor.shape)}"
                )
            if box.numel:
                pieces.append(LocalPiece(box, tensor.detach(), None))
        shards = Shards("ShardedTensor", dtype, shape, pieces, None, None, None, "", False)
        self.flat.entries[path] = None
        self.flat.shards[path] = shards

    # Write

    async def write(self, session: Session, save_id: str, rank: int, number: int) -> _Written:
        """Write the data files, numbered from `number` on."""
        self._tie_shards()
        share = RankShare(solo_exchange(VERB), self.flat)
        plan = plan_writes(share, session, staged=False)
        last = number + len(plan.files)
        locations = [name_data_file(save_id, rank, n, "safetensors") for n in range(number, last)]
        binary = name_data_file(save_id, rank, last, "bin")
        storage = session.storage
        source = Stager(share.leaves, copies=storage.limits.alignment > 1)
        writer = Writer(storage, source, session.budget, unmetered, wanted_part=session.settings.part_bytes)
        written = await writer.write(plan.files, locations)
        with gc_paused():
            described = await in_thread(
                partial(build_entries, structure="", metadata=msgspec.Raw(b"{}")), share, written, binary
            )
        if described.chunks:
            await write_small(storage, binary, described.chunks)
        return _Written(described, last + 1)

    def _tie_shards(self) -> None:
        """Store sharded tensors that share the same memory once, like other tied tensors."""
        owners: dict[Any, str] = {}
        for path, shards in self.flat.shards.items():
            places = tuple(
                (piece.box, piece.tensor.data_ptr(), piece.tensor.stride(), piece.tensor.device)
                for piece in shards.pieces
            )
            if places:
                owner = owners.setdefault((shards.dtype, shards.shape, places), path)
                if owner != path:
                    self.flat.ties[path] = owner

    def entries(self, described: RankManifest) -> dict[str, Any]:
        """Return the items' entries by name (as a component), and the entries below containers by longer paths."""
        made = {path[2:]: entry for path, entry in described.own.items()}  # drop the rank, which is always 0
        found: dict[str, Any] = {}
        holders: dict[str, str] = {}
        for name in self._names:
            path = self._paths[name]
            found[encode_component(name)] = entry = made[path]
            if entry.width:
                holders[path] = encode_component(name)
        for path in made if holders else ():
            above = path.rpartition("/")[0]
            while above and above not in holders:
                above = above.rpartition("/")[0]
            if above:
                found[holders[above] + path[len(above) :]] = made[path]
        return found


def _holder(holders: dict[Keys, dict[str, Any]], keys: Keys) -> dict[str, Any]:
    """Return the dict at some keys; create it, and those above it, if missing."""
    held = holders.get(keys)
    if held is None:
        held = holders[keys] = _holder(holders, keys[:-1])[str(keys[-1])] = {}
    return held


def _is_archive(data: bytes) -> bool:
    return data.startswith(b"PK\3\4")


# `dcp.save` with this library's write engine
#
# The coordinator claims the path during planning, and commits in `finish`. In between, every rank writes its data
# files and reports them to the coordinator in its results. DCP notifies no rank if another one has failed. So a rank
# that fails deletes the claim: then no commit is possible, and each rank that misses the claim deletes its files.


class Ticket:
    """Message of the coordinator to each rank, sent with its plan.

    A planner that caches plans returns an old plan, with the ticket of the save that it was created for. The new ticket
    arrived with the plan that was discarded. So each ticket is recorded when it is unpickled, for that thread. Planners
    of one class share their cache, so the plan may also be that of another writer, and another writer may get this one.
    """

    __slots__ = ("arrived", "rank", "save_id", "where")

    @property
    def prefix(self) -> str:
        """The beginning of file names, for torch's `FileSystemWriter`: what its own plan would have."""
        return f"__{self.rank}_"

    def __init__(self, save_id: str, rank: int, where: str) -> None:
        self.save_id, self.rank, self.where = save_id, rank, where
        self.arrived = next(_arrivals)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_ticket, (self.save_id, self.rank, self.where)


class _Where:
    """A rank's save path, sent in its plan. A cached plan has the path of an earlier save."""

    __slots__ = ("arrived", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.arrived = next(_arrivals)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Where, (self.text,)


_arrivals = count()
_here = threading.local()


def _make_ticket(save_id: str, rank: int, where: str) -> Ticket:
    _here.ticket = ticket = Ticket(save_id, rank, where)
    return ticket


_newest: PerProcess[dict[str, Transaction]] = PerProcess(dict, dict.copy)
"""The last unfinished save of this process for each path."""


class _Save:
    """A save that this process coordinates, from its claim until it is committed or aborted."""

    def __init__(self, session: Session, save_id: str, where: str) -> None:
        self.session = session
        self.transaction = Transaction(session, solo_exchange(VERB), save_id)
        self.where = where
        self.began = time.perf_counter()
        self._given_up = weakref.finalize(self, self._end_later, session, self.transaction, where)
        self._given_up.atexit = False  # the next save removes what is left at exit

    def over(self, *, abort: bool = False) -> None:
        """Release a save that is committed or aborted. With `abort`, abort it first."""
        self._given_up.detach()
        run(self._end(self.session, self.transaction, self.where, abort=abort))

    @classmethod
    def _end_later(cls, session: Session, transaction: Transaction, where: str) -> None:
        finish_before_exit(start(cls._end(session, transaction, where, abort=True)))

    @staticmethod
    async def _end(session: Session, transaction: Transaction, where: str, *, abort: bool) -> None:
        if abort:
            await transaction.abort()
        transaction.release()
        if _newest.get().get(where) is transaction:
            _newest.get().pop(where, None)
        await session.close()


async def _take_back(session: Session, save_id: str) -> None:
    """Delete the claim, so that nothing can be committed any more, and then the files of all ranks."""
    with contextlib.suppress(SnapshotError, TimeoutError):
        async with time_limit(session.storage):
            await delete_save(session.storage, save_id)


class SnapshotWriter(StorageWriter):
    """Storage writer for `torch.distributed.checkpoint`: saves an atomic, verified snapshot, tensors without pickles.

    The writer is plain configuration, and can be pickled; nothing is opened before a save begins. It runs one save at a
    time, each to `path` or to the `checkpoint_id` of the save. A save that begins before the previous one has ended
    aborts that one, which then fails.

    Args:
        path: A URL, or a path of the file system. Optional if each save passes a `checkpoint_id`.
        overwrite: Replace an existing snapshot, which stays intact until the new one is committed. Otherwise raise.
        storage_options: Options for the storage plugin.
        durable: Flush all files to disk before the commit, to survive a power loss. Default: `sync_files`, or True.
        memory_budget_bytes: Host memory for data that cannot be written in place, as for `Snapshot.take`. Tensors that
            a custom planner creates are requested in portions of this size.

        theirs: The other arguments of torch's `FileSystemWriter`, in its order.
        named: The same by name. They only apply to torch's files, so they are ignored here, and logged once.

    >>> import torch.distributed.checkpoint as dcp, torch, warnings
    >>> from snapshot import Snapshot
    >>> state = {"model": {"weight": torch.ones(2)}, "step": 3}
    >>> with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
    ...     _ = dcp.save(state, storage_writer=SnapshotWriter("memory://docs/dcp"))
    >>> Snapshot("memory://docs/dcp").read_object("0/model/weight")
    tensor([1., 1.])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *theirs: Any,
        overwrite: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        durable: bool | None = None,
        memory_budget_bytes: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.storage_options = dict(storage_options or {})
        named |= {} if overwrite is None else {"overwrite": overwrite}
        given = signature(FileSystemWriter).bind("", *theirs, **named).arguments
        self.overwrite: bool = given.pop("overwrite", True)
        self.durable: bool = given.pop("sync_files", True) if durable is None else durable
        self.save_id = secrets.token_hex(6)
        """Id of the next, current or last save."""
        _log_unused(given)
        self.memory_budget_bytes = memory_budget_bytes
        self._rank = 0
        self._alone = False
        """True if each rank saves for itself (`use_collectives=False`)."""
        self._since = 0
        """Messages that arrived before this number belong to an earlier save."""
        self._save: _Save | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_save": None}

    # Methods that DCP calls, in this order

    @property
    def checkpoint_id(self) -> str | None:
        """Path of the next save. Torch logs it, so passwords are hidden."""
        return hide_secrets(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if there is a storage plugin for this URL or path."""
        return storage_knows(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        self._drop()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self._save.transaction.save_id if self._save else None
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set this rank's role. Torch passes `rank` only if a parameter is named exactly `kwargs`."""
        self._drop()
        self.save_id = secrets.token_hex(6)
        self._rank = kwargs.get("rank") or 0
        self._alone = not kwargs.get("use_collectives", True)
        self._since = next(_arrivals)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=_Where(str(self._url())))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the path, and send the save's id to all ranks with their plans. Called on the coordinator."""
        url = self._url()
        for rank, plan in enumerate(plans):
            told = plan.storage_data
            if isinstance(told, _Where) and told.arrived > self._since and told.text != str(url) and not self._alone:
                raise SnapshotError(f"rank {rank}: must save to {url} like the coordinator, got {told.text}")
        session = self._open(url)
        save = _Save(session, self.save_id, str(url))
        try:
            run(self._claim(save))
        except BaseException as error:
            self._failed(save, error)
            save.over()
            raise
        self._save = save
        return [
            dataclasses.replace(plan, storage_data=Ticket(save.transaction.save_id, rank, save.where))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data files of this rank."""
        save, ticket = self._save, self._ticket(plan)  # raises for another path, where nothing needs an abort
        session = save.session if save is not None else self._open(self._url())
        self.save_id = ticket.save_id
        try:
            told = write_items(session, ticket.save_id, ticket.rank, plan, planner)
            run(self._written(session, ticket, coordinates=save is not None))
        except BaseException as error:
            run(_take_back(session, ticket.save_id))
            if save is not None:
                self._failed(save, error)
                if self._save is save:  # else the next save has already aborted it
                    self._save = None
                    save.over()
            raise
        finally:
            if save is None:
                run(session.close())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=MetadataIndex(""), size_in_bytes=told.nbytes, storage_data=told)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge all results into one manifest, and commit it. Called on the coordinator."""
        save, self._save = self._save, None
        if save is None:
            raise SnapshotError(
                "finish() was called without a save in progress; a SnapshotWriter runs one save at a time"
            )
        told = [
            result.storage_data for rank in results for result in rank if isinstance(result.storage_data, WrittenItems)
        ]
        try:
            nbytes = join_and_commit(save.session, save.transaction, metadata, told)
        except BaseException as error:
            self._failed(save, error)
            raise
        else:
            if not self._alone:
                run(put_notice(save.session.storage))
        finally:
            save.over()
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save.transaction.save_id)
        seconds = round(time.perf_counter() - save.began, 3)
        emit("committed", VERB, save.where, bytes=nbytes, seconds=seconds)

    # Implementation

    def _url(self) -> URL:
        if self.path is None:
            raise ValueError("no path; pass one to SnapshotWriter, or a checkpoint_id to dcp.save")
        url = URL.parse(self.path)
        return url.join(rank_folder(self._rank)) if self._alone else url

    def _open(self, url: URL) -> Session:
        return Session(url, self.storage_options, durable=self.durable, budget=self.memory_budget_bytes)

    async def _claim(self, save: _Save) -> None:
        """Claim the path.

        Takes and copies of this process respect the claim until this save ends. The next save through DCP's API does
        not: this one may have ended without notice, by an error of another rank.
        """
        transaction = save.transaction
        transaction.look_at_path(overwrite=self.overwrite)
        await transaction.await_free()
        if self._alone:
            await self._refuse_shadow()
        if (earlier := _newest.get().get(save.where)) is not None:
            earlier.release()
        _newest.get()[save.where] = transaction
        try:
            await transaction.claim()
        except BaseException:
            await shielded(transaction.abort())
            raise
        transaction.will_write(())  # from here on any rank may

    async def _refuse_shadow(self) -> None:
        """Raise if there is a snapshot of all ranks: a load would read it instead of what each rank saves now."""
        session = self._open(URL.parse(self.path or ""))
        try:
            if await exists(session.storage, METADATA):
                raise SnapshotExistsError(
                    f"{session.url}: has a snapshot of all ranks, which a load would prefer to those of ranks without "
                    "collectives; delete it first, or save to another path"
                )
        finally:
            await session.close()

    def _ticket(self, plan: SavePlan) -> Ticket:
        """Return the ticket of the current save: see `Ticket`."""
        given, newest = plan.storage_data, getattr(_here, "ticket", None)
        if self._save is not None:
            rank = given.rank if isinstance(given, Ticket) else self._rank
            return Ticket(self._save.transaction.save_id, rank, self._save.where)
        since = given.arrived if isinstance(given, Ticket) else self._since  # else the cached plan of another writer
        ticket = newest if newest is not None and newest.arrived > since else given
        if not isinstance(ticket, Ticket):
            raise SnapshotError("the plan must come from SnapshotWriter.prepare_global_plan; another one replaced it")
        where = str(self._url())
        if ticket.where != where:  # a planner that caches plans hid this from the coordinator
            raise SnapshotError(f"this rank must save to {ticket.where} like the coordinator, got {where}")
        return ticket

    async def _written(self, session: Session, ticket: Ticket, *, coordinates: bool) -> None:
        """Flush the written files as far as configured, and raise if another rank has failed meanwhile."""
        if not coordinates:
            await session.storage.settle()
        if not await exists(session.storage, claim_path(ticket.save_id)):
            raise SnapshotError(
                f"{session.url}: the claim of this save is missing: another rank has failed, another save replaced it, "
                "or the ranks do not share one storage"
            )

    def _drop(self) -> None:
        """Abort a save that was begun and never finished, because another rank failed before its write."""
        save, self._save = self._save, None
        if save is not None:
            save.over(abort=True)

    def _failed(self, save: _Save, error: BaseException) -> None:
        emit("failed", VERB, save.where, error=error)

    def __repr__(self) -> str:
        return f"SnapshotWriter({hide_secrets(self.path)!r})"


_logged: PerProcess[set[str]] = PerProcess(set)


def _log_unused(given: Mapping[str, Any]) -> None:
    """Log once which arguments of FileSystemWriter are ignored."""
    usual = signature(FileSystemWriter).parameters
    names = [
        name
        for name, value in given.items()
        if name not in ("path", "sync_files") and value != usual[name].default and name not in _logged.get()
    ]
    _logged.get().update(names)
    if names:
        log.info("SnapshotWriter: arguments ignored, since they do not apply to snapshots: %s", ", ".join(names))


def rank_folder(rank: int) -> str:
    """Return the folder of a rank's own snapshot, when ranks save without collectives."""
    return f"rank-{rank}"


def hide_secrets(path: str | None) -> str | None:
    """Return a path unchanged, and a URL without its secrets."""
    url = None if path is None else URL.parse(path)
    return path if url is None or url.scheme == "file" else str(url)


def storage_knows(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return True if there is a storage plugin for a URL or path."""
    try:
        plugin_for(URL.parse(os.fspath(checkpoint_id)))
    except (SnapshotError, ValueError, TypeError):
        return False
    return True
