"""Files of safetensors: a single one, or several with an index (Hugging Face's layout)."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from snapshot.aio import gather_limited
from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError, UnsupportedFormatError
from snapshot.formats.foreign import ForeignDocument, check_location, is_absence, make_document
from snapshot.manifest.document import LONGEST_HEADER, ForeignFile
from snapshot.manifest.entries import DictEntry, TensorEntry
from snapshot.manifest.paths import encode_component, encode_key
from snapshot.storage import Storage
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE, SAFETENSORS
from snapshot.text import counted

INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
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
AT_ONCE = 16
SHARD = 5_000_000_000
"""Maximum length of each file of several, as in Hugging Face's libraries."""


class _Item(msgspec.Struct, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: Any = None


async def describe_folder(storage: Storage, limit: int) -> ForeignDocument | None:
    """Return the checkpoint in a folder: an index with its files, or one single file.

    If the storage cannot list files, look for their usual names.
    """
    try:
        return await _describe_named_index(storage, INDEX, limit)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
    try:
        return await describe_file(storage, ALONE, (await storage.stat(ALONE)).size, limit)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
    try:
        names = await storage.list(recursive=False) if storage.capabilities.list else []
    except StorageError:
        names = []
    return await _describe_listed(storage, [name for name in names if not name.endswith("/")], limit)


async def _describe_listed(storage: Storage, names: list[str], limit: int) -> ForeignDocument | None:
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return await _describe_named_index(storage, indices[0], limit)
    if len(files) == 1 and not indices:
        return await describe_file(storage, files[0], (await storage.stat(files[0])).size, limit)
    if len(files) > 1:
        raise UnsupportedFormatError(
            f"{storage.url}: has {len(files)} safetensors files but no index for them; "
            f"open one of them: {storage.url.join(files[0])}"
        )
    return None


async def _describe_named_index(storage: Storage, name: str, limit: int) -> ForeignDocument:
    """Return the checkpoint of a file that is named like an index; raise if it is not one."""
    found = await describe_index(storage, name, limit)
    if found is None:
        raise CorruptSnapshotError(f"{storage.url.join(name)}: not an index of safetensors files")
    return found


async def describe_index(storage: Storage, name: str, limit: int) -> ForeignDocument | None:
    """Return the checkpoint of several files, by their index; None if the index is not of this kind."""
    data = await storage.get(name, limit=limit)
    where = storage.url.join(name)
    try:
        index: _Index = decode_json(data, _Index, where)
    except CorruptSnapshotError:
        return None
    locations = dict.fromkeys(check_location(each, where) for each in index.weight_map.values())

    async def header(location: str) -> tuple[dict[str, Any], Any, int]:
        try:
            size = (await storage.stat(location)).size
            return (*await read_header(storage, location, size, limit), size)
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{where}: refers to {location}, which is missing") from error

    held = dict(zip(locations, await gather_limited(locations, header, AT_ONCE), strict=True))
    entries: dict[str, TensorEntry] = {}
    for tensor, location in index.weight_map.items():
        found = held[location][0].get(tensor)
        if found is None:
            raise CorruptSnapshotError(f"{where}: {tensor[:200]!r} is missing in {location}")
        entries[tensor] = found
    files = {location: ForeignFile(size) for location, (_, _, size) in held.items()}
    metadata: Any = next((each for _, each, _ in held.values() if each), {})
    return _make_document(storage, entries, files, data, metadata)


async def describe_file(storage: Storage, name: str, size: int, limit: int) -> ForeignDocument:
    """Return the checkpoint of a single file."""
    entries, metadata = await read_header(storage, name, size, limit)
    token = (await storage.stat(name)).token
    return _make_document(storage, entries, {name: ForeignFile(size)}, f"{name} {size} {token}".encode(), metadata)


def _make_document(
    storage: Storage, entries: dict[str, TensorEntry], files: dict[str, ForeignFile], token: bytes, metadata: Any
) -> ForeignDocument:
    manifest = {f"0/{encode_component(name)}": entry for name, entry in entries.items()}
    root = DictEntry([encode_key(name) for name in entries])  # type: ignore[misc]
    return make_document(
        "safetensors", "", storage.url, token, manifest=manifest, files=files, metadata=metadata, root=root
    )


async def read_header(
    storage: Storage, name: str, size: int, limit: int
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors in a file's header, and its metadata."""
    where = storage.url.join(name)
    try:
        count = bytearray(8)
        await storage.read_into(name, 0, [count])
        length = int.from_bytes(count, "little")
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
