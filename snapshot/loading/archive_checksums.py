"""Checksums in other libraries' archives: torch writes one with every member, and never verifies them."""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from snapshot.errors import CorruptSnapshotError
from snapshot.formats.zip_archive import DEFLATED, HEADER, ZipArchive, ZipMember, open_archive, read_range
from snapshot.io.aio import in_thread
from snapshot.io.loop import run
from snapshot.io.storage import Storage
from snapshot.loading.open import Opened
from snapshot.manifest.document import Files
from snapshot.progress import unmetered
from snapshot.text import listed

PIECE = 4 << 20
Range = tuple[str, int, int]


def expect_archive_checksums(opened: Opened, stored: Iterable[Any], *, whole: bool = False) -> None:
    """Raise if stored ranges do not match the archives' checksums, or with `whole`, anything in these archives."""
    parts = group_by_archive(find_archives(stored, opened.document.files))
    expect_sound_archives(opened, parts, None if whole else parts)


def group_by_archive(
    found: Mapping[Range, Range],
) -> dict[Range, list[tuple[int, int]]]:
    """Return the stored ranges in each archive."""
    parts: dict[Range, list[tuple[int, int]]] = {}
    for (_, begin, end), archive in found.items():
        parts.setdefault(archive, []).append((begin, end))
    return parts


def expect_sound_archives(
    opened: Opened,
    archives: Collection[Range],
    parts: Mapping[Range, Sequence[tuple[int, int]]] | None,
) -> None:
    """Raise if the contents of archives do not match their checksums; with `parts`, those of the members there."""
    if not archives:
        return
    faults, _ = run(find_faults(opened.storage, opened.budget, archives, unmetered, parts))
    if faults:
        raise CorruptSnapshotError(f"{opened.url}: {len(faults)} damaged:{listed(faults)}", faults=faults)


def find_archives(stored: Iterable[Any], files: Files) -> dict[Range, Range]:
    """Return the archive of each stored range that is in one."""
    found = {}
    for each in stored:
        place = (each.location, *each.byte_range)
        if each.serializer == "torch_save":
            found[place] = place
        elif each.serializer.endswith("zip") or getattr(files.get(each.location), "archived", False):
            found[place] = (each.location, 0, files[each.location].size)
    return found


async def find_faults(
    storage: Storage,
    memory: Any,
    wanted: Iterable[Range],
    progress: Callable[[int], None],
    parts: Mapping[Range, Sequence[tuple[int, int]]] | None = None,
) -> tuple[list[str], set[Range]]:
    """Return a line for each member with a wrong checksum, and the archives without checksums.

    With `parts`, only those members of a long archive are read that have a byte of its ranges.
    """
    found: list[str] = []
    without: set[Range] = set()
    at_once = asyncio.Semaphore(2)

    async def check(batch: list[Range]) -> None:
        location, begin, end = batch[0][0], batch[0][1], batch[-1][2]
        async with at_once, memory.slot(PIECE) as slot:
            if end - begin > PIECE:
                lines, bare = await _check_long(
                    storage, slot, batch[0], progress, None if parts is None else parts.get(batch[0])
                )
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
            found = ZipArchive.parse(archive, len(archive))
            if not any(each.crc for each in found.members):
                bare.append(place)
                continue
            for each in found.members:
                at, stop = found.locate(each, archive)
                lines += _describe_fault(place, each, at, _update_sum(archive[at:stop], 0, _make_inflater(each)))
        except (ValueError, zlib.error) as error:
            lines.append(f"{place[0]}[{place[1]}:{place[2]}] is not an archive: {error}")
    return lines, bare


async def _check_long(
    storage: Storage,
    slot: Any,
    place: Range,
    progress: Callable[[int], None],
    parts: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[str], list[Range]]:
    location, begin, end = place
    lines: list[str] = []
    try:
        archive = await open_archive(storage, location, end, end, begin)
        if not any(each.crc for each in archive.members):
            return [], [place]
        members = archive.members if parts is None else _choose_members(archive, begin, parts)
        for each in members:
            header = await read_range(storage, location, begin + each.header, begin + each.header + HEADER)
            at, stop = archive.locate(each, header, each.header)
            crc, inflater = 0, _make_inflater(each)
            for position in range(begin + at, begin + stop, PIECE):
                view = slot.view[: min(PIECE, begin + stop - position)]
                await storage.read_into(location, position, [view])
                crc = await in_thread(_update_sum, view, crc, inflater)
                progress(len(view))
            lines += _describe_fault(place, each, at, crc)
    except (ValueError, zlib.error) as error:
        lines.append(f"{location}[{begin}:{end}] is not an archive: {error}")
    return lines, []


def _choose_members(archive: ZipArchive, first: int, parts: Iterable[tuple[int, int]]) -> list[ZipMember]:
    """Return the members of an archive that have a byte of some ranges of its file, and those of its pickle."""
    begins, ends = [], list[int]()
    for begin, end in sorted(parts):  # joined, so that they are in order and apart
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        elif begin < end:
            begins.append(begin)
            ends.append(end)

    def is_wanted(member: ZipMember) -> bool:
        low, high = first + member.header, first + archive.ends[member.header]
        at = bisect_right(ends, low)
        return (at < len(begins) and begins[at] < high) or member.name.endswith(".pkl")

    return [each for each in archive.members if is_wanted(each)]


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
