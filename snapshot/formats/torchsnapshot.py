"""Snapshots of torchsnapshot, the predecessor of this library. Manifests are JSON, or YAML if edited by hand."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from snapshot.decoding import decode_json, decode_yaml
from snapshot.errors import CorruptSnapshotError, StorageNotFoundError, UnsupportedFormatError
from snapshot.formats.foreign import ForeignDocument, check_location, extend_file, make_document
from snapshot.formats.to_entries import make_scalar
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest import entries as e
from snapshot.manifest.containers import DictEntry, ListEntry, OrderedDictEntry
from snapshot.manifest.document import METADATA, ForeignFile, measure_nesting
from snapshot.manifest.paths import encode_component, encode_key, find_tagged_keys
from snapshot.manifest.rank_view import DEEPEST, is_rank
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.text import counted

AT_ONCE = 16
_QUANTISED = {"qint8", "quint8", "qint32"}


async def describe_snapshot(storage: Storage, data: bytes) -> ForeignDocument:
    """Return the snapshot of this manifest."""
    where = storage.url.join(METADATA)
    read = _parse_document(data, where)
    try:
        version, world, manifest = str(read["version"]), read["world_size"], read["manifest"]
        if type(world) is not int or world < 1 or not isinstance(manifest, dict):
            raise ValueError("world_size or entries are missing")
        made = _Manifest(where, manifest, world)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not a manifest: {type(error).__name__}: {error}") from error
    await _measure_files(storage, made)
    return make_document(
        "torchsnapshot", version, storage.url, data, manifest=made.entries, files=made.files, world_size=world
    )


def _parse_document(data: bytes, where: object) -> dict[str, Any]:
    if measure_nesting(data) > DEEPEST:
        raise CorruptSnapshotError(f"{where}: nested more than {DEEPEST} deep")
    try:
        found = decode_json(data, Any, where)
    except CorruptSnapshotError:
        found = _parse_yaml(data, where)
    if not isinstance(found, dict) or not {"version", "world_size", "manifest"} <= found.keys():
        raise CorruptSnapshotError(f"{where}: not a manifest ({counted(len(data), 'byte')})")
    return found


def _parse_yaml(data: bytes, where: object) -> Any:
    if b"manifest:" not in data:
        raise CorruptSnapshotError(f"{where}: not a manifest ({counted(len(data), 'byte')})")
    return decode_yaml(data, f"{where}: neither JSON nor YAML")


async def _measure_files(storage: Storage, made: _Manifest) -> None:
    """Look up the lengths of objects' files, which the manifest does not record."""

    async def measure(location: str) -> int:
        try:
            return (await storage.stat(location)).size
        except StorageNotFoundError:
            return -1

    locations = list(made.whole)
    for location, size in zip(locations, await gather_limited(locations, measure, AT_ONCE), strict=True):
        made.files[location] = ForeignFile(max(size, 0), exact=size >= 0)
        for entry in made.whole[location]:
            entry.byte_range = (0, max(size, 0))


class _Manifest:
    """Translated entries."""

    def __init__(self, where: object, manifest: dict[str, Any], world: int) -> None:
        self._where = where
        self.entries: dict[str, Any] = {}
        self.files: dict[str, ForeignFile] = {}
        self.whole: dict[str, list[Any]] = {}
        """Entries of whole files with unknown length."""
        self._sharded: dict[str, str] = {}
        renamed = {}
        for path in manifest:
            rank, _, logical = path.partition("/")
            if not is_rank(rank, world) or not logical:
                raise ValueError(f"{path[:200]!r} must begin with a rank")
            renamed[path] = f"{rank}/{'/'.join(encode_component(unquote(each)) for each in logical.split('/'))}"
        self._there = manifest.keys()
        self._shared = {path.partition("/")[2] for path, raw in manifest.items() if _is_shared(raw)}
        """Logical paths that the manifest lists for one rank, and that all ranks have."""
        for path, raw in manifest.items():
            made = self._make_entry(path, raw)
            if made is not None:
                self._add_entry(renamed[path], made)
        self._fill_shapes()

    def _add_entry(self, path: str, made: Any) -> None:
        """Add an entry. Join the shards of one tensor, since each rank lists only its own."""
        if made.is_sharded:
            logical = path.partition("/")[2]
            first = self._sharded.setdefault(logical, path)
            if first != path:
                known = self.entries[first]
                seen = {shard.offsets for shard in known.shards}
                known.shards += [shard for shard in made.shards if shard.offsets not in seen]
                return
        self.entries[path] = made

    def _fill_shapes(self) -> None:
        """Compute the global shapes, which are only known from the shards."""
        for path in self._sharded.values():
            entry = self.entries[path]
            if not entry.shards:
                raise ValueError(f"{path[:200]!r} has no shards")
            entry.dtype = entry.shards[0].tensor.dtype
            ends = [[o + s for o, s in zip(each.offsets, each.sizes, strict=True)] for each in entry.shards]
            entry.shape = tuple(map(max, zip(*ends, strict=True)))

    def _has_entry(self, path: str) -> bool:
        return path in self._there or path.partition("/")[2] in self._shared

    def _make_entry(self, path: str, raw: dict[str, Any]) -> Any:
        kind, replicated = raw["type"], raw.get("replicated") is True
        if kind in _DICTS:
            return self._make_dict(_DICTS[kind], path, raw["keys"])
        if kind in _VALUES:
            entry = make_scalar(_VALUES[kind](raw["serialized_value"]))
            assert entry is not None
            entry.replicated = replicated
            return entry
        make: dict[str, Callable[[], Any]] = {
            "list": lambda: ListEntry(self._count_children(path)),
            "Tensor": lambda: self._make_tensor(raw, replicated),
            "ChunkedTensor": lambda: e.ChunkedTensorEntry(
                _parse_dtype(raw["dtype"]), _parse_sizes(raw["shape"]), self._make_shards(raw["chunks"]), replicated
            ),
            "ShardedTensor": lambda: e.ShardedTensorEntry("", (), self._make_shards(raw["shards"])),
            "DTensor": lambda: e.ShardedTensorEntry("", (), self._make_shards(raw["shards"])),
            "object": lambda: self._make_object(raw, str(raw["obj_type"]), replicated),
        }
        if kind not in make:
            raise UnsupportedFormatError(f"{self._where}: {path[:200]}: unknown type {str(kind)[:80]!r}")
        return make[kind]()

    def _make_dict(self, made: Any, path: str, named: list[Any]) -> DictEntry:
        keys = [key for key in named if self._has_entry(_child_path(path, key))]
        if not all(type(key) in (str, int) for key in keys):
            raise ValueError(f"{path[:200]!r}: keys must be str or int")
        return made([encode_key(key) for key in keys], find_tagged_keys(keys) or None)  # type: ignore[no-any-return]

    def _count_children(self, path: str) -> int:
        """Return the number of children of a list, which is only known from the children."""
        length = 0
        while self._has_entry(f"{path}/{length}"):
            length += 1
        return length

    def _make_shards(self, raw: list[dict[str, Any]]) -> list[e.Shard]:
        found = []
        for each in raw:
            tensor = self._make_tensor(each["tensor"], False)
            if not isinstance(tensor, e.TensorEntry):
                raise UnsupportedFormatError(f"{self._where}: shards of {tensor.obj_type} are not supported")
            found.append(e.Shard(_parse_sizes(each["offsets"]), _parse_sizes(each["sizes"]), tensor))
        return found

    def _make_tensor(self, raw: dict[str, Any], replicated: bool) -> Any:
        location = check_location(raw["location"], self._where)
        dtype = str(raw["dtype"]).removeprefix("torch.")
        if dtype in _QUANTISED:
            return self._make_object(raw, f"torch.Tensor of {dtype}", replicated)
        dtype, shape = _parse_dtype(raw["dtype"]), _parse_sizes(raw["shape"])
        if raw["serializer"] == "torch_save":
            entry = e.TensorEntry(location, (0, 0), dtype, shape, replicated=replicated, serializer="torch_save")
            self._make_range(entry, location, raw.get("byte_range"))
            return entry
        if raw["serializer"] != "buffer_protocol":
            raise UnsupportedFormatError(f"{self._where}: unknown serializer {str(raw['serializer'])[:80]!r}")
        given = raw.get("byte_range")
        begin, end = _parse_range(given) if given is not None else (0, math.prod(shape) * ITEMSIZE[dtype])
        extend_file(self.files, location, end)
        return e.TensorEntry(location, (begin, end), dtype, shape, replicated=replicated)

    def _make_object(self, raw: dict[str, Any], kind: str, replicated: bool) -> e.ObjectEntry:
        if raw["serializer"] != "torch_save":
            raise UnsupportedFormatError(f"{self._where}: unknown serializer {str(raw['serializer'])[:80]!r}")
        location = check_location(raw["location"], self._where)
        entry = e.ObjectEntry(location, (0, 0), "torch_save", kind[:200], replicated=replicated)
        self._make_range(entry, location, raw.get("byte_range"))
        return entry

    def _make_range(self, entry: Any, location: str, given: Any) -> None:
        if given is None:
            self.whole.setdefault(location, []).append(entry)
        else:
            entry.byte_range = _parse_range(given)
            extend_file(self.files, location, entry.byte_range[1])


def _is_shared(raw: Any) -> bool:
    return isinstance(raw, dict) and (raw.get("replicated") is True or raw.get("type") in ("ShardedTensor", "DTensor"))


def _child_path(path: str, key: Any) -> str:
    return f"{path}/{str(key).replace('%', '%25').replace('/', '%2F')}"


def _parse_range(given: Any) -> tuple[int, int]:
    begin, end = given
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 1 << 62:
        raise ValueError(f"invalid range {str(given)[:100]}")
    return begin, end


def _parse_sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(each) is int and 0 <= each < 1 << 60 for each in given):
        raise ValueError(f"invalid sizes {str(given)[:100]}")
    return tuple(given)


def _parse_dtype(given: Any) -> str:
    name = str(given).removeprefix("torch.")
    if name not in BY_NAME:
        raise UnsupportedFormatError(f"unknown dtype {str(given)[:80]!r} in this version of torch")
    return name


_DICTS = {"dict": DictEntry, "OrderedDict": OrderedDictEntry}
_VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("<d", base64.b64decode(text, validate=True))[0],
}
