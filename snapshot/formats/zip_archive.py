"""Zip archives: their layout from the directory and the headers alone, and their checksums."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from snapshot.formats.pickled import INLINE
from snapshot.io.aio import in_thread
from snapshot.io.storage import Storage
from snapshot.manifest.validate import Files

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


# Verification of the checksums in archives, which torch writes with every member but never verifies.

PIECE = 4 << 20
Range = tuple[str, int, int]


def find_archives(stored: Iterable[Any], files: Files) -> dict[Range, Range]:
    """Return the archive of each stored range that is in one."""
    found = {}
    for each in stored:
        place = (each.location, *each.byte_range)
        if each.location == INLINE:
            continue
        if each.serializer == "torch_save":
            found[place] = place
        elif each.serializer.endswith("zip"):
            found[place] = (each.location, 0, files[each.location].size)
    return found


async def find_faults(
    storage: Storage, memory: Any, wanted: Iterable[Range], progress: Callable[[int], None]
) -> tuple[list[str], set[Range]]:
    """Return a line for each member with a wrong checksum, and the archives without checksums."""
    found: list[str] = []
    without: set[Range] = set()
    at_once = asyncio.Semaphore(2)

    async def check(batch: list[Range]) -> None:
        location, begin, end = batch[0][0], batch[0][1], batch[-1][2]
        async with at_once, memory.slot(PIECE) as slot:
            if end - begin > PIECE:
                lines, bare = await _check_long(storage, slot, batch[0], progress)
            else:
                view = slot.view[: end - begin]
                await storage.read_into(location, begin, [view])
                lines, bare = await in_thread(_check_batch, view, begin, batch)
                progress(end - begin)
        found.extend(lines)
        without.update(bare)

    await asyncio.gather(*map(check, _group_ranges(wanted)))
    return found, without


def _group_ranges(wanted: Iterable[Range]) -> list[list[Range]]:
    """Group short archives that are close together, to read them at once."""
    batches: list[list[Range]] = []
    for each in sorted(set(wanted)):
        last = batches[-1] if batches else None
        if last and last[0][0] == each[0] and last[-1][2] <= each[1] and each[2] - last[0][1] <= PIECE:
            last.append(each)
        else:
            batches.append([each])
    return batches


def _check_batch(view: memoryview, begin: int, batch: list[Range]) -> tuple[list[str], list[Range]]:
    """Check archives whose bytes are in memory."""
    lines: list[str] = []
    bare = []
    for place in batch:
        archive = view[place[1] - begin : place[2] - begin]
        try:
            low, high = find_directory(archive[-TAIL:], len(archive))
            members = read_members(archive[low:high], low)
            if not any(each.crc for each in members):
                bare.append(place)
                continue
            for each in members:
                at = each.header + find_data_begin(archive[each.header :])
                inflater = _make_inflater(each)
                crc = _update_sum(archive[at : at + each.packed], 0, inflater)
                lines += _describe_fault(place, each, at, crc)
        except (ValueError, zlib.error) as error:
            lines.append(f"{place[0]}[{place[1]}:{place[2]}] is not an archive: {error}")
    return lines, bare


async def _check_long(
    storage: Storage, slot: Any, place: Range, progress: Callable[[int], None]
) -> tuple[list[str], list[Range]]:
    location, begin, end = place
    lines: list[str] = []
    try:
        tail = await _read_range(storage, location, max(begin, end - TAIL), end)
        low, high = find_directory(tail, end - begin)
        members = read_members(await _read_range(storage, location, begin + low, begin + high), low)
        if not any(each.crc for each in members):
            return [], [place]
        for each in members:
            header = await _read_range(storage, location, begin + each.header, begin + each.header + HEADER)
            at = each.header + find_data_begin(header)
            crc, inflater = 0, _make_inflater(each)
            for position in range(begin + at, begin + at + each.packed, PIECE):
                view = slot.view[: min(PIECE, begin + at + each.packed - position)]
                await storage.read_into(location, position, [view])
                crc = await in_thread(_update_sum, view, crc, inflater)
                progress(len(view))
            lines += _describe_fault(place, each, at, crc)
    except (ValueError, zlib.error) as error:
        lines.append(f"{location}[{begin}:{end}] is not an archive: {error}")
    return lines, []


def _make_inflater(member: ZipMember) -> Any:
    return zlib.decompressobj(-zlib.MAX_WBITS) if member.method == DEFLATED else None


def _describe_fault(place: Range, member: ZipMember, at: int, crc: int) -> list[str]:
    if crc == member.crc:
        return []
    begin = place[1] + at
    return [
        f"{place[0]}[{begin}:{begin + member.packed}] ({member.name}) must have crc32:{member.crc:08x}, "
        f"got crc32:{crc:08x}"
    ]


def _update_sum(view: memoryview, crc: int, inflater: Any) -> int:
    if inflater is None:
        return zlib.crc32(view, crc)
    for low in range(0, len(view), 1 << 10):
        crc = zlib.crc32(inflater.decompress(view[low : low + (1 << 10)]), crc)
    return crc


async def _read_range(storage: Storage, location: str, begin: int, end: int) -> bytes:
    held = bytearray(end - begin)
    await storage.read_into(location, begin, [held])
    return bytes(held)
