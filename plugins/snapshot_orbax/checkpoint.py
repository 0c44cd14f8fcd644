"""Checkpoints of Orbax: trees of arrays in zarr, in a database of OCDBT or in a folder each. JAX is not needed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError, UnsupportedFormatError
from snapshot.events import log
from snapshot.formats.decompressors import find_decompressor
from snapshot.formats.foreign import ForeignDocument, check_location, extend_file, is_absence, make_dict, make_document
from snapshot.formats.hugging_face import AT_ONCE
from snapshot.formats.pickled_objects import INLINE
from snapshot.formats.registry import SearchedFolder
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot.manifest.containers import Container, DictEntry, ListEntry, TupleEntry
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import ChunkedTensorEntry, Extra, Shard, TensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import make_scalar_entry
from snapshot.tensors.geometry import whole_box
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides
from snapshot.tensors.split_zstd import load_zstd
from snapshot_orbax import ocdbt, zarr
from snapshot_orbax.ocdbt import Stored

FORMAT = "orbax"
TREE = "_METADATA"
"""The file that names the leaves of a tree."""
STEP = "_CHECKPOINT_METADATA"
"""The file of a step, which has one or several items, each in a folder."""
V1 = "orbax.checkpoint"
"""An empty file in the folders that the newer interface saves. A single item there may have any name."""
_STRINGS = "_strings.json"
COMMITTED = "commit_success.txt"
"""The file that ends a save. Earlier versions write it only to storages without renames."""
_UNFINISHED = ".orbax-checkpoint-tmp"
_NUMBERED = re.compile(r"(.*?)([0-9]+)/?")
_LOOKED_AT = 4
"""Number of earlier steps in which `COMMITTED` is looked for."""
_DEFAULT = "default"
"""The item whose name is not a part of the names of its leaves, if a step has no other."""
_SEQUENCE = 1
_DEEPEST = 100
_LONGEST_SCALAR = 256
_LONGEST_STEP = 1 << 20
_LONGEST_INDEX = 16 << 20
"""Maximum bytes of the index of a shard: 16 for each of its chunks."""
_MOST_INDICES = 256 << 20
"""Maximum bytes of the indices of all shards of a checkpoint."""
_MOST_BLANK = 1 << 30
"""Maximum bytes of chunks that are not stored."""
_EMPTY: dict[str, Any] = {
    "Dict": DictEntry([]),
    "List": ListEntry(0),
    "Tuple": TupleEntry(0),
    "NamedTuple": TupleEntry(0),
    "None": make_scalar_entry(None),
    "Unknown": make_scalar_entry(None),
}


class _Key(msgspec.Struct):
    key: str
    key_type: int = 2


class _Value(msgspec.Struct):
    value_type: str = "jax.Array"
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value = msgspec.field(default_factory=_Value)


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    custom_metadata: Any = None


class _StepTimes(msgspec.Struct):
    """The times in `STEP`. Orbax adds the second one when it commits."""

    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None

    @property
    def are_known(self) -> bool:
        return self.init_timestamp_nsecs is not None


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint of a folder: an item, or a step with items. None if it is neither."""
    storage, names, beside, limit = folder.storage, await folder.names(), folder.beside, folder.limit
    if not {TREE, STEP, V1}.intersection(names):
        return None
    if _UNFINISHED in storage.url.location.rpartition("/")[2] or not await _is_finished(storage, names, beside):
        raise UnsupportedFormatError(f"{storage.url}: is a save of Orbax that was not finished")
    if TREE in names:
        return await _describe_items(storage, {"": ""}, TREE, limit)
    folders = [name for name in names if name.endswith("/")]

    found = await gather_limited(folders, lambda folder: _exists(storage, f"{folder}{TREE}"), AT_ONCE)
    items = {folder.rstrip("/"): folder for folder, there in zip(folders, found, strict=True) if there}
    if not items:
        raise UnsupportedFormatError(f"{storage.url}: a checkpoint of Orbax without a tree of arrays ({TREE})")
    if len(items) == 1 and (V1 in names or set(items) == {_DEFAULT}):
        items = {"": next(iter(items.values()))}
    marker = STEP if STEP in names else next(iter(items.values())) + TREE
    return await _describe_items(storage, items, marker, limit)


async def _describe_items(storage: Storage, items: Mapping[str, str], marker: str, limit: int) -> ForeignDocument:
    """Return the checkpoint of items: their names, and their folders. `marker` is the file that names the save."""
    made = _Builder(storage, limit)
    try:
        for item, folder in sorted(items.items()):
            await made.add_item(item, folder)
    except StorageNotFoundError as error:
        raise CorruptSnapshotError(f"{storage.url}: a file of the checkpoint is missing: {error}") from error
    manifest, root = made.finish()
    document = make_document(
        FORMAT,
        "",
        storage.url,
        await storage.get(marker, limit=limit),
        manifest=manifest,
        files=made.files,
        metadata=made.metadata,
    )
    document.root = root
    document.index = marker
    document.set_inline(bytes(made.inline))
    return document


async def _is_finished(storage: Storage, names: Sequence[str], beside: Callable[[URL], Storage]) -> bool:
    """Return False for a save that ended before its commit, on a storage without renames.

    The times of its step tell that. If it has none, a step before it that has a file of its commit does.
    """
    if COMMITTED in names:
        return True
    times = await _read_times(storage, names)
    if times.are_known:
        return times.commit_timestamp_nsecs is not None
    url = storage.url
    above, _, name = url.location.rstrip("/").rpartition("/")
    own = _NUMBERED.fullmatch(name)
    if not above:
        return True
    root = beside(URL(url.scheme, above, url.query))
    try:
        around = await root.list(recursive=False) if root.capabilities.list else []
        times = await _read_times(root, around)  # this folder is an item of a step
        if times.are_known or COMMITTED in around:
            return COMMITTED in around or times.commit_timestamp_nsecs is not None
        others = [match for match in map(_NUMBERED.fullmatch, around) if match is not None]
        before = [each for each in others if own and each[1] == own[1] and int(each[2]) < int(own[2])]
        for each in sorted(before, key=lambda each: -int(each[2]))[:_LOOKED_AT]:
            if await _exists(root, f"{each[1]}{each[2]}/{COMMITTED}"):
                return False
    except StorageError as error:
        log.info("%s: cannot tell if the save was finished: %s", url, error)
    finally:
        await root.close()
    return True


async def _read_times(storage: Storage, names: Sequence[str]) -> _StepTimes:
    if STEP not in names:
        return _StepTimes()
    try:
        data = await storage.get(STEP, limit=_LONGEST_STEP)
        found: _StepTimes = decode_json(data, _StepTimes, storage.url.join(STEP))
    except CorruptSnapshotError:
        return _StepTimes()
    return found


async def _exists(storage: Storage, path: str) -> bool:
    try:
        await storage.stat(path)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
        return False
    return True


class _Node:
    """A container of a tree, while its leaves are added."""

    def __init__(self) -> None:
        self.children: dict[str, Any] = {}
        self.is_sequence = True


class _Builder:
    """Collects the entries of a checkpoint."""

    def __init__(self, storage: Storage, limit: int) -> None:
        self._storage = storage
        self._limit = limit
        self._root = _Node()
        self._left_blank = _MOST_BLANK
        self._left_indices = min(limit, _MOST_INDICES)
        self.files: dict[str, ForeignFile] = {}
        self.inline = bytearray(1)
        self.metadata: dict[str, Any] = {}

    async def add_item(self, item: str, folder: str) -> None:
        """Add the leaves of the tree in a folder."""
        where = self._storage.url.join(f"{folder}{TREE}")
        data = await self._storage.get(f"{folder}{TREE}", limit=self._limit)
        tree: _Tree = decode_json(data, _Tree, where)
        for leaf in tree.tree_metadata.values():
            if not 0 < len(leaf.key_metadata) <= _DEEPEST:
                raise CorruptSnapshotError(
                    f"{where}: a leaf must have 1 to {_DEEPEST} keys, got {len(leaf.key_metadata)}"
                )
        if isinstance(tree.custom_metadata, dict):
            self.metadata |= tree.custom_metadata
        values = await self._read_values(folder, tree)
        strings = await self._read_strings(folder, tree)
        arrays = [leaf for leaf in tree.tree_metadata.values() if _is_array(leaf)]
        made = await gather_limited(arrays, lambda leaf: self._describe_array(folder, leaf, tree, values), AT_ONCE)
        described = dict(zip(map(id, arrays), made, strict=True))
        for leaf in tree.tree_metadata.values():
            name, kind = _name_of(leaf), leaf.value_metadata.value_type
            if id(leaf) in described:
                entry = described[id(leaf)]
            elif kind == "string":
                if name not in strings:
                    raise CorruptSnapshotError(f"{where}: the string {name[:200]!r} is missing in {_STRINGS}")
                entry = make_scalar_entry(strings[name])
                if entry is None:
                    raise UnsupportedFormatError(
                        f"{where}: {name[:200]!r}: a string of {len(strings[name]):,} characters"
                    )
            else:
                entry = _EMPTY.get(kind)
                if entry is None:
                    raise UnsupportedFormatError(f"{where}: {name[:200]!r}: unknown kind of value {kind[:80]!r}")
            self._insert(item, leaf, entry, where)

    async def _read_strings(self, folder: str, tree: _Tree) -> dict[str, str]:
        if not any(leaf.value_metadata.value_type == "string" for leaf in tree.tree_metadata.values()):
            return {}
        name = f"{folder}{_STRINGS}"
        found: dict[str, str] = decode_json(
            await self._storage.get(name, limit=self._limit), dict[str, str], self._storage.url.join(name)
        )
        return found

    async def _read_values(self, folder: str, tree: _Tree) -> dict[str, Stored | bytes]:
        """Return all values of an item by their keys: from a database, or from files."""
        storage = self._storage
        if tree.use_ocdbt is not False:
            try:
                return await ocdbt.read_database(storage, folder, self._limit)
            except StorageNotFoundError:
                if tree.use_ocdbt:
                    raise
        names = [name for name in await storage.list(folder) if not name.endswith((zarr.V2, zarr.V3))]

        async def measure(name: str) -> int:
            return (await storage.stat(name)).size

        sizes = await gather_limited(names, measure, AT_ONCE)
        return {name[len(folder) :]: Stored(name, 0, size) for name, size in zip(names, sizes, strict=True)}

    async def _get(self, folder: str, key: str, values: Mapping[str, Stored | bytes]) -> bytes:
        """Return a short value."""
        value = values.get(key)
        if value is None:  # metadata in a file of its own
            try:
                return await self._storage.get(check_location(f"{folder}{key}", self._storage.url), limit=self._limit)
            except StorageNotFoundError as error:
                raise CorruptSnapshotError(f"{self._storage.url.join(f'{folder}{key}')}: is missing") from error
        return value if isinstance(value, bytes) else await self._read(value, key)

    async def _read(self, value: Stored, key: str) -> bytes:
        length = value.end - value.begin
        if not 0 <= length <= self._limit:
            raise CorruptSnapshotError(f"{self._storage.url}: {key[:200]!r} has {length:,} bytes")
        data = bytearray(length)
        await self._storage.read_into(value.location, value.begin, [data])
        return bytes(data)

    async def _describe_array(self, folder: str, leaf: _Leaf, tree: _Tree, values: Mapping[str, Stored | bytes]) -> Any:
        """Return the entry of an array or a number."""
        name, file = _name_of(leaf), zarr.V3 if tree.use_zarr3 else zarr.V2
        where = self._storage.url.join(f"{folder}{name}/{file}")
        array = zarr.parse_array(file, await self._get(folder, f"{name}/{file}", values), where)
        if not zarr.is_known(array):
            return TensorEntry(INLINE, (0, 0), array.dtype, array.shape)
        indices: dict[str, bytes] = {}
        tail = zarr.index_length(array)
        for key in zarr.shard_keys(array, values, name):
            value = values[key]
            self._left_indices -= tail
            if tail > _LONGEST_INDEX or self._left_indices < 0:
                raise UnsupportedFormatError(f"{where}: an index of a shard with {tail:,} bytes, or too many of them")
            if isinstance(value, bytes):
                indices[key] = value[-tail:]
            elif value.end - value.begin >= tail:
                indices[key] = await self._read(value._replace(begin=value.end - tail), key)
        chunks: list[zarr.Chunk] = await in_thread(list, zarr.find_chunks(array, values, indices, name, where))
        if leaf.value_metadata.value_type == "scalar" and array.shape == () and len(chunks) == 1:
            return await self._read_number(array, chunks[0], name, where)
        shards = [
            Shard(chunk.box.offsets, chunk.box.sizes, self._describe_chunk(array, chunk, where)) for chunk in chunks
        ]
        if not shards:
            return TensorEntry(INLINE, (0, 0), array.dtype, array.shape)
        if len(shards) == 1 and chunks[0].box == whole_box(array.shape):
            return shards[0].tensor
        return ChunkedTensorEntry(array.dtype, array.shape, shards)

    def _describe_chunk(self, array: zarr.ZarrArray, chunk: zarr.Chunk, where: object) -> TensorEntry:
        sizes, strides, serializer = chunk.box.sizes, chunk.strides, zarr.serializer_of(array)
        value = chunk.value
        if value is None:
            _check_blank(array, where)
            value, serializer, strides = self._make_blank(array, sizes, where), "zstd+array", contiguous_strides(sizes)
        elif isinstance(value, bytes):
            begin = len(self.inline)
            self.inline += value
            value = Stored(INLINE, begin, len(self.inline))
        else:
            extend_file(self.files, value.location, value.end)
        extra = None
        if serializer == "raw":
            begin, itemsize = value.begin, ITEMSIZE[array.dtype]
            if value.end - begin != math.prod(array.inner) * itemsize:
                raise CorruptSnapshotError(f"{where}: a chunk has {value.end - begin:,} bytes, not those of its shape")
            if strides == contiguous_strides(sizes):
                value = value._replace(end=begin + math.prod(sizes) * itemsize)
        if strides != contiguous_strides(sizes):
            extra = Extra(strides=strides)
            serializer = "array" if serializer == "raw" else serializer
        return TensorEntry(
            value.location, (value.begin, value.end), array.dtype, sizes, serializer=serializer, extra=extra
        )

    def _make_blank(self, array: zarr.ZarrArray, sizes: tuple[int, ...], where: object) -> Stored:
        """Return compressed zeros for a chunk that is not stored. Its range is its own: equal places are one tensor."""
        nbytes = math.prod(sizes) * ITEMSIZE[array.dtype]
        self._left_blank -= nbytes
        if self._left_blank < 0:
            raise CorruptSnapshotError(f"{where}: more than {_MOST_BLANK:,} bytes of chunks are missing")
        begin, codec = len(self.inline), load_zstd().ZstdCompressor()
        whole = codec.compress(bytes(1 << 20)) if nbytes >> 20 else b""
        self.inline += whole * (nbytes >> 20) + codec.compress(bytes(nbytes & ((1 << 20) - 1)))
        return Stored(INLINE, begin, len(self.inline))

    async def _read_number(self, array: zarr.ZarrArray, chunk: zarr.Chunk, name: str, where: object) -> Any:
        """Return the entry of a number of Python, whose bytes are read now."""
        itemsize = ITEMSIZE[array.dtype]
        data = chunk.value if chunk.value is not None else None
        if isinstance(data, Stored):
            if data.end - data.begin > _LONGEST_SCALAR:
                raise CorruptSnapshotError(f"{where}: a number must have at most {_LONGEST_SCALAR} bytes")
            data = await self._read(data, name)
        if data is None:
            _check_blank(array, where)
            data = bytes(itemsize)
        elif array.codec:
            make = find_decompressor(array.codec)
            assert make is not None, array.codec  # one of `CODECS`
            decompress, packed = make(str(where)), data[:_LONGEST_SCALAR]
            data = b"".join(decompress(packed[at : at + 1]) for at in range(len(packed)))
        if len(data) != itemsize:
            raise CorruptSnapshotError(f"{where}: a number must have {itemsize} bytes, got {len(data)}")
        data = bytes(reversed(data)) if array.swapped else data
        return make_scalar_entry(torch.frombuffer(bytearray(data), dtype=BY_NAME[array.dtype]).item())

    # The tree

    def _insert(self, item: str, leaf: _Leaf, entry: Any, where: object) -> None:
        keys = [*([_Key(item)] if item else []), *leaf.key_metadata]
        node = self._root
        for position, key in enumerate(keys):
            node.is_sequence &= key.key_type == _SEQUENCE
            last = position == len(keys) - 1
            held = node.children.setdefault(key.key, entry if last else _Node())
            if (held is not entry) if last else not isinstance(held, _Node):
                raise CorruptSnapshotError(f"{where}: {_name_of(leaf)[:200]!r} is both a value and a container")
            node = held

    def finish(self) -> tuple[dict[str, Any], Container]:
        """Return the manifest, and the container of all top-level names."""
        manifest: dict[str, Any] = {}

        def walk(path: str, node: _Node) -> Container:
            order = list(node.children)
            numbers = [str(number) for number in range(len(order))]
            is_list = node.is_sequence and set(order) == set(numbers)
            for key in numbers if is_list else order:
                child, below = node.children[key], f"{path}/{encode_component(key)}"
                if isinstance(child, _Node):
                    manifest[below] = None  # before what it contains
                    manifest[below] = walk(below, child)
                else:
                    manifest[below] = child
            return ListEntry(len(order)) if is_list else make_dict(order)

        return manifest, walk("0", self._root)


def _check_blank(array: zarr.ZarrArray, where: object) -> None:
    if not array.blank:
        raise UnsupportedFormatError(f"{where}: has missing chunks, whose fill value is not zero, or is -0.0")


def _is_array(leaf: _Leaf) -> bool:
    value = leaf.value_metadata
    return not value.skip_deserialize and value.value_type != "string" and value.value_type not in _EMPTY


def _name_of(leaf: _Leaf) -> str:
    """Return the name of a leaf in its database, or that of its folder."""
    return ".".join(key.key for key in leaf.key_metadata)
