"""Layout of a zip archive, from its directory and the headers alone.

Files of torch.save are such archives, and a DCP file is a sequence of them. Only the features that torch writes are
supported. The standard library's reader takes ten times as long, and needs the whole file.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

_DIRECTORY_ITEM = struct.Struct("<4s6H3L5H2L")
_HEADER = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_NONE = 0xFFFFFFFF
HEADER = 30
"""Length of a member's header before its name."""
LONGEST_HEADER = HEADER + 2 * 0xFFFF
"""Maximum length of a member's header, with its name and extra fields."""
TAIL = _END.size + _LOCATOR.size + _END64.size
"""Bytes at the end of an archive that locate its directory, if it has no comment; torch writes none."""
STORED, DEFLATED = 0, 8
SIGNATURE = b"PK\3\4"
"""First bytes of each member, and so of an archive."""


class ZipMember(msgspec.Struct, gc=False):
    """Member, as described by the directory."""

    name: str
    method: int
    crc: int
    packed: int
    """Length in the archive."""
    size: int
    header: int
    """Begin of the header in the archive."""


def find_directory(tail: bytes | memoryview, size: int) -> tuple[int, int]:
    """Return the begin and end of an archive's directory, from its last bytes; raise ValueError if it has none."""
    end = len(tail) - _END.size
    if end < 0:
        raise ValueError(f"too short for an archive: {size} bytes")
    signature, disk, _, _, count, length, begin, comment = _END.unpack_from(tail, end)
    if signature != b"PK\5\6" or comment or disk not in (0, 0xFFFF):
        raise ValueError("the end of the archive is invalid")
    stop = size - _END.size
    if _NONE in (length, begin) or count == 0xFFFF:
        place = end - _LOCATOR.size - _END64.size
        if place < 0 or tail[place : place + 4] != b"PK\6\6" or tail[end - _LOCATOR.size :][:4] != b"PK\6\7":
            raise ValueError("the end of the long archive is invalid")
        *_, length, begin = _END64.unpack_from(tail, place)
        stop = size - len(tail) + place
    if begin + length > stop:
        raise ValueError("the directory is outside the archive")
    return begin, begin + length


def read_members(directory: bytes | memoryview, begin: int) -> list[ZipMember]:
    """Return the members in a directory, in its order; it begins at `begin` in the archive."""
    data = bytes(directory)
    found = []
    at = 0
    while at < len(data):
        if data[at : at + 4] != b"PK\1\2" or at + _DIRECTORY_ITEM.size > len(data):
            raise ValueError("the directory is damaged")
        (_, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment, _, _, _, header) = (
            _DIRECTORY_ITEM.unpack_from(data, at)
        )
        at += _DIRECTORY_ITEM.size
        name = data[at : at + name_length]
        if _NONE in (packed, size, header):
            size, packed, header = _read_long_lengths(
                data[at + name_length : at + name_length + extra_length], size, packed, header
            )
        at += name_length + extra_length + comment
        if flags & 1 or header + packed > begin or at > len(data):
            raise ValueError(f"member {name[:100]!r} is encrypted, or outside the archive")
        found.append(ZipMember(name.decode("utf-8", "replace"), method, crc, packed, size, header))
    return found


def _read_long_lengths(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the lengths of a long member, which are stored separately."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and at + 4 + length <= len(extra):
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                size = next(numbers) if size == _NONE else size
                packed = next(numbers) if packed == _NONE else packed
                header = next(numbers) if header == _NONE else header
            except StopIteration as error:
                raise ValueError("the directory lacks the length of a long member") from error
            return size, packed, header
        at += 4 + length
    raise ValueError("the directory lacks the length of a long member")


def find_data_begin(header: bytes | memoryview) -> int:
    """Return the distance from a member's header to its data."""
    if len(header) < HEADER or header[:4] != SIGNATURE:
        raise ValueError("a member's header is not where the directory says")
    *_, name, extra = _HEADER.unpack_from(header, 0)
    return HEADER + int(name) + int(extra)


def read_name(header: bytes) -> str:
    """Return the name in a member's header; an empty string if the header is cut off."""
    length = _HEADER.unpack_from(header, 0)[-2] if len(header) >= HEADER else 0
    return header[HEADER : HEADER + length].decode("utf-8", "replace")


def inflate_member(data: bytes, size: int) -> bytes:
    """Return a deflated member's content, decompressing at most `size` bytes."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"decompression failed: {error}") from error
