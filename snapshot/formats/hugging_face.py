"""Files of safetensors, and folders in Hugging Face's layout."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    StorageError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.events import log
from snapshot.formats import torch_save
from snapshot.formats.foreign import (
    ForeignDocument,
    check_location,
    is_absence,
    make_dict,
    make_document,
)
from snapshot.formats.mistakes import HEAD, POINTER, refuse_file
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.zip_archive import SIGNATURE
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot.manifest.document import LONGEST_HEADER, ForeignFile
from snapshot.manifest.entries import Shard, ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.tensors.geometry import Box, boxes_overlap
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, SAFETENSORS
from snapshot.text import counted, listed

# Files of safetensors.

_NAMES = {theirs: ours for ours, theirs in SAFETENSORS.items()} | {
    theirs: ours
    for theirs, ours in {
        "C64": "complex64",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F4": "float4_e2m1fn_x2",
    }.items()
    if ours in BY_NAME
}


class _Item(msgspec.Struct, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


async def describe_file(storage: Storage, name: str, size: int, limit: int) -> ForeignDocument:
    """Return the checkpoint of a single file."""
    entries, metadata = await read_header(storage, name, size, limit)
    if _is_shard(name, metadata, storage.url):
        raise UnsupportedFormatError(f"{storage.url.join(name)}: a part of a checkpoint of DCP; open its folder")
    token = (await storage.stat(name)).token
    document = make_document(
        "safetensors",
        "",
        storage.url,
        f"{name} {size} {token}".encode(),
        manifest={f"0/{encode_component(each)}": entry for each, entry in entries.items()},
        files={name: ForeignFile(size)},
        metadata=metadata,
    )
    document.root = make_dict(entries)
    return document


async def read_header(
    storage: Storage, name: str, size: int, limit: int
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors in a file's header, and its metadata."""
    where = storage.url.join(name)
    try:
        count = bytearray(8)
        await storage.read_into(name, 0, [count])
        length = int.from_bytes(count, "little")
        if count == POINTER[:8]:
            raise refuse_file(storage.url, name, POINTER)
        if not 2 <= length <= min(size - 8, LONGEST_HEADER, limit):
            raise ValueError(f"invalid header length {counted(length, 'byte')} in a file of {size}")
        header = bytearray(length)
        await storage.read_into(name, 8, [header])
        return _decode_header(bytes(header), name, 8 + length, size)
    except ValueError as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not a safetensors file: {error}") from error


def _decode_header(header: bytes, name: str, begin: int, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    what = f"{name}: not a safetensors file"
    raw: dict[str, msgspec.Raw] = decode_json(header, dict[str, msgspec.Raw], what)
    text = raw.pop("__metadata__", msgspec.Raw(b"{}"))
    metadata: dict[str, str] | None = decode_json(text, dict[str, str] | None, what)
    entries = {}
    ends = []
    for tensor, item in raw.items():
        found: _Item = decode_json(item, _Item, what)
        dtype = _NAMES.get(found.dtype)
        if dtype is None:
            raise UnsupportedFormatError(f"{name}: {tensor[:200]!r}: unknown dtype {found.dtype!r}")
        low, high = found.data_offsets
        shape = tuple(found.shape)
        if dtype == "float4_e2m1fn_x2" and shape:  # two elements per byte: torch counts the pairs
            shape = (*shape[:-1], -(-shape[-1] // 2))
        if any(each < 0 for each in shape) or high - low != math.prod(shape) * ITEMSIZE[dtype]:
            raise ValueError(f"{tensor[:200]!r}: {found.dtype}{found.shape} does not fit {counted(high - low, 'byte')}")
        entries[tensor] = TensorEntry(name, (begin + low, begin + high), dtype, shape)
        ends.append((low, high))
    position = 0
    for low, high in sorted(ends):  # the safetensors library requires no gaps and no overlaps
        if low != position or high < low:
            raise ValueError(f"tensors overlap, or leave a gap at {position}")
        position = high
    if begin + position != size:
        raise ValueError(f"tensors must end with the file at {size}, got {begin + position}")
    return entries, metadata or {}


# Folders in Hugging Face's layout: one file of safetensors or torch.save, or several with an index.

INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_ALONE = "pytorch_model.bin"
NAMES = (INDEX, ALONE, TORCH_INDEX, TORCH_ALONE)
"""Names of weights in the order in which they are looked up."""
MORE = ("adapter_model.safetensors", "adapter_model.bin", "diffusion_pytorch_model.bin")
"""Names of single files with the weights of adapters and of parts of pipelines."""
_PART = re.compile(r".*-\d+-of-\d+(\.[^.]+)?\.safetensors", re.DOTALL)
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[^.]+)?\.json", re.DOTALL)
"""Names of indices. That of a variant, such as `fp16`, has the name of the variant before its suffix."""
AT_ONCE = 16
SHARD = 5_000_000_000
"""Maximum length of each file of several, as in Hugging Face's libraries."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: Any = None


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint in a folder: an index with its files, or one single file.

    If the storage cannot list files, look for their usual names.
    """
    storage, limit = folder.storage, folder.limit
    if found := await _describe_first(storage, NAMES, limit):
        return found
    try:
        names = await storage.list(recursive=False) if storage.capabilities.list else None
    except StorageError:
        names = None
    if names is None:
        return await _describe_first(storage, MORE, limit)
    return await _describe_listed(storage, [name for name in names if not name.endswith("/")], limit)


async def _describe_first(storage: Storage, names: Iterable[str], limit: int) -> ForeignDocument | None:
    """Return the checkpoint of the first of some names that exists."""
    for name in names:
        try:
            return await _describe_named(storage, name, limit)
        except StorageError as error:
            if not is_absence(storage, error):
                raise
    return None


async def _describe_named(storage: Storage, name: str, limit: int) -> ForeignDocument:
    """Return the checkpoint of a file, by its name. Raise for an index that is not one."""
    if name.endswith(".json"):
        found = await describe_index(storage, name, limit)
        if found is None:
            raise CorruptSnapshotError(f"{storage.url.join(name)}: not an index of weights")
        return found
    size = (await storage.stat(name)).size
    if name.endswith(".safetensors"):
        return await describe_file(storage, name, size, limit)
    await _expect_archive(storage, name, size)
    return await torch_save.describe_file(storage, name, size, limit)


async def _expect_archive(storage: Storage, name: str, size: int) -> None:
    """Raise an error that names the format of a file if torch.save did not write it."""
    head = bytearray(min(HEAD, size))
    await storage.read_into(name, 0, [head])
    if not head.startswith(SIGNATURE):
        raise refuse_file(storage.url, name, bytes(head))


async def _describe_listed(storage: Storage, names: list[str], limit: int) -> ForeignDocument | None:
    indices = [name for name in names if _INDEX.fullmatch(name)]
    files = [name for name in names if name.endswith(".safetensors")]
    if not indices and files and all(map(SHARD_FILE.fullmatch, files)):
        return await _describe_shards(storage, sorted(files), limit)
    if len(indices) == 1:
        return await _describe_named(storage, indices[0], limit)
    if len(files) == 1 and not indices:
        return await _describe_named(storage, files[0], limit)
    if len(indices) > 1:
        raise UnsupportedFormatError(
            f"{storage.url}: has {len(indices)} checkpoints; open the index of one of them:{listed(sorted(indices))}"
        )
    if len(files) > 1:
        return await _describe_together(storage, sorted(files), limit)
    return await _describe_first(storage, (name for name in MORE if name in names), limit)


async def _describe_together(storage: Storage, files: Sequence[str], limit: int) -> ForeignDocument:
    """Return the checkpoint of several files of safetensors without an index, if no name is in two of them.

    Numbered parts need their index. Without one, they may be of two conversions or downloads, the last one incomplete.
    """
    if any(map(_PART.fullmatch, files)):
        raise UnsupportedFormatError(
            f"{storage.url}: has {len(files)} safetensors files but no index for them, so these parts may be of "
            f"different saves, as after an interrupted conversion or download; get the index, or open one of "
            f"them:{listed(files)}"
        )

    read_files = await _read_headers(storage, files, limit)
    entries: dict[str, TensorEntry] = {}
    for name, (own, metadata, *_) in read_files.items():
        if _is_shard(name, metadata, storage.url):
            raise UnsupportedFormatError(
                f"{storage.url}: {name} is a part of a checkpoint of DCP, and other files are not; put the parts "
                f"into a folder of their own:{listed(files)}"
            )
        if twice := sorted(own.keys() & entries.keys()):
            raise UnsupportedFormatError(
                f"{storage.url}: has {len(files)} safetensors files but no index for them, and {name} and "
                f"{entries[twice[0]].location} both have {twice[0][:200]!r}, so they are several checkpoints; open one "
                f"of them:{listed(files)}"
            )
        entries |= own
    return _document_of(storage, read_files, entries)


_ReadFiles = Mapping[str, tuple[dict[str, TensorEntry], dict[str, str], int, str]]
"""Name -> the tensors and the metadata in the file's header, its size, and its token."""


async def _read_headers(storage: Storage, files: Sequence[str], limit: int) -> _ReadFiles:
    async def read(name: str) -> tuple[dict[str, TensorEntry], dict[str, str], int, str]:
        found = await storage.stat(name)
        return (*await read_header(storage, name, found.size, limit), found.size, found.token)

    return dict(zip(files, await gather_limited(files, read, AT_ONCE), strict=True))


def _document_of(
    storage: Storage, read_files: _ReadFiles, entries: Mapping[str, TensorEntry | ShardedTensorEntry]
) -> ForeignDocument:
    document = make_document(
        "safetensors",
        "",
        storage.url,
        repr([(name, size, token) for name, (_, _, size, token) in read_files.items()]).encode(),
        manifest={f"0/{encode_component(each)}": entry for each, entry in entries.items()},
        files={name: ForeignFile(size) for name, (_, _, size, _) in read_files.items()},
        metadata=next((metadata for _, metadata, _, _ in read_files.values() if metadata), {}),
    )
    document.root = make_dict(entries)
    return document


# Parts of tensors, as DCP's `HuggingFaceStorageWriter(save_distributed=True)` writes them: each rank has its own files.

SHARD_FILE = re.compile(r"shard-(?P<rank>\d+)-model-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")
SHARDING = "DCP_SHARDING_INFO"
"""Key in the metadata of a header, with the offsets of each tensor of the file in the whole one."""


class _Saved(msgspec.Struct):
    saved_offsets: list[int]


def _is_shard(name: str, metadata: Mapping[str, str], url: URL) -> bool:
    """Return True if a file has parts of tensors. Files of whole tensors may have the key, too."""
    offsets = _read_offsets(metadata, url.join(name))
    return bool(offsets) and (SHARD_FILE.fullmatch(name) is not None or any(map(any, offsets.values())))


def _read_offsets(metadata: Mapping[str, str], where: URL) -> dict[str, list[int]]:
    if SHARDING not in metadata:
        return {}
    found: dict[str, _Saved] = decode_json(metadata[SHARDING].encode(), dict[str, _Saved], f"{where}: {SHARDING}")
    return {name: each.saved_offsets for name, each in found.items()}


async def _describe_shards(storage: Storage, files: Sequence[str], limit: int) -> ForeignDocument:
    """Return the checkpoint whose ranks wrote these files. Parts that are missing are errors, as far as they show."""
    matches = [match for match in map(SHARD_FILE.fullmatch, files) if match is not None]
    if len({match["parts"] for match in matches}) > 1:
        raise UnsupportedFormatError(f"{storage.url}: these parts are of different saves:{listed(files)}")
    absent = {*range(1, int(matches[0]["parts"]) + 1)} - {int(match["part"]) for match in matches}
    if absent:
        raise CorruptSnapshotError(
            f"{storage.url}: files of {len(absent)} of {int(matches[0]['parts'])} parts are missing, such as "
            f"model-{min(absent):05}"
        )
    read_files = await _read_headers(storage, files, limit)
    shards: dict[str, list[Shard]] = {}
    for name, (own, metadata, _, _) in read_files.items():
        where = storage.url.join(name)
        offsets = _read_offsets(metadata, where)
        for tensor, entry in own.items():
            begin = offsets.get(tensor)
            if begin is None or len(begin) != len(entry.shape) or any(each < 0 for each in begin):
                raise CorruptSnapshotError(
                    f"{where}: {SHARDING} must have the offsets of {tensor[:200]!r}, got {begin}"
                )
            shards.setdefault(tensor, []).append(Shard(tuple(begin), entry.shape, entry))
    return _document_of(storage, read_files, {name: _join(name, held, storage.url) for name, held in shards.items()})


def _join(name: str, shards: Sequence[Shard], url: URL) -> TensorEntry | ShardedTensorEntry:
    """Return the tensor of some parts, whose shape follows from them."""
    first = shards[0].tensor
    if {(len(each.sizes), each.tensor.dtype) for each in shards} != {(len(first.shape), first.dtype)}:
        raise CorruptSnapshotError(
            f"{url}: the parts of {name[:200]!r} have different dtypes, or numbers of dimensions"
        )
    ends = [[begin + size for begin, size in zip(each.offsets, each.sizes, strict=True)] for each in shards]
    shape = tuple(map(max, zip(*ends, strict=True)))
    held = [each for each in shards if each.tensor.nbytes]
    if len(shards) == 1 and shards[0].sizes == shape:
        return first
    entry = ShardedTensorEntry(first.dtype, shape, list(held))
    try:
        overlap = boxes_overlap([Box(each.offsets, each.sizes) for each in held])
    except ValueError as error:
        raise CorruptSnapshotError(f"{url}: {name[:200]!r}: {error}") from error
    if overlap or not entry.is_whole():
        raise CorruptSnapshotError(
            f"{url}: the parts of {name[:200]!r} {'overlap' if overlap else 'leave gaps, so a file is missing'}"
        )
    return entry


async def describe_index(storage: Storage, name: str, limit: int) -> ForeignDocument | None:
    """Return the checkpoint of several files, by their index; None if the index is not of this kind."""
    data = await storage.get(name, limit=limit)
    where = storage.url.join(name)
    try:
        index: _Index = decode_json(data, _Index, where)
    except CorruptSnapshotError:
        return None
    wanted: dict[str, list[str]] = {}
    for tensor, location in index.weight_map.items():
        wanted.setdefault(check_location(location, where), []).append(tensor)
    reader = _IndexReader(storage, where, limit, index.weight_map.keys())
    await gather_limited(wanted.items(), lambda item: reader.read_file(*item), AT_ONCE)
    manifest = {path: entry for each in wanted for path, entry in reader.entries[each].items()}
    if reader.unlisted:
        log.warning(
            "%s: does not list %s, which its files have; they are read, too:%s",
            where,
            counted(len(reader.unlisted), "tensor"),
            listed([f"{tensor[:200]} in {location}" for tensor, location in sorted(reader.unlisted.items())]),
        )
    document = make_document(
        reader.format,
        "",
        storage.url,
        data,
        manifest=manifest,
        files=reader.files,
        metadata=next((reader.metadata[each] for each in wanted if reader.metadata.get(each)), {}),
    )
    document.root = make_dict([*index.weight_map, *sorted(reader.unlisted)])
    document.index = name
    document.set_inline(bytes(reader.inline))
    return document


class _IndexReader:
    """Reads the descriptions of the files that an index names."""

    def __init__(self, storage: Storage, where: object, limit: int, known: Collection[str]) -> None:
        """`known`: all names in the index."""
        self._known = known
        self.unlisted: dict[str, str] = {}
        """Names that files have and the index lacks, and the file of each."""
        self._storage = storage
        self._where = where
        self._limit = limit
        self._left = limit
        """Remaining length of all pickles together."""
        self.format = "safetensors"
        self.files: dict[str, ForeignFile] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.metadata: dict[str, Any] = {}
        self.inline = bytearray()

    async def read_file(self, location: str, names: list[str]) -> None:
        """Add the tensors of these names in a file, and of those that the index lacks."""
        try:
            size = (await self._storage.stat(location)).size
            if location.endswith(".safetensors"):
                entries, self.metadata[location] = await read_header(self._storage, location, size, self._limit)
                chosen = [*names, *self._add_unlisted(location, entries)]
                found = {f"0/{encode_component(name)}": entries[name] for name in chosen}
            else:
                found = await self._read_archive(location, size, names)
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{self._where}: refers to {location}, which is missing") from error
        except KeyError as error:
            raise CorruptSnapshotError(
                f"{self._where}: {str(error.args[0])[:200]!r} is missing in {location}"
            ) from error
        self.files[location], self.entries[location] = ForeignFile(size), found

    def _add_unlisted(self, location: str, names: Iterable[Any]) -> list[str]:
        found = [name for name in names if isinstance(name, str) and name not in self._known]
        for name in found:
            if name in self.unlisted:
                raise CorruptSnapshotError(
                    f"{self._where}: does not list {name[:200]!r}, which {self.unlisted[name]} and {location} both have"
                )
            self.unlisted[name] = location
        return found

    async def _read_archive(self, location: str, size: int, names: list[str]) -> dict[str, Any]:
        await _expect_archive(self._storage, location, size)
        saved = await torch_save.TorchFile.open(self._storage, location, size, self._limit)
        self._left -= saved.length
        if self._left < 0:
            raise CorruptSnapshotError(
                f"{self._where}: the pickles of its files exceed the limit of {self._limit:,} bytes"
            )
        self.format = torch_save.FORMAT
        if not isinstance(saved.value, dict):
            raise CorruptSnapshotError(f"{self._storage.url.join(location)}: must have a dict of tensors")
        chosen = [*names, *self._add_unlisted(location, saved.value)]
        return saved.describe_items(
            {encode_component(name): dict.__getitem__(saved.value, name) for name in chosen}, self.inline
        )


# The small files beside the weights in a folder.

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Name endings of files that are not beside the weights, but weights themselves."""
LONGEST_FILE = 256 << 20
"""Maximum size of each further file, such as a tokenizer's."""
GivenFiles = str | os.PathLike[str] | Mapping[str, bytes] | None
"""A local folder that has the files, or their contents by name."""


def check_file_name(name: str, where: object) -> str:
    """Return the name of a file in a folder. Raise `CorruptSnapshotError` for any other path."""
    data = name.encode(errors="replace")
    plain = name and not name.startswith(".") and {"/", "\\", "\0"}.isdisjoint(name) and data.decode() == name
    if not plain or len(data) > 200:
        raise CorruptSnapshotError(
            f"{where}: a file name must be a plain name inside the folder, got {str(name)[:200]!r}"
        )
    return name


class ExtraFiles:
    """The small files of a model, such as its config: contents by name, or a local folder that has them."""

    def __init__(self, given: GivenFiles) -> None:
        self._folder: Path | None = None
        self._contents: dict[str, bytes] = {}
        if given is None:
            return
        if isinstance(given, Mapping):
            for name, data in given.items():
                if not isinstance(name, str) or not isinstance(data, bytes | bytearray | memoryview):
                    raise TypeError(f"files must be bytes by name, got {name!r}: {type(data).__name__}")
                self._contents[check_file_name(name, "files")] = bytes(data)
        elif isinstance(given, (str, os.PathLike)):
            self._folder = Path(given)
            if not self._folder.is_dir():
                raise ValueError(f"files must be a local folder, got {str(given)!r}")
        else:
            raise TypeError(f"files must be a local folder, or contents by name, got {given!r}")
        refused = [name for name in self._contents if name.endswith(WEIGHTS)]
        if refused:
            raise ValueError(f"files must not have weights, got {refused[0]!r}")

    def read(self) -> dict[str, bytes]:
        """Return the contents by name. Weights and hidden files of a folder are left out."""
        found = dict(self._contents)
        if self._folder is not None:
            for path in sorted(self._folder.iterdir()):
                if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
                    if path.stat().st_size > LONGEST_FILE:
                        raise SnapshotError(f"{path}: is too large for a file beside the weights")
                    found[path.name] = path.read_bytes()
        return found
