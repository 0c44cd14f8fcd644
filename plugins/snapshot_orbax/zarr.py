"""Arrays of zarr, versions 2 and 3, as Orbax writes them: their metadata, and the ranges of their chunks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.tensors.geometry import Box, Shape
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides
from snapshot_orbax.ocdbt import Stored, crc32c

V2 = ".zarray"
V3 = "zarr.json"
CODECS = ("zstd", "gzip", "zlib", "blosc")
MOST_MISSING = 100_000
"""Maximum number of chunks of an array that are not stored, since they have only the fill value."""
_NUMPY = re.compile(r"([<>|=])([biufc])(\d+)")
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_ABSENT = (1 << 64) - 1


class ZarrArray(NamedTuple):
    """The metadata of an array."""

    dtype: str
    """The name of the dtype in torch, or the stored name if torch has none."""
    shape: Shape
    chunks: Shape
    """The shape of a stored value: a chunk, or a shard of several."""
    inner: Shape
    """The shape of a chunk. It is `chunks` unless there are shards."""
    sharded: bool
    codec: str
    """The compression of chunks: one of `CODECS`, or an empty text."""
    swapped: bool
    """True if the bytes of an element are in the other order."""
    turned: bool
    """True if the first dimension is the fastest one."""
    blank: bool
    """True if all bytes of the fill value are zero: not for -0.0."""
    prefix: str
    separator: str

    def key(self, index: Sequence[int]) -> str:
        """Return the key of a value, below that of the array."""
        numbers = list(map(str, index))
        if self.prefix:
            return self.separator.join([self.prefix, *numbers])
        return self.separator.join(numbers) or "0"


class _Version2(msgspec.Struct):
    shape: list[int]
    chunks: list[int]
    dtype: Any
    compressor: dict[str, Any] | None = None
    fill_value: Any = None
    filters: list[Any] | None = None
    order: str = "C"
    dimension_separator: str = "."
    zarr_format: int = 2


class _Named(msgspec.Struct):
    name: str
    configuration: dict[str, Any] = {}


class _Version3(msgspec.Struct):
    shape: list[int]
    data_type: Any
    chunk_grid: _Named
    chunk_key_encoding: _Named
    codecs: list[_Named]
    fill_value: Any = None
    node_type: str = "array"
    zarr_format: int = 3


def parse_array(name: str, data: bytes, where: object) -> ZarrArray:
    """Return the metadata of an array. `name`: that of its file."""
    made = _parse_version_2(data, where) if name == V2 else _parse_version_3(data, where)
    for shape in (made.shape, made.chunks, made.inner):
        if min(shape, default=0) < 0 or math.prod(max(1, size) for size in shape) >= 1 << 60:
            raise CorruptSnapshotError(f"{where}: invalid shape {list(shape)}")
    if not len(made.shape) == len(made.chunks) == len(made.inner) or 0 in made.chunks or 0 in made.inner:
        raise CorruptSnapshotError(f"{where}: chunks {list(made.chunks)} do not fit the shape {list(made.shape)}")
    if any(whole % part for whole, part in zip(made.chunks, made.inner, strict=True)):
        raise CorruptSnapshotError(f"{where}: chunks {list(made.inner)} do not divide shards {list(made.chunks)}")
    return made


def _parse_version_2(data: bytes, where: object) -> ZarrArray:
    found: _Version2 = decode_json(data, _Version2, where)
    if found.zarr_format != 2 or found.filters or found.order not in ("C", "F"):
        raise UnsupportedFormatError(f"{where}: an array of zarr with filters, or of another version")
    codec = "" if found.compressor is None else found.compressor.get("id")
    if codec not in ("", *CODECS):
        raise UnsupportedFormatError(
            f"{where}: arrays of zarr must be compressed with {', '.join(CODECS)}, got {str(codec)[:80]!r}"
        )
    if found.dimension_separator not in (".", "/"):
        raise CorruptSnapshotError(f"{where}: invalid separator {found.dimension_separator[:20]!r}")
    dtype, swapped = _read_dtype(found.dtype)
    chunks = tuple(found.chunks)
    return ZarrArray(
        dtype,
        tuple(found.shape),
        chunks,
        chunks,
        sharded=False,
        codec=codec,
        swapped=swapped,
        turned=found.order == "F" and len(chunks) > 1,
        blank=_is_blank(found.fill_value),
        prefix="",
        separator=found.dimension_separator,
    )


def _parse_version_3(data: bytes, where: object) -> ZarrArray:
    found: _Version3 = decode_json(data, _Version3, where)
    grid, encoding = found.chunk_grid, found.chunk_key_encoding
    if found.zarr_format != 3 or found.node_type != "array" or grid.name != "regular":
        raise UnsupportedFormatError(f"{where}: an array of zarr with a grid {grid.name[:80]!r}, or of another version")
    chunks = _read_shape(grid.configuration.get("chunk_shape"), where)
    codecs, inner, sharded = found.codecs, chunks, False
    if len(codecs) == 1 and codecs[0].name == "sharding_indexed":
        given = codecs[0].configuration
        inner, sharded = _read_shape(given.get("chunk_shape"), where), True
        index = [codec.name for codec in _read_codecs(given.get("index_codecs"), where)]
        if index != ["bytes", "crc32c"] or given.get("index_location", "end") != "end":
            raise UnsupportedFormatError(f"{where}: shards of zarr must end with an index of bytes and crc32c")
        codecs = _read_codecs(given.get("codecs"), where)
    names = [codec.name for codec in codecs]
    if names[:1] != ["bytes"] or len(names) > 2 or names[-1] not in ("bytes", *CODECS):
        raise UnsupportedFormatError(
            f"{where}: the codecs of zarr must be bytes and one of {', '.join(CODECS)}, got {', '.join(names)[:200]}"
        )
    dtype, _ = _read_dtype(found.data_type)
    separator = encoding.configuration.get("separator", "/" if encoding.name == "default" else ".")
    if encoding.name not in ("default", "v2") or separator not in (".", "/"):
        raise UnsupportedFormatError(f"{where}: unknown keys of chunks: {encoding.name[:80]!r}")
    return ZarrArray(
        dtype,
        tuple(found.shape),
        chunks,
        inner,
        sharded=sharded,
        codec=names[1] if len(names) > 1 else "",
        swapped=codecs[0].configuration.get("endian", "little") == "big",
        turned=False,
        blank=_is_blank(found.fill_value),
        prefix="c" if encoding.name == "default" else "",
        separator=separator,
    )


def _read_shape(value: Any, where: object) -> Shape:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise CorruptSnapshotError(f"{where}: invalid shape of chunks {str(value)[:80]}")
    return tuple(value)


def _read_codecs(value: Any, where: object) -> list[_Named]:
    try:
        return msgspec.convert(value, list[_Named])
    except msgspec.ValidationError as error:
        raise CorruptSnapshotError(f"{where}: invalid codecs: {error}") from error


def _read_dtype(value: Any) -> tuple[str, bool]:
    """Return the name of a dtype, and True if its bytes are in the other order."""
    found = _NUMPY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return str(value)[:80], False
    name = "bool" if found[2] == "b" else f"{_KINDS[found[2]]}{8 * int(found[3])}"
    return name, found[1] == ">" and int(found[3]) > 1


def _is_blank(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return all(
        each is None or (isinstance(each, (int, float)) and each == 0 and math.copysign(1, each) > 0) for each in parts
    )


# Chunks: where the bytes of each box of an array are.


class Chunk(NamedTuple):
    """A box of an array, and the bytes of its chunk. At the edge, the chunk is larger than the box."""

    box: Box
    value: Stored | bytes | None
    """None for a chunk that is not stored."""
    strides: Shape
    """The steps between elements in the chunk."""


def find_chunks(
    array: ZarrArray, values: Mapping[str, Stored | bytes], indices: Mapping[str, bytes], name: str, where: object
) -> Iterator[Chunk]:
    """Yield the chunks of an array. `indices`: the ends of the shards that have several chunks, by their keys.

    Raise if more chunks are missing than an honest array may have, before any memory is allocated for them.
    """
    counts = [-(-size // step) for size, step in zip(array.shape, array.inner, strict=True)]
    if math.prod(counts) > len(values) + len(indices) * math.prod(_per_shard(array)) + MOST_MISSING:
        raise CorruptSnapshotError(f"{where}: has {math.prod(counts):,} chunks, but only {len(values):,} values")
    tables: dict[str, np.ndarray] = {}
    strides = contiguous_strides(array.inner)
    if array.turned:
        strides = tuple(reversed(contiguous_strides(tuple(reversed(array.inner)))))
    for index in itertools.product(*map(range, counts)):
        offsets = tuple(number * step for number, step in zip(index, array.inner, strict=True))
        sizes = tuple(
            min(step, size - begin) for step, size, begin in zip(array.inner, array.shape, offsets, strict=True)
        )
        outer = tuple(begin // step for begin, step in zip(offsets, array.chunks, strict=True))
        key = f"{name}/{array.key(outer)}"
        value = values.get(key)
        if array.sharded and value is not None:
            if key in indices and key not in tables:
                tables[key] = _read_index(indices[key], key, where)
            value = _find_in_shard(array, value, offsets, tables.get(key), key=key, where=where)
        yield Chunk(Box(offsets, sizes), value, strides)


def shard_keys(array: ZarrArray, values: Mapping[str, Stored | bytes], name: str) -> list[str]:
    """Return the keys of shards whose indices must be read: those with several chunks."""
    if not array.sharded or math.prod(_per_shard(array)) == 1:
        return []
    begin = f"{name}/{array.prefix}{array.separator}" if array.prefix else f"{name}/"
    return [key for key in values if key.startswith(begin) and not key.endswith(V3)]


def index_length(array: ZarrArray) -> int:
    """Return the bytes of the index at the end of a shard: an offset and a length for each chunk, and a checksum."""
    return 16 * math.prod(_per_shard(array)) + 4


def _per_shard(array: ZarrArray) -> list[int]:
    return [whole // part for whole, part in zip(array.chunks, array.inner, strict=True)]


def _read_index(index: bytes, key: str, where: object) -> np.ndarray:
    """Return the begin and the length of each chunk of a shard. They are a view of the bytes."""
    if len(index) % 16 != 4 or crc32c(index[:-4]) != int.from_bytes(index[-4:], "little"):
        raise CorruptSnapshotError(f"{where}: the index of {key[:200]!r} does not match its checksum")
    return np.frombuffer(index, "<u8", len(index) // 8).reshape(-1, 2)


def _find_in_shard(
    array: ZarrArray, value: Stored | bytes, offsets: Shape, table: np.ndarray | None, *, key: str, where: object
) -> Stored | bytes | None:
    """Return a chunk of a shard. A shard with one chunk needs no table: the chunk is all that precedes it."""
    length = value.end - value.begin if isinstance(value, Stored) else len(value)
    tail = index_length(array)
    if length < tail:
        raise CorruptSnapshotError(f"{where}: {key[:200]!r} is shorter than the index of a shard")
    counts = _per_shard(array)
    if math.prod(counts) == 1:
        begin, size = 0, length - tail
        if not size:
            return None
    else:
        if table is None or len(table) != math.prod(counts):
            raise CorruptSnapshotError(f"{where}: the index of {key[:200]!r} is missing")
        number = 0
        for count, part, at in zip(counts, array.inner, offsets, strict=True):
            number = number * count + at // part % count
        begin, size = table[number].tolist()
        if begin == size == _ABSENT:
            return None
        if begin + size > length - tail:
            raise CorruptSnapshotError(f"{where}: a chunk of {key[:200]!r} ends after its shard")
    if isinstance(value, Stored):
        return Stored(value.location, value.begin + begin, value.begin + begin + size)
    return value[begin : begin + size]


def serializer_of(array: ZarrArray) -> str:
    """Return the serializer of an array's chunks; `raw` for plain bytes."""
    transforms = [*([array.codec] if array.codec else []), *(["swapped"] if array.swapped else [])]
    return "+".join([*transforms, "array"]) if transforms else "raw"


def is_known(array: ZarrArray) -> bool:
    """Return True if torch has the dtype of an array."""
    return array.dtype in BY_NAME and array.dtype in ITEMSIZE
