"""Checkpoints of torch.distributed.checkpoint (DCP), read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import (
    CorruptSnapshotError,
    StorageError,
    UnsupportedFormatError,
)
from snapshot.formats import pickle_nodes, torch_save
from snapshot.formats.dcp_notice import METADATA, NOTICE
from snapshot.formats.flat_ranges import cut_boxes
from snapshot.formats.foreign import ForeignDocument, check_location, extend_file, is_absence, make_document
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.safe_pickle import evaluate_pickle
from snapshot.formats.to_entries import limit_nodes, make_container
from snapshot.io.storage import Storage
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import ObjectEntry, Shard, ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.manifest.values import NoneEntry
from snapshot.tensors.geometry import MOST_AXES
from snapshot.tensors.memory import ITEMSIZE

# Checkpoints of torch.distributed.checkpoint (DCP).
#
# The `.metadata` file lists the boxes of each tensor, and each box is a separate archive. Megatron-core's directories
# have the same layout.

COMMON = "common.pt"
"""File of Megatron-core's unsharded state."""
_CLASSES = "torch.distributed.checkpoint.metadata."
_TRANSFORMS = {"stream.zstd": "zstd"}
GAP = 1000
"""Maximum number of missing list positions, which become None: DCP does not save empty values."""


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint of a folder with a `.metadata`; None for a notice that it is a snapshot, or without it."""
    try:
        data = await folder.storage.get(METADATA, limit=folder.limit)
    except StorageError as error:
        if not is_absence(folder.storage, error):
            raise
        return None
    return None if data == NOTICE else await describe_checkpoint(folder.storage, data)


async def describe_checkpoint(storage: Storage, data: bytes) -> ForeignDocument:
    """Return the checkpoint that a `.metadata` describes."""
    where = storage.url.join(METADATA)
    metadata = evaluate_pickle(data, where)
    try:
        found = _Metadata(where, metadata, len(data))
        manifest, names = found.build_tree()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not DCP metadata: {type(error).__name__}: {error}") from error
    files: dict[str, Any] = dict(found.files)
    inline = b""
    try:
        size = (await storage.stat(COMMON)).size
    except StorageError:
        pass  # not of Megatron, or of a version that stores it elsewhere
    else:
        common = await torch_save.describe_file(storage, COMMON, size, len(data) + (1 << 28))
        taken = {path.split("/", 2)[1] for path in manifest}
        added = {path: entry for path, entry in common.manifest.items() if path.split("/", 2)[1] not in taken}
        manifest |= added
        files |= {COMMON: ForeignFile(size)}
        inline = common.inline
        names |= dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in added)
    made = make_container(names)
    root = made and made[0]
    document = make_document("dcp", found.version, storage.url, data, manifest=manifest, files=files)
    document.root = root
    document.set_inline(inline)
    return document


class _Metadata:
    """Contents of a `.metadata` file, validated during reading."""

    def __init__(self, where: object, metadata: Any, length: int) -> None:
        self._where = where
        self._chunks = limit_nodes(length)
        """Remaining number of chunks: a pickle can repeat one list for many tensors."""
        self._room = 64 * self._chunks
        """Remaining length of all paths: a long key may be in many of them."""
        if not _is_named(metadata, "Metadata"):
            raise ValueError(f"expected Metadata, got {pickle_nodes.show_value(metadata)}")
        fields = pickle_nodes.read_fields(metadata)
        self.version = str(fields.get("version") or "")
        self.files: dict[str, ForeignFile] = {}
        self._stored = {}
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """Sizes and offsets that were checked: most are equal."""
        for index, info in _expect_items(fields.get("storage_data")):
            named, place = pickle_nodes.read_fields(index), pickle_nodes.read_fields(info)
            offset = named.get("offset")
            if type(named["fqn"]) is not str:
                raise ValueError(f"a name must be a str, got {pickle_nodes.show_value(named['fqn'])}")
            self._stored[named["fqn"], None if offset is None else self._check_sizes(offset)] = place
        self._tensors = dict(_expect_items(fields["state_dict_metadata"]))
        shapes = fields.get("mcore_data")
        self._flattened: Mapping[str, Any] = shapes if isinstance(shapes, dict) else {}
        """Megatron-core's data of tensors whose parts are flat ranges."""
        planner = fields.get("planner_data")
        self._paths: Mapping[str, Any] = planner if isinstance(planner, dict) else {}

    def _check_sizes(self, value: Any) -> tuple[int, ...]:
        known = self._known.get(value) if type(value) is pickle_nodes.Size else None  # a Size has only ints
        if known is not None:
            return known
        if not isinstance(value, tuple) or not all(type(each) is int and 0 <= each < 1 << 60 for each in value):
            raise ValueError(f"sizes must be a tuple of ints, got {pickle_nodes.show_value(value)}")
        return self._known.setdefault(tuple(value), tuple(value))

    def build_tree(self) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Return the entries by path, and the top-level names."""
        entries = {name: self._build_entry(name, each) for name, each in self._tensors.items()}
        nested = self._nest_entries(entries)
        manifest: dict[str, Any] = {}
        tree = nested if nested is not None else entries
        for key, value in tree.items():
            self._place_value(manifest, f"0/{encode_component(key) if type(key) is str else key}", value)
        return manifest, dict.fromkeys(tree)

    def _place_value(self, manifest: dict[str, Any], path: str, value: Any) -> None:
        """Insert a value, and everything below it, under its path."""
        self._room -= len(path)
        if self._room < 0:
            raise ValueError("too many repeated values")
        if not isinstance(value, dict):
            manifest[path] = value
            return
        held: Any = dict(value)
        if {"state", "param_groups"} <= held.keys():
            held["state"] = _restore_numbers(held["state"])
        places = [key for key in value if type(key) is int and type(value) is _Level]
        if len(places) == len(value) and min(places) >= 0 and max(places) < len(places) + GAP:
            held = [value.get(place, NoneEntry("None")) for place in range(max(places) + 1)]
        made = make_container(held)
        if made is None:
            raise ValueError(f"{path[:200]}: names must be distinct")
        entry, children = made
        manifest[path] = entry
        for name, child in zip(entry.components(), children, strict=True):
            self._place_value(manifest, f"{path}/{name}", child)

    def _build_entry(self, name: str, described: Any) -> Any:
        if type(name) is not str:
            raise ValueError(f"a name must be a str, got {pickle_nodes.show_value(name)}")
        if _is_named(described, "BytesStorageMetadata"):
            begin, end, location, transform = self._find_range(self._stored.get((name, None)), name)
            kind = f"{transform}+torch_save" if transform else "torch_save"
            return ObjectEntry(location, (begin, end), kind, "value")
        if not _is_named(described, "TensorStorageMetadata"):
            raise UnsupportedFormatError(
                f"{self._where}: {name[:200]}: unknown kind of item: {pickle_nodes.show_value(described)}"
            )
        fields = pickle_nodes.read_fields(described)
        dtype = _read_dtype(fields["properties"])
        shape = self._check_sizes(fields["size"])
        shards = []
        grid = self._find_grid(name, shape)
        self._chunks -= len(fields["chunks"])
        if self._chunks < 0:
            raise ValueError("too many repeated values")
        for chunk in fields["chunks"]:
            box = pickle_nodes.read_fields(chunk)
            offsets, sizes = self._check_sizes(box["offsets"]), self._check_sizes(box["sizes"])
            place = self._stored.get((name, offsets))
            if place is None and not math.prod(sizes):
                continue
            begin, end, location, transform = self._find_range(place, name)
            if not transform and 0 < end - begin == math.prod(sizes) * ITEMSIZE[dtype]:  # an archive is longer
                raise UnsupportedFormatError(
                    f"{self._where}: {name[:200]}: was saved with SerializationFormat.SAFETENSORS, and the metadata "
                    f"lacks its position; {location} is a file of safetensors"
                )
            kind = f"{transform}+torch_save" if transform else "torch_save"
            stored = TensorEntry(location, (begin, end), dtype, sizes, serializer=kind)
            if grid is None:
                shards.append(Shard(offsets, sizes, stored))
                continue
            boxes = grid.cut(stored, offsets, sizes)
            self._chunks -= len(boxes)
            shards += boxes
        shape = shape if grid is None else grid.shape
        if len(shards) == 1 and shards[0].sizes == shape:
            return shards[0].tensor
        return ShardedTensorEntry(dtype, shape, shards)

    def _find_grid(self, name: str, shape: tuple[int, ...]) -> FlatGrid | None:
        """Return the grid of a tensor that Megatron-core saved by flat ranges; None for other tensors."""
        held = self._flattened.get(name)
        given = held.get("nd_reformulated_orig_global_shape") if isinstance(held, dict) else None
        return None if given is None else FlatGrid.of(self._check_sizes(given), shape)

    def _find_range(self, place: Any, name: str) -> tuple[int, int, str, str]:
        if place is None:
            raise ValueError(f"the location of {name[:200]!r} is missing")
        location = check_location(place["relative_path"], self._where)
        begin, length = place["offset"], place["length"]
        if type(begin) is not int or type(length) is not int or begin < 0 or length < 0 or begin + length >= 1 << 62:
            raise ValueError(
                f"{name[:200]!r}: invalid range: {pickle_nodes.show_value(begin)}, {pickle_nodes.show_value(length)}"
            )
        extend_file(self.files, location, begin + length)
        transforms = place.get("transform_descriptors") or []
        if not transforms:
            return begin, begin + length, location, ""
        shown = [pickle_nodes.show_value(each) for each in transforms[:4]]
        first = transforms[0] if len(transforms) == 1 and type(transforms[0]) is str else ""
        known = _TRANSFORMS.get(first.partition("/")[0])
        if known is None:
            raise UnsupportedFormatError(f"{self._where}: {name[:200]}: unknown transforms {shown}")
        return begin, begin + length, location, known

    def _nest_entries(self, entries: Mapping[str, Any]) -> dict[Any, Any] | None:
        """Return the entries in their saved nesting; None if the nesting is not known for all."""
        if not self._paths or not all(_is_path(self._paths.get(name)) for name in entries):
            return None
        root: dict[Any, Any] = _Level()
        for name, entry in entries.items():
            *above, last = self._paths[name]
            level = root
            for key in above:
                below = level.setdefault(key, _Level())
                if type(below) is not _Level:
                    return None
                level = below
            if last in level:
                return None
            level[last] = entry
        return root


class FlatGrid(NamedTuple):
    """A grid of equal boxes. Each of them was flattened, and saved in runs, as Megatron-core's optimizer does.

    Such a tensor is stored with the shape of the grid, and one more dimension for the elements of a box.
    """

    shape: tuple[int, ...]
    """Shape of the tensor itself."""
    box: tuple[int, ...]
    """Shape of each box."""

    @staticmethod
    def of(shape: tuple[int, ...], stored: tuple[int, ...]) -> FlatGrid:
        """Return the grid of a tensor, from its shape and from the one that it is stored with."""
        *parts, numel = stored
        if len(shape) > MOST_AXES:
            raise ValueError(f"flat ranges in a tensor with {len(shape)} dimensions")
        if len(parts) != len(shape) or any(part < 1 or size % part for size, part in zip(shape, parts, strict=True)):
            raise ValueError(f"flat ranges of shape {stored} in a tensor of shape {shape}")
        box = tuple(size // part for size, part in zip(shape, parts, strict=True))
        if math.prod(box) != numel:
            raise ValueError(f"flat ranges of {numel} elements in boxes of shape {box}")
        return FlatGrid(shape, box)

    def cut(self, stored: TensorEntry, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Shard]:
        """Return the boxes of a stored run, from its place in the grid."""
        *place, begin = offsets
        if sizes[:-1] != (1,) * len(place) or len(offsets) != len(self.shape) + 1:
            raise ValueError(f"a flat range of sizes {sizes}")
        origin = tuple(at * size for at, size in zip(place, self.box, strict=True))
        if begin + sizes[-1] > math.prod(self.box):
            raise ValueError("a flat range ends after its box")
        run = msgspec.structs.replace(stored, shape=sizes[-1:])
        made = []
        for box, part in cut_boxes(run, begin, self.box):
            moved = box.moved_by(origin)
            made.append(Shard(moved.offsets, moved.sizes, part))
        return made


class _Level(dict[Any, Any]):
    """A container, by its keys; a list if its keys are positions."""


def _restore_numbers(state: Any) -> Any:
    """Return an optimizer's state with its numeric keys, which DCP stores as texts."""
    if type(state) is not _Level or not all(type(key) is str and _NUMBER.fullmatch(key) for key in state):
        return state
    return {int(key): each for key, each in state.items()}


_NUMBER = re.compile("0|[1-9][0-9]{0,8}", re.ASCII)


def _is_named(value: Any, name: str) -> bool:
    return isinstance(value, pickle_nodes.StandIn) and value.name == _CLASSES + name


def _is_path(value: Any) -> bool:
    return isinstance(value, tuple) and 0 < len(value) < 400 and all(type(key) in (str, int) for key in value)


def _expect_items(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, got {pickle_nodes.show_value(value)}")
    return list(dict.items(value))


def _read_dtype(properties: Any) -> str:
    """Return the dtype, from the state that torch pickles, or (in old files) from attributes."""
    state = getattr(properties, "state", None)
    found = (
        state[0] if isinstance(state, tuple) and len(state) > 2 else pickle_nodes.read_fields(properties).get("dtype")
    )
    if not isinstance(found, pickle_nodes.Dtype):
        raise ValueError(f"expected a dtype, got {pickle_nodes.show_value(found)}")
    return found.name
