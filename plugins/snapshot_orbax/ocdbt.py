"""Databases of OCDBT, which Orbax stores arrays in: a B+tree of keys, with values in ranges of files.

The format is TensorStore's: https://google.github.io/tensorstore/kvstore/ocdbt. Its version is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from snapshot.errors import CorruptSnapshotError, StorageError, UnsupportedFormatError
from snapshot.formats.foreign import check_location
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.storage import Storage
from snapshot.tensors.split_zstd import load_zstd

MANIFEST = "manifest.ocdbt"
MOST_DECODED = 256 << 20
"""Maximum number of decompressed bytes of all nodes together."""
MOST_NAMED = 1 << 30
"""Maximum number of bytes in memory of all keys and paths together. That suffices for about 3 million keys."""
_PER_NAME = 256
"""Bytes in memory of what belongs to a key or a path, without its own bytes."""
AT_ONCE = 16
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_HEADER = 14
_DEEPEST = 16
_STEP = 1 << 16
"""Number of numbers that are decoded at once."""
_LONGEST = 9
"""Maximum bytes of a number."""

# Checksums: CRC-32C, computed in lanes, since Python has none.

_POLYNOMIAL = 0x82F63B78


def _make_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _make_table()


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < 4:
        register = 0xFFFFFFFF
        for each in bytes(data):
            register = int(_TABLE[(register ^ each) & 0xFF]) ^ (register >> 8)
        return register ^ 0xFFFFFFFF
    length = max(64, 1 << (len(data).bit_length() // 2))
    lanes = -(-len(data) // length)
    padded = np.zeros(lanes * length, np.uint8)  # zeros before the first byte do not change a register of zero
    padded[lanes * length - len(data) :] = np.frombuffer(data, np.uint8)
    begin = lanes * length - len(data)
    padded[begin : begin + 4] ^= 0xFF
    registers = np.zeros(lanes, np.uint32)
    basis = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    for column in padded.reshape(lanes, length).T:
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> np.uint32(8))
        basis = _TABLE[basis & 0xFF] ^ (basis >> np.uint32(8))
    total = 0
    for register in registers.tolist():
        moved = 0
        for bit, image in enumerate(basis.tolist()):
            if total >> bit & 1:
                moved ^= image
        total = moved ^ register
    return total ^ 0xFFFFFFFF


# Nodes: a header, a body that may be compressed, and a checksum.


class _Room:
    """Counts the memory of names. Few bytes can be many long names, since their beginnings are shared."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"its keys take more than {self._most:,} bytes of memory")


class _Body:
    """Reads the columns of a node."""

    def __init__(self, data: bytes, room: _Room) -> None:
        self._data = data
        self._room = room
        self._at = 0

    def take(self, count: int) -> bytes:
        begin = self._at
        if count < 0 or begin + count > len(self._data):
            raise ValueError("a node ends too early")
        self._at += count
        return self._data[begin : self._at]

    def count(self, least: int) -> int:
        """Return a number of entries. Each must have `least` bytes, but two fewer suffice for the first."""
        count = self.varint()
        if count * least - 2 > len(self._data) - self._at:
            raise ValueError("a node has more entries than bytes")
        self._room.take(count * _PER_NAME)
        return count

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            each = self.byte()
            value |= (each & 0x7F) << shift
            shift += 7
            if each < 0x80:
                break
            if shift > 63:
                raise ValueError("a number is too long")
        if value >= 1 << 63:
            raise ValueError("a number is too large")
        return value

    def varints(self, count: int) -> list[int]:
        if count > len(self._data) - self._at:
            raise ValueError("a node has more numbers than bytes")
        made: list[int] = []
        while len(made) < count:
            made += self._some_varints(min(count - len(made), _STEP))
        return made

    def _some_varints(self, count: int) -> list[int]:
        data = self._data[self._at : self._at + _LONGEST * count]
        if data[:count].isascii() and len(data) >= count:  # each is one byte
            self._at += count
            return list(data[:count])
        each = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(each < 0x80)[:count]
        begins = np.concatenate([[0], ends[:-1] + 1])
        if len(ends) < count or (lengths := ends - begins + 1).max() > _LONGEST:
            raise ValueError("a number is too long, or a node ends too early")
        self._at += int(ends[-1]) + 1
        places = np.arange(ends[-1] + 1) - np.repeat(begins, lengths)
        parts = (each[: ends[-1] + 1] & 0x7F).astype(np.int64) << (7 * places)
        found: list[int] = np.add.reduceat(parts, begins).tolist()
        return found

    def texts(
        self, count: int, before: int, *, lengths: Callable[[], list[list[int]]], ordered: bool = True
    ) -> tuple[list[bytes], list[list[int]]]:
        """Return texts that are stored without their common prefixes, and the further columns before them.

        `before`: the number of bytes that the caller puts before each.
        """
        prefixes = [0, *self.varints(count - 1)] if count else []
        suffixes = self.varints(count)
        self._room.take(sum(prefixes) + sum(suffixes) + count * before)
        more = lengths()
        found: list[bytes] = []
        previous = b""
        for prefix, suffix in zip(prefixes, suffixes, strict=True):
            if prefix > len(previous) or prefix + suffix > 65535:
                raise ValueError("a key is too long, or longer than the key before it")
            text = previous[:prefix] + self.take(suffix)
            if ordered and found and text <= previous:
                raise ValueError("the keys of a node are not in order, or one appears twice")
            found.append(text)
            previous = text
        return found, more

    def files(self, transitive: str) -> list[_File]:
        """Return the table of data files."""
        count = self.count(3)
        paths, (bases,) = self.texts(count, 2 * len(transitive), lengths=lambda: [self.varints(count)], ordered=False)
        self._room.take(sum(bases))
        made = []
        for path, base in zip(paths, bases, strict=True):
            if base > len(path):
                raise ValueError("a path is shorter than its base")
            made.append(_File(transitive + path.decode(), transitive + path[:base].decode()))
        return made

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("a node has more bytes than entries")


class _File(NamedTuple):
    path: str
    base: str
    """The beginning of the path that is also the one of all paths in this file's nodes."""


class Stored(NamedTuple):
    """A value in a range of a file."""

    location: str
    begin: int
    end: int


Value = Stored | bytes


class _Child(NamedTuple):
    prefix: bytes
    file: _File
    offset: int
    length: int
    height: int


def _unpack(data: bytes, magic: int, left: int) -> bytes:
    """Return the body of a node or a manifest. Raise ValueError if its checksum or its header is wrong."""
    if len(data) < _HEADER + 6 or int.from_bytes(data[:4], "big") != magic:
        raise ValueError("not a node of OCDBT")
    if int.from_bytes(data[4:12], "little") != len(data):
        raise ValueError("a node has another length than its header says")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError("a node does not match its checksum")
    body = _Body(data[12:14], _Room(0))
    version, method = body.varint(), body.varint()
    if version:
        raise UnsupportedFormatError(f"a database of OCDBT version {version}; this library reads version 0")
    packed = data[14:-4]
    if method == 0:
        if len(packed) > left:
            raise ValueError(f"its nodes have more than {MOST_DECODED:,} bytes")
        return packed
    if method != 1:
        raise UnsupportedFormatError(f"a database of OCDBT with the compression {method}; this library reads zstd")
    zstd = load_zstd()
    try:
        declared = zstd.frame_content_size(packed)
        if declared > left:
            raise ValueError(f"its nodes have more than {MOST_DECODED:,} bytes")
        made = zstd.ZstdDecompressor(max_window_size=1 << 27).decompress(packed, max_output_size=left)
    except zstd.ZstdError as error:
        raise ValueError(f"decompression failed: {error}") from error
    return bytes(made)


def _parse_manifest(body: _Body) -> _Child | None:
    """Return the root of the newest version; None for an empty database."""
    body.take(16)
    if body.varint():
        raise UnsupportedFormatError("a database of OCDBT with numbered manifests, which this library does not read")
    body.varints(2)
    body.byte()
    if body.varint():
        body.take(4)
    files = body.files("")
    count = body.count(16)
    generations = body.varints(count)
    heights = body.take(count)
    ids, offsets, lengths = body.varints(count), body.varints(count), body.varints(count)
    if not count:
        return None
    newest = max(range(count), key=generations.__getitem__)
    if not lengths[newest]:
        return None
    return _Child(b"", _pick(files, ids[newest]), offsets[newest], lengths[newest], heights[newest])


def _parse_node(body: _Body, node: _Child, values: dict[str, Value], where: object) -> list[_Child]:
    """Add the values of a leaf, or return the children of another node."""
    height = body.byte()
    if height != node.height:
        raise ValueError(f"a node must have height {node.height}, got {height}")
    files = body.files(node.file.base)
    count = body.count(10 if height else 5)
    if height:
        keys, (common,) = body.texts(count, len(node.prefix), lengths=lambda: [body.varints(count)])
        ids, offsets, lengths = body.varints(count), body.varints(count), body.varints(count)
        for _ in range(3):
            body.varints(count)
        body.end()
        if any(length > len(key) for length, key in zip(common, keys, strict=True)):
            raise ValueError("a prefix is longer than its key")
        return [
            _Child(node.prefix + key[:length], _pick(files, file), offset, size, height - 1)
            for key, length, file, offset, size in zip(keys, common, ids, offsets, lengths, strict=True)
        ]
    keys, _ = body.texts(count, len(node.prefix), lengths=list)
    sizes, kinds = body.varints(count), body.varints(count)
    if not set(kinds) <= {0, 1}:
        raise ValueError("a value has an unknown kind")
    ids, offsets = body.varints(sum(kinds)), body.varints(sum(kinds))
    far = iter(zip(ids, offsets, strict=True))
    for key, size, kind in zip(keys, sizes, kinds, strict=True):
        name = (node.prefix + key).decode()
        if name in values:
            raise ValueError(f"the key {name[:200]!r} appears twice")
        if kind:
            file, offset = next(far)
            location = check_location(_pick(files, file).path, where)
            values[name] = Stored(location, offset, offset + size)
        else:
            values[name] = body.take(size)
    body.end()
    return []


def _pick(files: list[_File], number: int) -> _File:
    if number >= len(files):
        raise ValueError("a node refers to a file that is not in its table")
    return files[number]


async def read_database(storage: Storage, folder: str, limit: int) -> dict[str, Value]:
    """Return all keys of the newest version, with their values or where these are. `folder` ends with a slash."""
    where = storage.url.join(f"{folder}{MANIFEST}")
    left, room = min(limit, MOST_DECODED), _Room(min(limit, MOST_NAMED))
    values: dict[str, Value] = {}

    async def read(node: _Child) -> bytes:
        if node.height > _DEEPEST:
            raise ValueError(f"a node must have height {_DEEPEST} at most, got {node.height}")
        data = bytearray(node.length)
        location = folder + check_location(node.file.path, where)
        await storage.read_into(location, node.offset, [data])
        return bytes(data)

    def add(node: _Child, data: bytes) -> tuple[list[_Child], int]:
        body = _unpack(data, _NODE_MAGIC, left)
        return _parse_node(_Body(body, room), node, values, where), len(body)

    try:
        data = await storage.get(f"{folder}{MANIFEST}", limit=limit)
        root = _parse_manifest(_Body(_unpack(data, _MANIFEST_MAGIC, left), room))
        nodes = [root] if root is not None else []
        while nodes:
            now, nodes = nodes[:AT_ONCE], nodes[AT_ONCE:]
            if sum(node.length for node in now) > left:
                raise ValueError(f"its nodes have more than {MOST_DECODED:,} bytes")
            for node, packed in zip(now, await gather_limited(now, read, AT_ONCE), strict=True):
                children, size = await in_thread(add, node, packed)
                nodes += children
                left -= size
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{where}: {error}") from None
    except CorruptSnapshotError:
        raise
    except (ValueError, OverflowError) as error:  # names, too: a UnicodeDecodeError is one
        raise CorruptSnapshotError(f"{where}: {error}") from error
    except StorageError as error:
        raise CorruptSnapshotError(f"{where}: a node cannot be read: {error}") from error
    return {key: _below(folder, value) for key, value in values.items()}


def _below(folder: str, value: Value) -> Value:
    return value if isinstance(value, bytes) else value._replace(location=folder + value.location)
