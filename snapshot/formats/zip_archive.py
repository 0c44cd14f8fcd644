"""Zip archives: their members, from the directory and the headers alone, and their checksums."""

from __future__ import annotations

import struct
import zlib
from functools import cached_property
from itertools import pairwise

import msgspec

from snapshot.io.storage import Storage
from snapshot.text import counted

# Layout of a zip archive, from its directory and the headers alone.
#
# Files of torch.save are such archives, and a DCP file is a sequence of them. Only the features that torch writes are
# supported. The standard library's reader takes ten times as long, and needs the whole file.

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
FIRST_TAIL = 64 << 10
"""Length of the first read of a file, at its end: it has the whole directory of most files."""
STORED, DEFLATED = 0, 8
Bytes = bytes | bytearray | memoryview
UNREADABLE = 0x61
"""Flags of members that are encrypted or patches."""
NEWEST = 63
"""Newest version of the format that a member may need."""
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


def find_directory(tail: Bytes, size: int) -> tuple[int, int]:
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


def read_members(directory: Bytes, begin: int) -> list[ZipMember]:
    """Return the members in a directory, in its order; it begins at `begin` in the archive."""
    data = bytes(directory)
    found = []
    at = 0
    while at < len(data):
        if data[at : at + 4] != b"PK\1\2" or at + _DIRECTORY_ITEM.size > len(data):
            raise ValueError("the directory is damaged")
        (_, _, need, flags, method, _, _, crc, packed, size, name_length, extra_length, comment, _, _, _, header) = (
            _DIRECTORY_ITEM.unpack_from(data, at)
        )
        at += _DIRECTORY_ITEM.size
        name = data[at : at + name_length]
        if extra_length or _NONE in (packed, size, header):
            extra = data[at + name_length : at + name_length + extra_length]
            size, packed, header = _read_long_lengths(extra, size, packed, header)
        at += name_length + extra_length + comment
        if flags & UNREADABLE or need & 0xFF > NEWEST or header + packed > begin or at > len(data):
            raise ValueError(f"member {name[:100]!r} is encrypted, or outside the archive")
        found.append(ZipMember(name.decode("utf-8", "replace"), method, crc, packed, size, header))
    return found


def _read_long_lengths(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the lengths of a member; those of a long one are in its extra fields."""
    at, known = 0, _NONE not in (size, packed, header)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if at + 4 + length > len(extra):
            raise ValueError("the directory is damaged in the lengths of a long member")
        if kind == 1 and not known:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                size = next(numbers) if size == _NONE else size
                packed = next(numbers) if packed == _NONE else packed
                header = next(numbers) if header == _NONE else header
            except StopIteration as error:
                raise ValueError("the directory lacks the length of a long member") from error
            known = True
        at += 4 + length
    if not known:
        raise ValueError("the directory lacks the length of a long member")
    return size, packed, header


def find_data_begin(header: Bytes) -> int:
    """Return the distance from a member's header to its data."""
    if len(header) < HEADER or header[:4] != SIGNATURE:
        raise ValueError("a member's header is not where the directory says")
    *_, name, extra = _HEADER.unpack_from(header, 0)
    return HEADER + int(name) + int(extra)


def read_name(header: bytes) -> str:
    """Return the name in a member's header; an empty string if the header is cut off."""
    length = _HEADER.unpack_from(header, 0)[-2] if len(header) >= HEADER else 0
    return header[HEADER : HEADER + length].decode("utf-8", "replace")


class MoreBytesNeeded(ValueError):
    """More bytes are needed, unless there are none: `args` are the lengths of the head and the tail."""


class ZipArchive:
    """The members of an archive. It does no I/O: callers pass the bytes that they have read."""

    def __init__(self, members: list[ZipMember], begin: int) -> None:
        """Create an archive of the members in its directory, which begins at `begin`."""
        self.members = members
        self.begin = begin
        self.named = {each.name.partition("/")[2]: each for each in members}
        """Members by their names in the folder that all of torch's are in."""

    @staticmethod
    def parse(tail: Bytes, size: int) -> ZipArchive:
        """Return the archive of `size` bytes that ends with `tail`; raise MoreBytesNeeded for a longer tail."""
        begin, end = find_directory(tail, size)
        low = size - len(tail)
        if begin < low:
            raise MoreBytesNeeded(0, size - begin)
        return ZipArchive(read_members(tail[begin - low : end - low], begin), begin)

    @staticmethod
    def parse_strictly(data: Bytes) -> ZipArchive:
        """Return the archive of all of these bytes; raise unless every reader finds the same members in it.

        No member may be compressed: some readers decompress any member.
        """
        archive = ZipArchive.parse(memoryview(data), len(data))
        begin, end = find_directory(memoryview(data), len(data))
        if data[:4] != SIGNATURE or end != _find_end(data, begin, end - begin):
            raise ValueError("other readers would find a different archive in it")
        if any(each.method != STORED for each in archive.members):
            raise ValueError("its members are compressed")
        if sum(each.size for each in archive.members) > len(data):
            raise ValueError(f"its members claim more than its {counted(len(data), 'byte')}")
        if len({each.name.lower() for each in archive.members}) < len(archive.members):
            raise ValueError("two members have the same name, or names that differ only in case")
        for each in archive.members:
            archive.locate(each, data)
            odd = "\0" in each.name or "\ufffd" in each.name
            if odd or read_name(bytes(data[each.header : each.header + LONGEST_HEADER])) != each.name:
                raise ValueError(f"member {each.name[:100]!r} has another name in its header")
        return archive

    def expect_distinct(self) -> None:
        """Raise if two members have the same name."""
        if len(self.named) < len(self.members):
            raise ValueError("two members have the same name")

    @cached_property
    def ends(self) -> dict[int, int]:
        """Latest end of each member by the begin of its header: the begin of the next one."""
        return dict(pairwise(sorted([each.header for each in self.members] + [self.begin])))

    def locate(self, member: ZipMember, data: Bytes, low: int = 0) -> tuple[int, int]:
        """Return the range of a member's stored bytes in the archive; `data` begins at `low` and has its header."""
        at = member.header - low
        if at + HEADER > len(data):
            raise MoreBytesNeeded(member.header + HEADER, 0)
        begin = member.header + find_data_begin(data[at : at + HEADER])
        if begin + member.packed > self.begin or (member.method == STORED and member.packed != member.size):
            raise ValueError(f"member {member.name[:100]!r} is outside the archive")
        return begin, begin + member.packed

    def read(self, member: ZipMember, data: Bytes, low: int = 0) -> bytes:
        """Return a member's content; `data` begins at `low` in the archive and has the whole member."""
        begin, end = self.locate(member, data, low)
        if end - low > len(data):
            raise MoreBytesNeeded(end, 0)
        content = bytes(data[begin - low : end - low])
        if member.method == DEFLATED:
            content = inflate_member(content, member.size)
        elif member.method != STORED:
            raise ValueError(f"member {member.name[:100]}: unknown compression method {member.method}")
        if len(content) != member.size:
            raise ValueError(
                f"member {member.name[:100]} must have {counted(member.size, 'byte')} by the directory, "
                f"got {len(content):,}"
            )
        if member.crc and zlib.crc32(content) != member.crc:
            raise ValueError(f"member {member.name[:100]} is damaged: wrong checksum")
        return content


def _find_end(data: Bytes, begin: int, length: int) -> int:
    """Return the begin of the records after an archive's directory; -1 if its two ends disagree."""
    end = len(data) - _END.size
    place = end - _LOCATOR.size - _END64.size
    if data[end - _LOCATOR.size :][:4] != b"PK\6\7":
        return end
    if place < 0 or data[place : place + 4] != b"PK\6\6":
        return -1
    _, disk, found, disks = _LOCATOR.unpack_from(data, end - _LOCATOR.size)
    if found != place or disk or disks > 1:
        return -1
    return place if _END64.unpack_from(data, place)[-2:] == (length, begin) else -1


async def open_archive(storage: Storage, name: str, end: int, limit: int, first: int = 0) -> ZipArchive:
    """Return the archive in the bytes from `first` to `end` of a file, by reading only its directory."""
    size = end - first
    tail = await read_range(storage, name, max(first, end - FIRST_TAIL), end)
    begin, stop = find_directory(tail, size)
    if stop - begin > limit:
        raise ValueError(f"the directory of {counted(stop - begin, 'byte')} exceeds the limit of {limit:,}")
    low = size - len(tail)
    if begin >= low:
        directory = tail[begin - low : stop - low]
    else:
        directory = await read_range(storage, name, first + begin, first + stop)
    return ZipArchive(read_members(directory, begin), begin)


async def read_range(storage: Storage, location: str, begin: int, end: int) -> bytes:
    """Return the bytes of a range of a file."""
    held = bytearray(end - begin)
    await storage.read_into(location, begin, [held])
    return bytes(held)


def inflate_member(data: bytes, size: int) -> bytes:
    """Return a deflated member's content, decompressing at most `size` bytes."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"decompression failed: {error}") from error
