"""Checkpoints of torch_checkpointing: a file for each item and rank, and `metadata.pkl` about their sharding.

The metadata is a pickle of plain values. It names the file of each item and rank, and describes the sharded tensors in
it. A file of torch.save has DTensors, and one of safetensors has their local parts under names with dots.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError, UnsupportedFormatError
from snapshot.formats import hugging_face
from snapshot.formats import pickle_nodes as p
from snapshot.formats.flat_ranges import cut_run
from snapshot.formats.foreign import ForeignDocument, check_location, make_dict, make_document
from snapshot.formats.pickle_nodes import expect_dict, expect_list, expect_name
from snapshot.formats.pickled_objects import is_refused, locate_object
from snapshot.formats.pickled_shards import MOST_STRIDES
from snapshot.formats.rank_files import AT_ONCE, LACKS, RankFile, RankMerge, TorchFiles
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.safe_pickle import evaluate_pickle
from snapshot.formats.to_entries import limit_nodes, make_entries
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import (
    MOST_DIMENSIONS,
    MOST_HOLDERS,
    DTensorEntry,
    Mesh,
    ObjectEntry,
    Shard,
    TensorEntry,
)
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import MOST_RANKS
from snapshot.tensors.digest import digest_range
from snapshot.tensors.geometry import (
    MOST_AXES,
    Copy,
    Placements,
    Shape,
    Split,
    find_fitting_shards,
    find_flat_ranges,
    is_flat_range,
)

METADATA = "metadata.pkl"
KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A name that an item may have."""
FORMAT = "torch_checkpointing"
_FILE = re.compile(r"(?P<item>[A-Za-z0-9_-]+)_(?P<rank>0|[1-9][0-9]{0,5})\.(?P<suffix>pt|safetensors|json|bin)")
_KINDS = {
    "TorchSerialization": "pt",
    "SafetensorsSerialization": "safetensors",
    "JsonSerialization": "json",
    "RawSerialization": "bin",
}
_VERSIONS = ("1.0", "2.0")


class SavedItem(NamedTuple):
    """One item of a rank: its file."""

    key: str
    rank: int
    location: str
    kind: str


class Sharding(NamedTuple):
    """Placements of a tensor over the ranks of a mesh."""

    shape: Shape
    mesh_shape: Shape
    ranks: tuple[int, ...]
    """Ranks of the mesh, flat."""
    placements: Placements


async def describe_folder(folder: SearchedFolder) -> ForeignDocument:
    """Return the checkpoint in a folder with `metadata.pkl`."""
    storage, names, limit = folder.linkless, await folder.names(), folder.limit
    where = storage.url.join(METADATA)
    data = await storage.get(METADATA, limit=limit)
    try:
        metadata = SavedMetadata(where, evaluate_pickle(data, where), len(data))
        items = metadata.list_items(names)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not metadata: {type(error).__name__}: {error}") from error
    reader = _Reader(storage, metadata, limit)
    found = await gather_limited(items, reader.read, AT_ONCE)
    manifest: dict[str, Any] = {}
    for key in dict.fromkeys(item.key for item in items):
        files = [RankFile("", 0, b"", {}, {}, None)] * metadata.world
        for item, file in zip(items, found, strict=True):
            if item.key == key:
                files[item.rank] = file
        try:
            shared = metadata.find_shared(key)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            if isinstance(error, SnapshotError):
                raise
            raise CorruptSnapshotError(f"{where}: not metadata: {type(error).__name__}: {error}") from error
        manifest |= RankMerge(files, reader.inline, shared).join()
    short = any(not entry.is_whole() for entry in manifest.values())
    keys = dict.fromkeys(item.key for item in items)
    lacks = LACKS if short else ""
    described = {each.name: ForeignFile(each.size, archived=bool(each.sums), lacks=lacks) for each in found}
    document = make_document(
        FORMAT,
        metadata.version,
        storage.url,
        data + b"\n".join(each.token for each in found),
        manifest=manifest,
        files={METADATA: ForeignFile(len(data))} | described,
        world_size=metadata.world,
    )
    document.root = make_dict(keys)
    document.set_inline(bytes(reader.inline) or b"\0")
    return document


class SavedMetadata:
    """The contents of `metadata.pkl`, checked as they are read."""

    def __init__(self, where: object, value: Any, length: int) -> None:
        self._where = where
        self._left = limit_nodes(length)
        """Remaining number of values: a pickle can repeat them."""
        fields = expect_dict(value)
        self.version = str(fields.get("version"))
        if self.version not in _VERSIONS:
            raise UnsupportedFormatError(
                f"{where}: the version must be {' or '.join(_VERSIONS)}, got {p.show_value(fields.get('version'))}"
            )
        self.world: int = fields["world_size"]
        if type(self.world) is not int or not 0 < self.world <= MOST_RANKS:
            raise ValueError(f"invalid world size {p.show_value(self.world)}")
        self._items = {expect_name(key): expect_dict(each) for key, each in expect_dict(fields["metadata"]).items()}
        self._known: dict[int, Sharding] = {}
        self._groups: dict[str, list[tuple[tuple[str, ...], list[tuple[Any, Any]]]]] = {}
        """For each item, the path of each tensor, and its shardings with their ranks."""
        self._ranks: dict[int, frozenset[Any]] = {}
        """Sets of ranks, by the identity of their lists: most are the same list."""

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("too many repeated values")

    def list_items(self, names: Sequence[str]) -> list[SavedItem]:
        """Return the files of all items and ranks: those of the metadata, and others by the names in the folder."""
        found: dict[tuple[str, int], SavedItem] = {}
        for key, held in self._items.items():
            layouts = expect_dict(held["rank_to_layout_info"])
            self._spend(len(layouts))
            for rank, layout in layouts.items():
                if type(rank) is not int or not 0 <= rank < self.world:
                    raise ValueError(f"invalid rank {p.show_value(rank)}")
                found[key, rank] = self._make_item(key, rank, layout)
        for name in names:
            match = _FILE.fullmatch(name)
            if match and match["item"] not in self._items and int(match["rank"]) < self.world:
                item = SavedItem(match["item"], int(match["rank"]), name, match["suffix"])
                found.setdefault((item.key, item.rank), item)
        return [found[each] for each in sorted(found)]

    def _make_item(self, key: str, rank: int, layout: Any) -> SavedItem:
        if layout is None:
            return SavedItem(key, rank, check_location(f"{key}_{rank}.pt", self._where), "pt")
        fields = expect_dict(layout)
        kind = expect_dict(fields["serialization_format"]).get("type")
        if type(kind) is not str or kind not in _KINDS:
            raise UnsupportedFormatError(f"{self._where}: {key[:200]}: unknown kind of file: {p.show_value(kind)}")
        return SavedItem(key, rank, check_location(fields["file_path"], self._where), _KINDS[kind])

    def find_shared(self, key: str) -> set[str]:
        """Return the paths of an item's tensors that all ranks have a copy of, by their sharding."""
        found = set()
        for path, sharding in self.list_shardings(key, None).items():
            if sharding is not None and all(isinstance(each, Copy) for each in sharding.placements):
                found.add("/".join(map(encode_component, (key, *path))))
        return found

    def list_shardings(self, key: str, rank: int | None) -> dict[tuple[str, ...], Sharding | None]:
        """Return the sharding of each tensor of an item on a rank; without a rank, of those that are equal on all."""
        made: dict[tuple[str, ...], Sharding | None] = {}
        for place, groups in self._list_groups(key):
            for ranks, packed in groups:
                if rank in ranks or (rank is None and len(ranks) == self.world):
                    made[place] = self._read_sharding(packed)
        return made

    def _list_groups(self, key: str) -> list[tuple[tuple[str, ...], list[tuple[Any, Any]]]]:
        """Return the path of each tensor of an item, and its shardings with their ranks."""
        if key not in self._groups:
            listed = self._groups[key] = []
            held = self._items.get(key)
            for text, groups in expect_dict(held["nested_path_to_metadata"]).items() if held is not None else ():
                path = decode_json(expect_name(text).encode(), list[str | int], self._where)
                fields = [expect_dict(group) for group in expect_list(groups)]
                self._spend(1 + len(fields))
                shardings = [(self._find_ranks(each["ranks"]), each["sharding_metadata"]) for each in fields]
                listed.append((tuple(map(str, path)), shardings))
        return self._groups[key]

    def _find_ranks(self, value: Any) -> frozenset[Any]:
        found = self._ranks.get(id(value))
        if found is None:
            self._spend(len(expect_list(value)))
            if not all(type(rank) is int for rank in value):
                raise ValueError("ranks must be ints")
            found = self._ranks[id(value)] = frozenset(value)
        return found

    def _read_sharding(self, packed: Any) -> Sharding | None:
        """Return a sharding; None for one of another class than that of DTensors."""
        if id(packed) in self._known:
            return self._known[id(packed)]
        fields = expect_dict(packed)
        if fields.get("type") != "DTensorShardingMetadata":
            return None
        data = expect_dict(fields["data"])
        mesh = expect_dict(data["mesh_spec"])
        shape, mesh_shape, ranks = (
            _read_sizes(each) for each in (data["global_shape"], mesh["mesh_shape"], mesh["mesh_data"])
        )
        if not 0 < len(mesh_shape) <= MOST_DIMENSIONS or not len(ranks) == math.prod(mesh_shape) <= MOST_HOLDERS:
            raise ValueError(f"a mesh of shape {mesh_shape} with {len(ranks)} ranks")
        self._spend(len(ranks))
        placements = tuple(_read_placement(each, len(shape), self._where) for each in expect_list(data["placements"]))
        strides = math.prod(each.strides for each in placements if isinstance(each, Split))
        if len(placements) != len(mesh_shape) or strides > MOST_STRIDES or len(shape) > MOST_AXES:
            raise ValueError(f"{len(placements)} placements on a mesh of shape {mesh_shape}")
        return self._known.setdefault(id(packed), Sharding(shape, mesh_shape, ranks, placements))


class _Reader:
    """Reads the descriptions of all files."""

    def __init__(self, storage: Storage, metadata: SavedMetadata, limit: int) -> None:
        self._storage = storage
        self._metadata = metadata
        self._limit = limit
        self._files = TorchFiles(storage, limit)
        self.inline = bytearray()

    async def read(self, item: SavedItem) -> RankFile:
        """Return the entries of one file."""
        found = await self._storage.stat(item.location)
        token = f"{item.location} {found.token} {found.size}"
        sums: dict[int, tuple[int, int]] = {}
        path = encode_component(item.key)
        if item.kind == "pt":
            saved = await self._files.open(item.location)
            entries = saved.describe_items({path: saved.value}, self.inline, depth=1, routed=False)
            for each, entry in entries.items():
                if is_refused(entry):
                    locate_object(entry, item.location, each.partition("/")[2].partition("/")[2])
            sums, token = saved.sums(), f"{token} {digest_range(saved.content)}"
        elif item.kind == "safetensors":
            entries = await self._read_tensors(item, path, found.size)
        elif item.kind == "json":
            data = await self._storage.get(item.location, limit=self._limit)
            entries = self._read_json(item, path, data)
            token = f"{token} {digest_range(data)}"
        else:
            entries = {f"0/{path}": ObjectEntry(item.location, (0, found.size), "bytes", "bytes")}
        own = {each.partition("/")[2]: entry for each, entry in entries.items()}
        return RankFile(item.location, found.size, token.encode(), own, sums, None)

    def _read_json(self, item: SavedItem, path: str, data: bytes) -> dict[str, Any]:
        where = self._storage.url.join(item.location)
        value = decode_json(data, Any, where)
        try:
            return make_entries({f"0/{path}": value}, where, _refuse_tensor, len(data), inline=self.inline)
        except ValueError as error:
            raise (
                error if isinstance(error, CorruptSnapshotError) else CorruptSnapshotError(f"{where}: {error}")
            ) from error

    async def _read_tensors(self, item: SavedItem, path: str, size: int) -> dict[str, Any]:
        """Return the entries of a file of safetensors, whose names are paths that are joined with dots."""
        tensors, _ = await hugging_face.read_header(self._storage, item.location, size, self._limit)
        where = self._storage.url.join(item.location)
        try:
            shardings = self._metadata.list_shardings(item.key, item.rank)
            places = {".".join(place): (place, sharding) for place, sharding in shardings.items()}
            tree: dict[str, Any] = {}
            for name, stored in tensors.items():
                place, sharding = places.get(name, ((name,), None))
                level = tree
                for part in place[:-1]:
                    level = level.setdefault(part, {})
                entry = stored if sharding is None else make_sharded(stored, sharding, item.rank)
                if place[-1] in level:
                    raise ValueError(f"{name[:200]!r} is there twice")
                level[place[-1]] = entry
            return _flatten_tree(f"0/{path}", tree)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CorruptSnapshotError):
                raise
            raise CorruptSnapshotError(f"{where}: {error}") from error


def make_sharded(stored: TensorEntry, sharding: Sharding, rank: int) -> TensorEntry | DTensorEntry:
    """Return the entry of a tensor whose local part on a rank is stored."""
    if rank not in sharding.ranks:
        raise ValueError(f"rank {rank} is not in the mesh of its tensor")
    coordinate = np.unravel_index(sharding.ranks.index(rank), sharding.mesh_shape)
    held = find_fitting_shards(
        stored.shape,
        sharding.shape,
        sharding.mesh_shape,
        placements=sharding.placements,
        coordinate=tuple(map(int, coordinate)),
        order=None,
    )
    if all(isinstance(each, Copy) for each in sharding.placements):
        return stored
    shards = []
    for box, inner in held.boxes:
        if not is_flat_range(stored.shape, inner):
            raise UnsupportedFormatError(f"{stored.location}: a part in strides of an inner dimension is not read")
        if box.numel:
            [(begin, _)] = find_flat_ranges(stored.shape, inner, 0)
            shards.append(Shard(box.offsets, box.sizes, cut_run(stored, begin, box.sizes)))
    mesh = Mesh.from_lists(np.asarray(sharding.ranks).reshape(sharding.mesh_shape).tolist())
    return DTensorEntry(stored.dtype, sharding.shape, shards, mesh, [str(each) for each in sharding.placements])


def _flatten_tree(path: str, value: Any) -> dict[str, Any]:
    """Return the entries of a tree of dicts, by their paths."""
    if not isinstance(value, dict):
        return {path: value}
    made: dict[str, Any] = {path: make_dict(value)}
    for key, each in value.items():
        made |= _flatten_tree(f"{path}/{encode_component(key)}", each)
    return made


def _refuse_tensor(path: str, found: Any) -> Any:
    raise ValueError("a tensor in a text")


def _read_sizes(value: Any) -> Shape:
    sizes = tuple(expect_list(value))
    if not all(type(each) is int and 0 <= each < 1 << 60 for each in sizes):
        raise ValueError(f"invalid sizes {p.show_value(value)}")
    return sizes


def _read_placement(value: Any, ndim: int, where: object) -> Copy | Split:
    fields = expect_dict(value)
    kind = fields.get("type")
    if kind == "Replicate":
        return Copy()
    dim, strides = fields.get("dim"), fields.get("split_factor", 1)
    if kind not in ("Shard", "StridedShard") or type(dim) is not int or type(strides) is not int:
        raise UnsupportedFormatError(f"{where}: unknown placement {p.show_value(kind)}")
    if not -ndim <= dim < ndim or not 0 < strides < MOST_HOLDERS:
        raise ValueError("a placement with an invalid dimension")
    return Split(dim % ndim, strides)


# Writing


def encode_metadata(items: Mapping[str, Any]) -> bytes:
    """Return the metadata of items that one rank has written whole, so that its readers can cut their tensors.

    Every tensor is a replica on a mesh of that rank, as the library itself describes tensors that are not sharded.
    """
    made = {}
    for key, value in items.items():
        found: list[tuple[list[str | int], torch.Tensor]] = []
        _collect_tensors(value, [], found)
        described = {json.dumps(path, separators=(",", ":")): [_describe_whole(tensor)] for path, tensor in found}
        made[key] = {"nested_path_to_metadata": described, "rank_to_layout_info": {0: None}}
    return pickle.dumps({"version": _VERSIONS[-1], "world_size": 1, "metadata": made}, protocol=4)


def _collect_tensors(value: Any, path: list[str | int], found: list[tuple[list[str | int], torch.Tensor]]) -> None:
    if isinstance(value, torch.Tensor):
        found.append((path, value))
    elif isinstance(value, dict):
        for key, each in value.items():
            if type(key) in (str, int):  # other keys have no place in the metadata
                _collect_tensors(each, [*path, key], found)
    elif isinstance(value, (list, tuple, deque)):
        for number, each in enumerate(value):
            _collect_tensors(each, [*path, number], found)


def _describe_whole(tensor: torch.Tensor) -> dict[str, Any]:
    mesh = {"device_type": "cpu", "mesh_data": (0,), "mesh_dim_names": None, "mesh_shape": (1,)}
    data = {
        "dtype": str(tensor.dtype),
        "global_shape": list(tensor.shape),
        "mesh_spec": mesh,
        "placements": [{"type": "Replicate"}],
        "stride": list(tensor.stride()),
    }
    return {"ranks": (0,), "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}}
