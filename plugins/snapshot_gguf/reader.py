"""Files of GGUF, the format of llama.cpp: their header, and tensors whose elements are in blocks."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from snapshot.errors import CorruptSnapshotError, StorageNotFoundError, UnsupportedFormatError
from snapshot.events import log
from snapshot.formats.derived import place_bytes
from snapshot.formats.foreign import ForeignDocument, make_dict, make_document
from snapshot.formats.hugging_face import AT_ONCE
from snapshot.formats.mistakes import HEAD, refuse_file
from snapshot.formats.registry import SearchedFolder
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.manifest.document import DerivedFile, ForeignFile
from snapshot.manifest.entries import TensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.tensors.memory import ITEMSIZE
from snapshot.text import counted, listed
from snapshot_gguf.quantised import KINDS, Q8_0, compute_elements, is_installed, is_read

# The header: key-values, and a name, shape, type and offset for each tensor.

SIGNATURE = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
"""Versions with this layout. Version 1, of 2023, had shorter counts."""
ALIGNMENT = "general.alignment"
ARCHITECTURE = "general.architecture"
USUAL_ALIGNMENT = 32
MOST_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor in ggml."""
_MOST_NESTED = 8
_FIRST = 64 << 10
"""Bytes of a file that are read first, to parse its header. Those with a vocabulary are longer: see `_GROWTH`."""
_GROWTH = 4
_LONGEST_TEXT = 16 << 10
"""Characters of the longest text, and values of the longest array, that become metadata. Vocabularies are longer."""
_LONGEST_ARRAY = 256

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

RAW = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
"""Types whose elements are stored as torch has them."""
BLOCK, BLOCK_BYTES = KINDS[Q8_0][1:]
"""Elements and bytes of a block of Q8_0: a float16 factor, and as many eight-bit integers."""


class _TooShort(Exception):
    """The header has at least as many bytes as the argument says."""


class Info(NamedTuple):
    """A tensor in a header."""

    name: str
    shape: tuple[int, ...]
    """The dimensions in torch's order: the reverse of the file's."""
    kind: int
    offset: int
    """Its first byte, from the start of the data on."""


@dataclass(frozen=True)
class Header:
    """A parsed header."""

    values: dict[str, Any]
    """Key-values. Arrays of texts are only their length: see `raw`."""
    raw: dict[str, bytes]
    """Key-values as stored: the name, the type and the value."""
    tensors: list[Info]
    data: int
    """The first byte of the data."""
    alignment: int


class _Cursor:
    """Reads values from the first bytes of a file."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.at = 0

    def skip(self, count: int) -> int:
        """Move on by a number of bytes, and return the position before."""
        begin = self.at
        if begin + count > len(self.data):
            raise _TooShort(begin + count)
        self.at = begin + count
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        length = self.number("Q")
        begin = self.skip(length)
        return self.data[begin : begin + length].decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return a value. An array of texts or arrays becomes its length."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"unknown type {kind} of a value")
        if depth == _MOST_NESTED:
            raise ValueError(f"arrays must nest at most {_MOST_NESTED} deep")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            begin = self.skip(count * struct.calcsize(f"<{code}"))
            if count > _LONGEST_ARRAY:
                return counted(count, "value")
            return list(struct.unpack_from(f"<{count}{code}", self.data, begin))
        for _ in range(count):
            if inner == _TEXT:
                self.skip(self.number("Q"))
            else:
                self.value(inner, depth + 1)
        return counted(count, "value")


def parse_header(data: bytes | bytearray) -> Header:
    """Parse the first bytes of a file. Raise ValueError if they are not a header, and _TooShort if it is longer."""
    cursor = _Cursor(data)
    cursor.skip(len(SIGNATURE))
    version = cursor.number("I")
    if version not in VERSIONS:
        order = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise UnsupportedFormatError(
            f"a GGUF file {order}; convert it with llama.cpp's tools to version {VERSIONS[-1]}"
        )
    tensors, values = cursor.number("Q"), cursor.number("Q")
    found: dict[str, Any] = {}
    raw: dict[str, bytes] = {}
    for _ in range(values):
        begin = cursor.at
        name = cursor.text()
        if name in found:
            raise ValueError(f"the key {name[:200]!r} appears twice")
        found[name] = cursor.value(cursor.number("I"))
        raw[name] = bytes(data[begin : cursor.at])
    infos = [_parse_tensor(cursor) for _ in range(tensors)]
    if len({info.name for info in infos}) != len(infos):
        raise ValueError("two tensors have the same name")
    alignment = found.get(ALIGNMENT, USUAL_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"invalid alignment {str(alignment)[:80]}")
    return Header(found, raw, infos, -(-cursor.at // alignment) * alignment, alignment)


def _parse_tensor(cursor: _Cursor) -> Info:
    name, count = cursor.text(), cursor.number("I")
    if count > MOST_DIMENSIONS:
        raise ValueError(f"{name[:200]!r}: must have at most {MOST_DIMENSIONS} dimensions, got {count}")
    shape = tuple(reversed([cursor.number("Q") for _ in range(count)]))
    if math.prod(max(1, size) for size in shape) >= 1 << 60:
        raise ValueError(f"{name[:200]!r}: invalid shape {list(shape)}")
    return Info(name, shape, cursor.number("I"), cursor.number("Q"))


async def read_header(storage: Storage, name: str, size: int, limit: int) -> Header:
    """Return the header of a file. Only the first bytes of the file are read."""
    where = storage.url.join(name)
    longest = min(size, limit)
    data, wanted = bytearray(), min(_FIRST, longest)
    while True:
        begin = len(data)
        data.extend(bytes(wanted - begin))
        with memoryview(data)[begin:] as more:
            await storage.read_into(name, begin, [more])
        if not data.startswith(SIGNATURE):
            raise refuse_file(storage.url, name, bytes(data[:HEAD]))
        try:
            return parse_header(data)
        except _TooShort as short:
            if short.args[0] > longest:
                raise CorruptSnapshotError(
                    f"{where}: not a GGUF file: its header would have more than {counted(longest, 'byte')}"
                ) from None
            wanted = min(longest, max(_GROWTH * len(data), short.args[0]))
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{where}: {error}") from None
        except ValueError as error:  # texts, too: a UnicodeDecodeError is one
            raise CorruptSnapshotError(f"{where}: not a GGUF file: {error}") from error


# Tensors of Q8_0: blocks of 32 eight-bit numbers with a common factor.
#
# A product of a float16 and an eight-bit integer has at most 19 significant bits, so float32 has it exactly.

_AT_ONCE = 1024
"""Blocks that are computed at once: they stay in a core's cache, and torch starts no threads for them."""
_LARGEST = 4 << 20
"""Maximum stored bytes that are read at once."""


def dequantise(stored: torch.Tensor, target: torch.Tensor) -> None:
    """Compute float32 elements from whole blocks: bytes, and their place."""
    for begin in range(0, len(stored), _AT_ONCE):
        blocks = stored[begin : begin + _AT_ONCE]
        factors = blocks[:, :2].contiguous().view(torch.float16).to(torch.float32)
        torch.mul(blocks[:, 2:].view(torch.int8), factors, out=target[begin : begin + _AT_ONCE])


def quantise(source: torch.Tensor, target: torch.Tensor) -> None:
    """Compute whole blocks from float32 elements, with the same bits as ggml: one row for each block on both sides."""
    for begin in range(0, len(source), _AT_ONCE):
        values, blocks = source[begin : begin + _AT_ONCE], target[begin : begin + _AT_ONCE]
        factors = values.abs().amax(1, keepdim=True).div_(127)
        stored = factors.to(torch.float16)
        if not stored.isfinite().all():
            raise ValueError("has values that are too large for Q8_0, or not finite")
        inverse = torch.where(factors == 0, factors, torch.div(torch.ones(()), factors))
        scaled = values * inverse
        # the nearest integer, and of two the one further from zero
        whole = scaled.abs().floor_()
        whole += (scaled.abs().sub_(whole)).mul_(2).floor_()
        blocks[:, 2:].view(torch.int8).copy_(whole.copysign_(scaled))
        blocks[:, :2].copy_(stored.view(torch.uint8))


@dataclass(frozen=True)
class Dequantised:
    """The float32 elements of a tensor whose elements are in blocks."""

    source: str
    begin: int
    """The first byte of its blocks."""
    kind: int = Q8_0

    @property
    def sources(self) -> tuple[str]:
        """The file that has the blocks."""
        return (self.source,)

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Read the blocks of a range, a few MiB at a time."""
        _, elements, nbytes = KINDS[self.kind]
        width = 4 * elements
        at_once = max(1, min(_LARGEST, memory.limit // max(1, storage.limits.parallel_parts)) // nbytes)
        for view in views:
            first, end = offset // width, -(-(offset + len(view)) // width)
            for number in range(first, end, at_once):
                count = min(at_once, end - number)
                async with memory.slot(arena_bytes(count * nbytes)) as slot:
                    stored = slot.view[: count * nbytes]
                    await storage.read_into(self.source, self.begin + number * nbytes, [stored], token=token)
                    blocks = slot.tensor[: len(stored)].view(count, nbytes)
                    await in_thread(self._fill, blocks, view, number * width - offset)
            offset += len(view)

    def _fill(self, blocks: torch.Tensor, view: memoryview, at: int) -> None:
        """Write the elements of blocks to a view, where the first of them begins at `at`, which may be before it."""
        elements = KINDS[self.kind].elements
        some = max(1, _AT_ONCE * BLOCK // elements)
        for begin in range(0, len(blocks), some):
            held = self._compute(blocks[begin : begin + some])
            place_bytes(view, at + begin * 4 * elements, held.view(torch.uint8).view(-1).numpy().data)

    def _compute(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.kind != Q8_0:
            return compute_elements(self.kind, blocks)
        held = torch.empty(len(blocks), BLOCK)
        dequantise(blocks, held)
        return held


# Files as checkpoints: one file, or the parts of a split one.

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
COUNT = "split.count"
"""The number of files of a checkpoint that was split."""


async def describe_file(storage: Storage, name: str, size: int, limit: int) -> ForeignDocument:
    """Return the checkpoint in a file, with the other parts if it is one of several."""
    header = await read_header(storage, name, size, limit)
    known, count = {name: header}, header.values.get(COUNT, 1)
    if count in (0, 1):
        return await _describe_parts(storage, [name], known, limit)
    found = _PART.fullmatch(name)
    if found is None or int(found[3]) != count:
        raise UnsupportedFormatError(
            f"{storage.url.join(name)}: is one of {str(count)[:80]} parts, so its name must end in "
            f"-00001-of-{str(count)[:80]:>05}{SUFFIX}"
        )
    names = [f"{found[1]}-{number:05d}-of-{found[3]}{SUFFIX}" for number in range(1, count + 1)]
    return await _describe_parts(storage, names, known, limit)


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint in the files of a folder; None if there is none. Raise if there are several."""
    storage, names, limit = folder.storage, await folder.names(), folder.limit
    groups: dict[tuple[str, ...], str] = {}
    for name in sorted(name for name in names if name.endswith(SUFFIX)):
        found = _PART.fullmatch(name)
        groups.setdefault((name,) if found is None else (found[1], found[3]), name)
    if not groups:
        return None
    if len(groups) > 1:
        raise UnsupportedFormatError(
            f"{storage.url}: has {len(groups)} checkpoints of GGUF; open one of them:{listed(list(groups.values()))}"
        )
    [name] = groups.values()
    return await describe_file(storage, name, (await storage.stat(name)).size, limit)


async def _describe_parts(
    storage: Storage, names: Sequence[str], known: Mapping[str, Header], limit: int
) -> ForeignDocument:
    """Return the checkpoint of one or several files. `known`: headers that were read already."""

    async def read(name: str) -> tuple[Header, int, str]:
        try:
            found = await storage.stat(name)
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{storage.url.join(names[0])}: its part {name} is missing") from error
        header = known.get(name) or await read_header(storage, name, found.size, limit)
        return header, found.size, found.token

    found = dict(zip(names, await gather_limited(names, read, AT_ONCE), strict=True))
    manifest: dict[str, TensorEntry] = {}
    files: dict[str, ForeignFile] = {}
    derivations: dict[str, Dequantised] = {}
    for name, (header, size, _) in found.items():
        try:
            entries = _describe_tensors(name, header, size, files, derivations)
        except ValueError as error:
            raise CorruptSnapshotError(f"{storage.url.join(name)}: {error}") from error
        if twice := sorted(entries.keys() & manifest.keys()):
            raise CorruptSnapshotError(f"{storage.url.join(name)}: {twice[0]!r} is in another part, too")
        manifest |= entries
    unread = {_find_kind(each.kind)[0] for header, *_ in found.values() for each in header.tensors if _is_unread(each)}
    if unread and not is_installed():
        kinds = ", ".join(sorted(unread))
        log.warning("%s: tensors of %s are listed, but not read: install the extra 'gguf'", storage.url, kinds)
    values = found[names[0]][0].values
    document = make_document(
        "gguf",
        "",
        storage.url,
        repr([(name, size, token) for name, (_, size, token) in found.items()]).encode(),
        manifest={f"0/{encode_component(name)}": entry for name, entry in manifest.items()},
        files=files,
        metadata={
            key: value for key, value in values.items() if not isinstance(value, str) or len(value) <= _LONGEST_TEXT
        },
    )
    document.root = make_dict(manifest)
    document.derivations = derivations
    return document


def _describe_tensors(
    name: str, header: Header, size: int, files: dict[str, ForeignFile], derivations: dict[str, Dequantised]
) -> dict[str, TensorEntry]:
    """Return the entries of one file. Add it to the files, with a derived one for each tensor in blocks."""
    files[name] = ForeignFile(size)
    entries: dict[str, TensorEntry] = {}
    reach, owner = 0, ""
    ordered = sorted(header.tensors, key=lambda info: info.offset)
    ends = [*(info.offset for info in ordered[1:]), max(0, size - header.data)]
    placed: dict[str, TensorEntry] = {}
    for info, following in zip(ordered, ends, strict=True):
        count = math.prod(info.shape)
        kind, block, width = _find_kind(info.kind)
        if (info.shape[-1] if info.shape else 1) % block:
            raise ValueError(f"{info.name[:200]!r}: rows of {kind} must have multiples of {block} elements")
        length = count // block * width if width else max(0, following - info.offset)
        begin = header.data + info.offset
        if info.offset % header.alignment or (info.offset < reach and count):
            raise ValueError(f"{info.name[:200]!r}: overlaps {owner[:200]!r}, or is not aligned")
        if begin + length > size:
            raise ValueError(f"{info.name[:200]!r}: must end within the file of {size:,}, got {begin + length:,}")
        if count:
            reach, owner = info.offset + length, info.name
        entry = TensorEntry(name, (begin, begin + length), kind, info.shape)
        if is_read(info.kind):
            location = f"{name}/{info.name}"
            files[location] = DerivedFile(4 * count)
            derivations[location] = Dequantised(name, begin, info.kind)
            entry = TensorEntry(location, (0, 4 * count), "float32", info.shape)
        placed[info.name] = entry
    for info in header.tensors:
        entries[info.name] = placed[info.name]
    return entries


def _is_unread(info: Info) -> bool:
    return info.kind in KINDS and not is_read(info.kind)


def _find_kind(number: int) -> tuple[str, int, int]:
    """Return the name of a type, the elements of a block, and its bytes: 0 if they are unknown."""
    if number in RAW:
        return RAW[number], 1, ITEMSIZE[RAW[number]]
    return KINDS.get(number) or (f"ggml-{number}", 1, 0)


# Writing: the header of a new file.

FILE_TYPE = "general.file_type"
QUANTISATION = "general.quantization_version"
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 30, "Q8_0": Q8_0}
_FILE_TYPES = {"float32": 0, "float16": 1, "Q8_0": 7, "bfloat16": 32}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: its type is a dtype, or Q8_0."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = math.prod(self.shape)
        return count // BLOCK * BLOCK_BYTES if self.kind == "Q8_0" else count * ITEMSIZE[self.kind]


def can_hold(kind: str) -> bool:
    """Return True if files of GGUF hold tensors of a dtype, among those that this library writes."""
    return kind in _KINDS


def choose_kind(dtype: str, shape: tuple[int, ...], quantisation: str | None) -> str:
    """Return the type of a tensor. Vectors are float32, as llama.cpp's kernels need them."""
    if len(shape) < 2:
        return "float32"
    return quantisation if quantisation is not None and shape[-1] % BLOCK == 0 else dtype


def encode_header(raw: Mapping[str, bytes], alignment: int, tensors: Sequence[NewTensor]) -> tuple[bytes, list[int]]:
    """Return the header of a new file with its padding, and the offset of each tensor in the file.

    The key-values are copied, apart from those about the types, and about parts of a split file.
    """
    values = {key: value for key, value in raw.items() if not key.startswith("split.") and key != FILE_TYPE}
    kinds = [each.kind for each in tensors if len(each.shape) > 1] or ["float32"]
    values[FILE_TYPE] = _encode_number(FILE_TYPE, _FILE_TYPES[max(kinds, key=kinds.count)])
    if "Q8_0" in kinds:
        values[QUANTISATION] = _encode_number(QUANTISATION, 2)
    parts = [SIGNATURE, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(values)), *values.values()]
    offsets, position = [], 0
    for each in tensors:
        shape = each.shape or (1,)
        parts.append(_encode_text(each.name))
        parts.append(struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), _KINDS[each.kind], position))
        offsets.append(position)
        position = -(-(position + each.nbytes) // alignment) * alignment
    header = b"".join(parts)
    header += bytes(-len(header) % alignment)
    return header, [len(header) + each for each in offsets]


def _encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_number(key: str, value: int) -> bytes:
    return _encode_text(key) + struct.pack("<II", 4, value)
