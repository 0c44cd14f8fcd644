"""Files of another storage as a source of parts: copied byte for byte, and digested in transit.

A file is split as the destination requires, independently of its contents. So stored ranges are followed across parts,
and compared when their last byte has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from snapshot.aio import gather_limited, shielded
from snapshot.errors import CorruptSnapshotError
from snapshot.loading.stored_ranges import TABLE, find_uncovered, requests_of
from snapshot.manifest.document import Document, ManifestPart
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.runtime.arena import Slot, arena, arena_bytes
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.loop import cancel_all
from snapshot.runtime.session import Session
from snapshot.save.packing import Packing
from snapshot.save.staging import FileDigests, StagedPart, Stager
from snapshot.save.writer import Writer
from snapshot.storage import Buffer, Storage
from snapshot.tensors.digest import BLOCK, RunningDigest, digest_range
from snapshot.text import listed
from snapshot.url import URL

FILES = 16
"""The number of files that are written in parallel."""


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """The contents of a range of a file."""

    name: str
    begin: int
    end: int
    digest: str | None
    plain: bool = False
    """True if the digest is of the bytes themselves, without blocks: for headers and digest tables."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file to copy."""

    location: str
    size: int
    token: str | None
    """The token of the file when it was inspected. Reading fails if the file is replaced meanwhile."""
    ranges: tuple[CheckedRange, ...] = ()
    """The ranges to compare in transit: in order and without gaps, or none."""

    def plan(self) -> FilePlan:
        """Return the file as the writer expects it."""
        return FilePlan(b"", tuple(Extent(0, each.begin, each.end) for each in self.ranges), self.size)


def checked_files(
    document: Document,
    parts: Sequence[ManifestPart],
    tokens: Mapping[str, str | None],
    *,
    url: URL,
    verify: bool,
) -> list[CopiedFile]:
    """Return data files of a snapshot, longest first, with the digests to compare. `tokens` names the files.

    Raise CorruptSnapshotError if the manifest and its parts do not describe all bytes of these files.
    """
    own = {location: document.files[location] for location in tokens}
    ranges: dict[str, list[CheckedRange]] = {location: [] for location in own}
    if verify:
        faults: list[str] = []
        some: list[dict[str, Any]] = [{}] if document.parts else []  # not all parts may be given
        requests = requests_of([document.manifest, *some, *(each.manifest for each in parts)], document.files, faults)
        faults += find_uncovered(own, [each for each in requests if each.location in own])
        if faults:
            raise CorruptSnapshotError(
                f"{url}: its manifest does not describe its files:{listed(faults)}", faults=faults
            )
        for location, file in own.items():
            if file.packed is not None:  # it is copied as it is stored
                name = f"{location} (compressed)"
                ranges[location] = [CheckedRange(name, 0, file.packed.size, file.packed.digest)]
            elif file.header:
                ranges[location].append(CheckedRange(f"{location} (header)", 0, file.header, file.header_digest, True))
        for request in requests:
            if request.begin < request.end and request.location in own and own[request.location].packed is None:
                plain = getattr(request.stored, "serializer", "") == TABLE
                ranges[request.location].append(
                    CheckedRange(request.name, request.begin, request.end, request.stored.digest, plain)
                )
    return [
        CopiedFile(location, file.stored_size, tokens[location], tuple(sorted(ranges[location], key=_begin_of)))
        for location, file in sorted(own.items(), key=lambda item: (-item[1].stored_size, item[0]))
    ]


def _begin_of(each: CheckedRange) -> int:
    return each.begin


class FileStream(Stager):
    """The bytes of files on another storage."""

    fetches = True

    def __init__(self, storage: Storage, files: Sequence[CopiedFile]) -> None:
        super().__init__([], copies=True)
        self._storage = storage
        self.waits = not storage.capabilities.blocking
        self.plans = [file.plan() for file in files]
        self._files = {id(plan): file for plan, file in zip(self.plans, files, strict=True)}

    def needs_slot(self, file: FilePlan, part: FilePart) -> int:
        return part.end - part.begin

    async def fetch(self, file: FilePlan, part: FilePart, slot: Slot, budget: MemoryBudget) -> StagedPart:
        """Read a part into a slot."""
        passed = self._files[id(file)]
        view = slot.view[: part.end - part.begin]
        await self._storage.read_into(passed.location, part.begin, [view], token=passed.token)
        return StagedPart([view], None, slot, budget)

    def digests(self, file: FilePlan) -> FileDigests:
        return Checked(file, self._files[id(file)])


class PlainDigest:
    """The digest of a range's bytes themselves."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        self._digest.update(data)

    def finish(self) -> tuple[str, bytes]:
        return "xxh3:" + self._digest.hexdigest(), b""


class Checked(FileDigests):
    """Digests a file's ranges, and raises as soon as one does not match."""

    def __init__(self, file: FilePlan, passed: CopiedFile) -> None:
        super().__init__(file)
        self._passed = passed
        self._open: RunningDigest | PlainDigest | None = None

    def update(self, part: FilePart, shares: Sequence[Buffer]) -> None:
        """Add a part's share of each extent."""
        for index, share in zip(range(part.first, part.last), shares, strict=True):
            each = self._passed.ranges[index]
            if each.digest is None:
                continue
            if each.begin >= part.begin and each.end <= part.end and (each.plain or each.end - each.begin <= BLOCK):
                self._compare(each, digest_range(share))
                continue
            if self._open is None:
                self._open = PlainDigest() if each.plain else RunningDigest()
            self._open.update(memoryview(share).cast("B"))
            if each.end <= part.end:
                self._compare(each, self._open.finish()[0])
                self._open = None

    def _compare(self, each: CheckedRange, actual: str) -> None:
        if actual != each.digest:
            where = f"{self._passed.location}[{each.begin}:{each.end}]"
            line = f"{each.name}: {where}: digest must be {each.digest}, got {actual}"
            raise CorruptSnapshotError(line, faults=[line])


class ReadAhead:
    """Reads parts ahead, several at once.

    The parts of each file are read in order, so that a part with memory never waits for a part without.
    """

    def __init__(self, writer: Writer, source: FileStream, budget: MemoryBudget, at_once: int) -> None:
        self._writer = writer
        self._source = source
        self._budget = budget
        self._at_once = max(2, at_once // max(1, min(FILES, len(source.plans))))
        self._reads: dict[tuple[int, int], asyncio.Task[StagedPart]] = {}
        self._stopped = False

    async def get(self, number: int, position: int) -> StagedPart:
        """Return a part of a file. The caller releases it."""
        parts = self._writer.parts(self._source.plans[number])
        for ahead in range(position, min(position + self._at_once, len(parts))):
            if (number, ahead) not in self._reads and not self._stopped:
                self._reads[number, ahead] = asyncio.create_task(self._read(number, parts[ahead]))
        staged = await self._reads[number, position]
        del self._reads[number, position]
        return staged

    async def _read(self, number: int, part: FilePart) -> StagedPart:
        nbytes = part.end - part.begin
        size = arena_bytes(nbytes)
        await self._budget.acquire(size)
        try:
            slot = arena().take(nbytes)  # not in a thread: a cancellation would leak the slot
            try:
                return await self._source.fetch(self._source.plans[number], part, slot, self._budget)
            except BaseException:
                arena().give(slot)
                raise
        except BaseException:
            self._budget.release(size)
            raise

    def stop(self, error: BaseException) -> None:
        """Stop reading."""
        self._stopped = True
        for read in self._reads.values():
            read.cancel()

    def release(self) -> None:
        """Do nothing: `close` releases unused parts, and waits for pending reads."""

    async def close(self) -> None:
        """Wait for pending reads, and release unused parts."""
        self._stopped = True
        await shielded(cancel_all(list(self._reads.values())))
        for read in self._reads.values():
            if not read.cancelled() and read.exception() is None:
                read.result().release()
        self._reads.clear()


Write = Callable[[Writer, Sequence[FilePlan], ReadAhead | None], Coroutine[Any, Any, object]]


async def copy_files_through(
    source: Session,
    target: Session,
    files: Sequence[CopiedFile],
    progress: Callable[[int], None],
    write: Write,
    *,
    packing: Packing | None = None,
) -> None:
    """Copy files between two storages, several parts of several files at once.

    `write` calls the writer with the destination names.
    """
    passing = FileStream(source.storage, files)
    part = target.settings.part_bytes
    writer = Writer(
        target.storage, passing, target.budget, progress, wanted_part=part, most_files=FILES, packing=packing
    )
    if writer.serial:
        writer = Writer(
            target.storage,
            passing,
            target.budget,
            progress,
            wanted_part=part or source.storage.limits.hot_part,
            most_files=FILES,
            packing=packing,
        )
        await write(writer, passing.plans, None)
        return
    ahead = ReadAhead(writer, passing, target.budget, source.storage.limits.parallel_parts)
    try:
        await write(writer, passing.plans, ahead)
    finally:
        await ahead.close()


async def stat_files(storage: Storage, locations: Iterable[str]) -> dict[str, tuple[int, str | None]]:
    """Return the size and version token of each file, so that a later replacement can be detected."""
    names = list(locations)

    async def look(location: str) -> tuple[int, str | None]:
        found = await storage.stat(location)
        return found.size, found.token or None

    return dict(zip(names, await gather_limited(names, look, FILES), strict=True))
