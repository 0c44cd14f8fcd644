"""Chunks in the format of Blosc 1, decompressed block by block."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.tensors.split_zstd import load_zstd

_HEADER = struct.Struct("<4B3I")
_KINDS = ("blosclz", "lz4", "snappy", "zlib", "zstd")
_SHUFFLED, _COPIED, _BITS_SHUFFLED, _WHOLE = 1, 2, 4, 16
_MOST_BLOCK = 16 << 20
"""Maximum bytes of a block. Blosc makes blocks of a few MiB."""
_MOST_BLOCKS = 1 << 20
_MOST_HELD = 64 << 20
"""Maximum bytes that are held, and that become complete at once, if the blocks of a chunk are not in order."""
_SHORTEST = 128
"""Blosc does not split blocks whose parts would be shorter."""


class Blosc:
    """Decompressor of one chunk, whose bytes are given in pieces."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held = bytearray()
        self._begin = 0
        """Position of the first held byte in the chunk."""
        self._seen = False
        self._flags = self._width = self._size = self._block = self._length = 0
        self._begins = np.empty(0, np.int64)
        self._needed = self._begins
        """For each block, the first stored byte of it and all later ones."""
        self._done = 0
        """Number of blocks that were decompressed."""
        self._used = 0
        """Number of stored bytes of these blocks."""
        self._wanted = _HEADER.size
        """Position in the chunk up to which bytes must arrive before more can be done."""
        self._decompress: Callable[[bytes, int], bytes] = decompress_lz4

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes of the blocks that are complete now, in order."""
        self._held += data
        try:
            return self._take()
        except (ValueError, IndexError, struct.error, zlib.error) as error:
            if isinstance(error, (CorruptSnapshotError, UnsupportedFormatError)):
                raise
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error

    def _take(self) -> bytes:
        if self._begin + len(self._held) < self._wanted or (not self._seen and not self._read_header()):
            return b""
        made, total = [], 0
        while self._done < len(self._begins) and (block := self._read_block()) is not None:
            made.append(block)
            total += len(block)
            self._done += 1
            if self._used > self._length:
                raise ValueError("the blocks of a chunk of Blosc overlap")
            if total > _MOST_HELD:
                break
        if max(total, len(self._held)) > _MOST_HELD:
            raise UnsupportedFormatError(f"{self._path}: the blocks of a chunk of Blosc are far out of order")
        return b"".join(made)

    def _read_header(self) -> bool:
        """Read the header and the begins of all blocks. Return False if they are not complete."""
        version, _, self._flags, self._width, self._size, self._block, self._length = _HEADER.unpack_from(self._held)
        kind = self._flags >> 5
        count = -(-self._size // self._block) if self._block else 0
        if (
            version != 2
            or not self._width
            or count > _MOST_BLOCKS
            or (self._size and not 0 < self._block <= _MOST_BLOCK)
        ):
            raise UnsupportedFormatError(f"{self._path}: a chunk of Blosc of version {version}, or with huge blocks")
        if self._flags & _COPIED:
            self._begins = _HEADER.size + np.arange(count, dtype=np.int64) * self._block
        elif kind >= len(_KINDS):
            raise UnsupportedFormatError(f"{self._path}: a chunk of Blosc with an unknown compression")
        else:
            if self._length < _HEADER.size + 4 * count:
                raise ValueError("a chunk is shorter than its header")
            if len(self._held) < _HEADER.size + 4 * count:
                self._wanted = _HEADER.size + 4 * count
                return False
            self._begins = np.frombuffer(bytes(self._held), "<u4", count, _HEADER.size).astype(np.int64)
            self._decompress = _find_decompressor(self._path, _KINDS[kind])
        self._needed = np.minimum.accumulate(self._begins[::-1])[::-1]
        self._seen = True
        return True

    def _read_block(self) -> bytes | None:
        """Return the next block; None if its bytes have not all arrived."""
        number, begin = self._done, int(self._begins[self._done])
        size = min(self._block, self._size - number * self._block)
        if self._flags & _COPIED:
            made = self._find(begin, size)
        else:
            made = self._decompress_block(begin, size, last=size < self._block)
        if made is not None and number + 1 < len(self._needed):
            count = min(int(self._needed[number + 1]) - self._begin, len(self._held))
            if count > 0:
                del self._held[:count]
                self._begin += count
        return made

    def _find(self, begin: int, size: int) -> bytes | None:
        """Return a stored range; None if it has not arrived."""
        at = begin - self._begin
        if at < 0 or begin + size > self._length:
            raise ValueError("a block is outside of its chunk")
        if at + size > len(self._held):
            self._wanted = begin + size
            return None
        with memoryview(self._held) as held:
            return bytes(held[at : at + size])

    def _decompress_block(self, begin: int, size: int, *, last: bool) -> bytes | None:
        parts = 1
        if not self._flags & _WHOLE and not last and self._width <= 16 and size // self._width >= _SHORTEST:
            parts = self._width if size % self._width == 0 else 1
        made, used = [], 0
        for _ in range(parts):
            head = self._find(begin, 4)
            if head is None:
                return None
            length = int.from_bytes(head, "little")
            body = self._find(begin + 4, length)
            if body is None:
                return None
            whole = size // parts
            made.append(body if length == whole else self._decompress(body, whole))
            if len(made[-1]) != whole:
                raise ValueError(f"a part of a block must have {whole:,} bytes, got {len(made[-1]):,}")
            begin += 4 + length
            used += 4 + length
        self._used += used
        return self._unshuffle(b"".join(made))

    def _unshuffle(self, data: bytes) -> bytes:
        count = len(data) // self._width
        if self._flags & _SHUFFLED and self._width > 1:
            whole = np.frombuffer(data, np.uint8, count * self._width).reshape(self._width, count)
            return whole.T.tobytes() + data[count * self._width :]
        if self._flags & _BITS_SHUFFLED and count % 8 == 0:  # Blosc 1 copies all other blocks as they are
            whole = np.frombuffer(data, np.uint8, count * self._width)
            bits = np.unpackbits(whole, bitorder="little").reshape(8 * self._width, count)
            return np.packbits(bits.T, bitorder="little").tobytes() + data[count * self._width :]
        return data


def _find_decompressor(path: str, kind: str) -> Callable[[bytes, int], bytes]:
    known = {"blosclz": decompress_blosclz, "lz4": decompress_lz4, "zlib": _inflate, "zstd": _expand}
    if kind not in known:
        raise UnsupportedFormatError(f"{path}: a chunk of Blosc must have {', '.join(known)} inside, got {kind}")
    return known[kind]


def _inflate(data: bytes, size: int) -> bytes:
    return zlib.decompressobj().decompress(data, size + 1)


def _expand(data: bytes, size: int) -> bytes:
    zstd = load_zstd()
    try:
        if zstd.frame_content_size(data) > size:
            raise ValueError("a block is longer than its header says")
        return bytes(zstd.ZstdDecompressor().decompress(data, max_output_size=size))
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error


def decompress_lz4(data: bytes, size: int) -> bytes:
    """Return the bytes of a block of LZ4.

    >>> decompress_lz4(bytes([0x1A, 97, 1, 0, 0x10, 98]), 16)
    b'aaaaaaaaaaaaaaab'
    """
    made, at, end = bytearray(), 0, len(data)
    while at < end:
        token = data[at]
        at += 1
        length = token >> 4
        if length == 15:
            length, at = _add_length(data, at, length)
        if at + length > end or len(made) + length > size:
            raise ValueError("a block of LZ4 ends too early")
        made += data[at : at + length]
        at += length
        if at == end:
            break
        offset = data[at] | data[at + 1] << 8
        at += 2
        length = 4 + (token & 15)
        if length == 19:
            length, at = _add_length(data, at, length)
        _repeat(made, offset, length, size)
    return bytes(made)


def _add_length(data: bytes, at: int, length: int) -> tuple[int, int]:
    """Return a length with the bytes from `at` on that continue it, and the position after them."""
    while (more := data[at]) == 255:
        length += more
        at += 1
    return length + more, at + 1


def _repeat(made: bytearray, offset: int, length: int, size: int) -> None:
    """Add bytes that are there already, `offset` before the end. If they overlap the new ones, they repeat."""
    begin = len(made) - offset
    if not offset or begin < 0 or len(made) + length > size:
        raise ValueError("a match is outside of its block")
    if offset >= length:
        made += made[begin : begin + length]
    else:
        made += (made[begin:] * (length // offset + 1))[:length]


_NEAR = 8191
"""Distances of BloscLZ from this on have two more bytes."""


def decompress_blosclz(data: bytes, size: int) -> bytes:
    """Return the bytes of a block of BloscLZ.

    >>> decompress_blosclz(bytes([0, 97, 0xE0, 5, 0, 0, 98]), 16)
    b'aaaaaaaaaaaaaaab'
    """
    made, at, end = bytearray(), 1, len(data)
    control = data[0] & 31
    while True:
        if control < 32:
            if at + control + 1 > end or len(made) + control + 1 > size:
                raise ValueError("a block of BloscLZ ends too early")
            made += data[at : at + control + 1]
            at += control + 1
        else:
            length, offset = (control >> 5) + 2, (control & 31) << 8
            if length == 9:
                while (more := data[at]) == 255:
                    length += more
                    at += 1
                length += more
                at += 1
            low = data[at]
            at += 1
            if low == 255 and offset == 31 << 8:
                offset, low = (data[at] << 8 | data[at + 1]) + _NEAR, 0
                at += 2
            _repeat(made, offset + low + 1, length, size)
        if at >= end:
            return bytes(made)
        control = data[at]
        at += 1
