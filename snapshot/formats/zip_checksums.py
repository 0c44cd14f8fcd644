"""Verification of the checksums in archives, which torch writes with every member but never verifies."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from snapshot.aio import in_thread
from snapshot.formats import zip_directory
from snapshot.formats.unpickling import INLINE
from snapshot.manifest.validate import Files
from snapshot.storage import Storage

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
            low, high = zip_directory.find_directory(archive[-zip_directory.TAIL :], len(archive))
            members = zip_directory.read_members(archive[low:high], low)
            if not any(each.crc for each in members):
                bare.append(place)
                continue
            for each in members:
                at = each.header + zip_directory.find_data_begin(archive[each.header :])
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
        tail = await _read_range(storage, location, max(begin, end - zip_directory.TAIL), end)
        low, high = zip_directory.find_directory(tail, end - begin)
        members = zip_directory.read_members(await _read_range(storage, location, begin + low, begin + high), low)
        if not any(each.crc for each in members):
            return [], [place]
        for each in members:
            header = await _read_range(
                storage, location, begin + each.header, begin + each.header + zip_directory.HEADER
            )
            at = each.header + zip_directory.find_data_begin(header)
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


def _make_inflater(member: zip_directory.ZipMember) -> Any:
    return zlib.decompressobj(-zlib.MAX_WBITS) if member.method == zip_directory.DEFLATED else None


def _describe_fault(place: Range, member: zip_directory.ZipMember, at: int, crc: int) -> list[str]:
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
