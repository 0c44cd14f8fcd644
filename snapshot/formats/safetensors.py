"""Files of safetensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats.foreign import ForeignDocument, make_document
from snapshot.formats.unread import POINTER, refuse_file
from snapshot.manifest.document import LONGEST_HEADER, ForeignFile
from snapshot.manifest.entries import DictEntry, TensorEntry
from snapshot.manifest.paths import encode_component, encode_key
from snapshot.storage import Storage
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE, SAFETENSORS
from snapshot.text import counted

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
    token = (await storage.stat(name)).token
    return make_document(
        "safetensors",
        "",
        storage.url,
        f"{name} {size} {token}".encode(),
        manifest={f"0/{encode_component(each)}": entry for each, entry in entries.items()},
        files={name: ForeignFile(size)},
        metadata=metadata,
        root=make_root(entries),
    )


def make_root(names: Iterable[str]) -> DictEntry:
    """Return the container of tensors with these names."""
    return DictEntry([encode_key(name) for name in names])  # type: ignore[misc]


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
