"""Write of one rank's share of a DCP plan: its items become flattened leaves, and those data files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from snapshot.aio import in_thread
from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import SnapshotError
from snapshot.interop.dcp.dcp_commit import VERB, WrittenItems
from snapshot.interop.dcp.names import Keys, flat_paths, nested_paths
from snapshot.manifest import entries as e
from snapshot.manifest.merge import merge
from snapshot.manifest.paths import encode_component
from snapshot.plan.layout import name_data_file
from snapshot.progress import unmetered
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.collect import report_pickles
from snapshot.save.manifest_builder import RankManifest, build_entries
from snapshot.save.rank_share import RankShare
from snapshot.save.replication import Replication
from snapshot.save.staging import Stager
from snapshot.save.take import plan_writes
from snapshot.save.unchanged import Unchanged
from snapshot.save.writer import Writer, write_small
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Blob
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.geometry import Box
from snapshot.text import with_article

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
        share = RankShare(solo_exchange(VERB), self.flat, _NOTHING_SHARED)
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
                partial(build_entries, structure="", metadata=msgspec.Raw(b"{}")), share, written, Unchanged(), binary
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
            if isinstance(entry, e.Container) and entry.width:
                holders[path] = encode_component(name)
        for path in made if holders else ():
            above = path.rpartition("/")[0]
            while above and above not in holders:
                above = above.rpartition("/")[0]
            if above:
                found[holders[above] + path[len(above) :]] = made[path]
        return found


_NOTHING_SHARED = Replication("", frozenset(), ())


def _holder(holders: dict[Keys, dict[str, Any]], keys: Keys) -> dict[str, Any]:
    """Return the dict at some keys; create it, and those above it, if missing."""
    held = holders.get(keys)
    if held is None:
        held = holders[keys] = _holder(holders, keys[:-1])[str(keys[-1])] = {}
    return held


def _is_archive(data: bytes) -> bool:
    return data.startswith(b"PK\3\4")
