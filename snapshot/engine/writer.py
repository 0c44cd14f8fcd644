"""Writing: every file is a lane; a lane stages and digests its parts in order, and writes several at once.

The digests of a lane come in order, so a block that straddles two parts is no trouble; lanes run side by side, so
all cores are used. Nothing here knows what a manifest is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapshot.engine.arena import GRAIN, arena
from snapshot.engine.budget import MemoryBudget
from snapshot.engine.loop import cancelled
from snapshot.engine.staging import FileDigests, Source, Staged
from snapshot.plan.layout import FilePlan, Part, cut_file, part_size
from snapshot.storage import FileWriter, Storage, drive, in_thread, uninterrupted

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A data file that is whole on storage."""

    file: FilePlan
    location: str
    digests: list[str]
    tables: dict[int, bytes]


class Writer:
    """Writes the data files of one take."""

    def __init__(
        self, storage: Storage, source: Source, budget: MemoryBudget, progress: Progress, wanted_part: int = 0
    ) -> None:
        self._storage = storage
        self.source = source
        self._budget = budget
        self._progress = progress
        self._wanted_part = wanted_part
        self._slots = asyncio.Semaphore(storage.limits.parallel_parts)
        self._open: list[FileWriter] = []
        self._stopped = False

    def parts(self, file: FilePlan) -> list[Part]:
        """How a file is cut."""
        limits = self._storage.limits
        return cut_file(file, part_size(limits, self._budget.limit, file.size, self._wanted_part))

    async def write(
        self, files: Sequence[FilePlan], locations: Sequence[str], staging: Staging | None = None
    ) -> list[Written]:
        """Write all files. If one fails, all are aborted, and nothing of them is left."""
        limits = self._storage.limits
        if staging is None and self._storage.capabilities.blocking and limits.parts_per_file == 1:
            work = [in_thread(drive, self._serial, *each) for each in zip(files, locations, strict=True)]
        else:
            work = [
                self._lane(number, file, where, staging)
                for number, (file, where) in enumerate(zip(files, locations, strict=True))
            ]
        lanes = [asyncio.create_task(each) for each in work]
        try:
            return list(await asyncio.gather(*lanes))
        except BaseException as error:
            if staging is not None:
                staging.stop(error)
            await uninterrupted(self._abort(lanes))
            raise
        finally:
            if staging is not None:
                staging.release()

    async def _abort(self, lanes: Sequence[asyncio.Task[Written]]) -> None:
        self._stopped = True
        await cancelled(lanes)
        # the first error is the one that counts
        await asyncio.gather(*(writer.abort() for writer in self._open), return_exceptions=True)

    async def _serial(self, file: FilePlan, location: str) -> Written:
        """A lane that one thread does alone, part by part: each is digested, and written, while it is in a cache."""
        writer = await self._storage.create(location, file.size)
        self._open.append(writer)
        digests = FileDigests(file)
        for position, part in enumerate(self.parts(file)):
            if self._stopped:
                raise asyncio.CancelledError
            staged = await self._next(0, position, file, part, digests, None)
            try:
                await writer.write(part.begin, staged.buffers)
            finally:
                staged.release()
            self._progress(part.end - part.begin)
        await writer.finish()
        digests.finish()
        return Written(file, location, digests.digests, digests.tables)

    async def _lane(self, number: int, file: FilePlan, location: str, staging: Staging | None) -> Written:
        writer = await uninterrupted(self._storage.create(location, file.size))
        self._open.append(writer)
        digests = FileDigests(file)
        writes: set[asyncio.Task[None]] = set()
        limits = self._storage.limits
        at_once = limits.parts_per_file
        try:
            for position, part in enumerate(self.parts(file)):
                await self._slots.acquire()
                try:
                    staged = await self._next(number, position, file, part, digests, staging)
                except BaseException:
                    self._slots.release()
                    raise
                try:
                    while len(writes) >= at_once:
                        done, writes = await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
                        for each in done:
                            each.result()
                except BaseException:
                    staged.release()
                    self._slots.release()
                    raise
                writes.add(asyncio.create_task(self._write(writer, part, staged)))
            await asyncio.gather(*writes)
        except BaseException:
            await uninterrupted(cancelled(writes))
            raise
        await writer.finish()
        digests.finish()
        return Written(file, location, digests.digests, digests.tables)

    async def _next(
        self, number: int, position: int, file: FilePlan, part: Part, digests: FileDigests, staging: Staging | None
    ) -> Staged:
        if staging is not None:
            staged = await staging.get(number, position)
            await in_thread(lambda: digests.update(part, staged.shares(file, part)))
            return staged
        needed = self.source.needs_slot(file, part)
        if not needed:
            return await in_thread(self._stage, file, part, 0, digests)
        size = arena_size(needed)
        await self._budget.acquire(size)
        try:
            return await in_thread(self._stage, file, part, needed, digests)
        except BaseException:
            self._budget.release(size)
            raise

    def _stage(self, file: FilePlan, part: Part, needed: int, digests: FileDigests) -> Staged:
        slot = arena().take(needed, pinned=self.source.pinned) if needed else None
        try:
            staged = self.source.stage(file, part, slot, self._budget)
            digests.update(part, staged.shares(file, part))
        except BaseException:
            if slot is not None:
                arena().give(slot)
            raise
        return staged

    async def _write(self, writer: FileWriter, part: Part, staged: Staged) -> None:
        try:
            await writer.write(part.begin, staged.buffers)
            self._progress(part.end - part.begin)
        finally:
            staged.release()
            self._slots.release()


def arena_size(nbytes: int) -> int:
    """What a slot of the arena for so many bytes takes of the budget."""
    return -(-nbytes // GRAIN) * GRAIN


class Staging:
    """Parts staged by the caller's thread ahead of the writer's, as an asynchronous take does it.

    What fits into the budget is staged before the first byte is written, so that writing does not compete with
    training's thread for memory bandwidth; what does not fit is staged as writes give memory back.
    """

    def __init__(self, writer: Writer, budget: MemoryBudget, files: Sequence[FilePlan]) -> None:
        self._source = writer.source
        self._budget = budget
        self._files = files
        self._parts = [writer.parts(file) for file in files]
        self._staged: dict[tuple[int, int], Staged] = {}
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Callable[[], object]] = {}
        self._error: BaseException | None = None
        self.begin: Callable[[], None] | None = None
        """Called once, when writing has to begin so that staging can go on."""

    def stage_all(self) -> None:
        """Stage every part, round robin over the files; returns when the last one is in host memory."""
        deepest = max(map(len, self._parts), default=0)
        for position in range(deepest):
            for number, parts in enumerate(self._parts):
                if position < len(parts):
                    self._stage(number, position, parts[position])

    def _stage(self, number: int, position: int, part: Part) -> None:
        size = arena_size(part.end - part.begin)
        if not self._budget.try_acquire(size):
            if self.begin is not None:
                self.begin()
            self._budget.acquire_blocking(size)
        slot = None
        try:
            slot = arena().take(part.end - part.begin, pinned=self._source.pinned)
            staged = self._source.stage(self._files[number], part, slot, self._budget)
        except BaseException:
            if slot is not None:
                arena().give(slot)
            self._budget.release(size)
            raise
        with self._lock:
            if self._error is None:
                self._staged[number, position] = staged
                wake = self._waiting.pop((number, position), None)
            else:
                staged.release()
                raise self._error
        if wake is not None:
            wake()

    async def get(self, number: int, position: int) -> Staged:
        """The staged part, as soon as it is there."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._lock:
            if self._error is not None:
                raise self._error
            there = (number, position) in self._staged
            if not there:
                self._waiting[number, position] = lambda: loop.call_soon_threadsafe(arrived.set)
        if not there:
            await arrived.wait()
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._staged.pop((number, position))

    def stop(self, error: BaseException) -> None:
        """Let the staging thread, and whoever waits for a part, see that it is over."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        self._budget.fail(error)
        for wake in waiting.values():
            wake()

    def release(self) -> None:
        """Give back what was staged and not written."""
        with self._lock:
            left, self._staged = self._staged, {}
        for staged in left.values():
            staged.release()


async def write_small(storage: Storage, path: str, chunks: Sequence[bytes | bytearray], progress: Progress) -> None:
    """Write a file of a few chunks, which lie in memory anyway, respecting what the storage wants of parts."""
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    writer = await storage.create(path, len(data))
    limits = storage.limits
    try:
        step = max(limits.smallest_part, min(limits.preferred_part, limits.largest_part))
        step = -(-step // limits.multiple) * limits.multiple
        view = memoryview(data)
        for begin in range(0, len(data), step):
            piece = view[begin : begin + step]
            if limits.alignment > 1:
                slot = arena().take(len(piece))
                try:
                    slot.view[: len(piece)] = piece
                    await writer.write(begin, [slot.view[: len(piece)]])
                finally:
                    arena().give(slot)
            else:
                await writer.write(begin, [piece])
            progress(len(piece))
        await writer.finish()
    except BaseException:
        await uninterrupted(writer.abort())
        raise
