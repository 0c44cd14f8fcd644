"""Writing: each file is a lane, which stages and digests its parts in order, and writes several at once.

Digests are computed in order within a lane, so a block may span two parts. Lanes run in parallel, so all cores are
used. A storage whose calls block, and which takes the parts of a file in order, has a faster way: one thread writes a
whole file (`_serial`). This module knows nothing about manifests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from snapshot.events import span
from snapshot.io.aio import gather_limited, in_thread, run_inline, shielded
from snapshot.io.arena import SEGMENT, arena
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all
from snapshot.io.session import Session
from snapshot.io.storage import FileWriter, Storage
from snapshot.plan.layout import FilePart, FilePlan, choose_part_size
from snapshot.progress import unmetered
from snapshot.save.base_files import BaseFile
from snapshot.save.digests import FileDigests
from snapshot.save.staging import PartSource, StagedPart
from snapshot.tensors.buffers import detach_view
from snapshot.tensors.digest import FileTree, RunningTree, tree_of
from snapshot.tensors.packed_files import PAGE, PackedResult

if TYPE_CHECKING:
    from snapshot.save.compression import Packing

Progress = Callable[[int], None]


class PartSink(Protocol):
    """A writer of the data files in place of this process."""

    async def write(
        self,
        session: Session,
        files: Sequence[FilePlan],
        locations: Sequence[str],
        source: PartSource,
        *,
        parts: Sequence[Sequence[FilePart]],
        progress: Progress,
        packing: Packing | None,
        signed: bool,
    ) -> list[WrittenFile]:
        """Write all files from parts that are staged ahead, as `Writer.write` does. If one fails, delete them all."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete data file on storage."""

    file: FilePlan
    location: str
    digests: list[str]
    tables: dict[int, bytes]
    shared: BaseFile | None = None
    """The file of an earlier snapshot that it is shared with."""
    packed: PackedResult | None = None
    """The stored form of a compressed file."""
    tree: FileTree | None = None
    """The hashes of the stored bytes, if the snapshot is signed."""


class Writer:
    """Writes the data files of one take."""

    def __init__(
        self,
        storage: Storage,
        source: PartSource,
        budget: MemoryBudget,
        progress: Progress,
        *,
        wanted_part: int = 0,
        most_files: int = 1 << 30,
        packing: Packing | None = None,
        signed: bool = False,
    ) -> None:
        """`most_files`: the number of files written in parallel.

        With `packing`, files are compressed. If `signed`, stored bytes are hashed, too.
        """
        self._storage = storage
        self.source = source
        self._budget = budget
        self._progress = progress
        self._wanted_part = wanted_part
        self.packing = packing
        self.signed = signed
        self._slots = asyncio.Semaphore(storage.limits.parallel_parts)
        self._files = asyncio.Semaphore(most_files)
        self._open: list[FileWriter] = []
        self._packers = asyncio.Semaphore(1)
        self._stopped = False
        self._total = 0
        """Bytes of all files."""

    def parts(self, file: FilePlan) -> list[FilePart]:
        """Return the parts that a file is split into."""
        limits = self._storage.limits
        return self.source.cut(file, choose_part_size(limits, self._budget.limit, file.size, self._wanted_part))

    async def write(self, files: Sequence[FilePlan], locations: Sequence[str]) -> list[WrittenFile]:
        """Write all files. If one fails, abort and delete all of them."""
        self._total = sum(file.size for file in files)
        self._packers = asyncio.Semaphore(self.packing.at_once if self.packing is not None else 1)
        lane: Callable[[FilePlan, str], Coroutine[Any, Any, WrittenFile]] = self._lane
        if self.packing is not None:
            lane = partial(self._packed, self.packing)
        elif writes_serially(self._storage, self.source):
            lane = partial(in_thread, run_inline, self._serial)
        lanes = [asyncio.create_task(self._in_turn(lane, *each)) for each in zip(files, locations, strict=True)]
        try:
            return list(await asyncio.gather(*lanes))
        except BaseException as error:
            self.source.stop(error)
            await shielded(self._abort(lanes))
            raise
        finally:
            self.source.release()

    async def _in_turn(
        self, lane: Callable[[FilePlan, str], Coroutine[Any, Any, WrittenFile]], file: FilePlan, location: str
    ) -> WrittenFile:
        async with self._files:
            return await lane(file, location)

    async def _abort(self, lanes: Sequence[asyncio.Task[WrittenFile]]) -> None:
        self._stopped = True
        await cancel_all(lanes)
        # the first error is raised
        await asyncio.gather(*(writer.abort() for writer in self._open), return_exceptions=True)

    def _digests(self, file: FilePlan) -> FileDigests:
        digests = self.source.digests(file)
        digests.tree = RunningTree() if self.signed else None
        return digests

    async def _serial(self, file: FilePlan, location: str) -> WrittenFile:
        """Write a file in one thread. Each part is digested and written while it is in a CPU cache."""
        writer = await self._storage.create(location, file.size)
        self._open.append(writer)
        digests = self._digests(file)
        for part in self.parts(file):
            if self._stopped:
                raise asyncio.CancelledError
            staged = await self._next(file, part, digests)
            try:
                with span("write", file=location, begin=part.begin, bytes=part.end - part.begin):
                    await writer.write(part.begin, staged.buffers)
            finally:
                staged.release()
            self._progress(part.end - part.begin)
        await writer.finish()
        return WrittenFile(file, location, digests.digests, digests.tables, tree=digests.finish_tree())

    async def _lane(self, file: FilePlan, location: str) -> WrittenFile:
        """Write a file, several parts at once."""
        writer = await shielded(self._storage.create(location, file.size))
        self._open.append(writer)
        this = asyncio.current_task()
        if this is not None and this.cancelling():  # while the file was created: `shielded` does not raise it
            raise asyncio.CancelledError
        digests = self._digests(file)
        writes: set[asyncio.Task[None]] = set()
        limits = self._storage.limits
        at_once = limits.parts_per_file
        try:
            for part in self.parts(file):
                staged = await self._with_slot(file, part, digests)
                try:
                    # A later part may be written before an earlier one, up to what the storage accepts at once.
                    while len(writes) >= at_once:
                        done, writes = await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
                        for error in [each.exception() for each in done]:  # all of them are retrieved
                            if error is not None:
                                raise error
                except BaseException:
                    staged.release()
                    self._slots.release()
                    raise
                write = asyncio.create_task(self._write(writer, location, part, staged))
                write.add_done_callback(partial(self._release, staged))  # also if it is cancelled before it begins
                writes.add(write)
            await asyncio.gather(*writes)
        except BaseException:
            await shielded(cancel_all(writes))
            raise
        await writer.finish()
        return WrittenFile(file, location, digests.digests, digests.tables, tree=digests.finish_tree())

    async def _packed(self, packing: Packing, file: FilePlan, location: str) -> WrittenFile:
        """Compress a file in memory, then write it: a storage must know its size first."""
        async with packing.room(PAGE + file.size) as room:
            packer = packing.packer(file, room)
            digests = self.source.digests(file)
            async with self._packers:
                for part in self.parts(file):
                    if self._stopped:
                        raise asyncio.CancelledError
                    await self.source.ready(file, part)
                    staged = await self._next(file, part, digests)
                    try:
                        await in_thread(packer.feed, staged.buffers)
                    finally:
                        staged.release()
                    self._progress(part.end - part.begin)
                packed = await in_thread(packer.finish)
            if packing.publish is not None:
                await packing.publish(packed)
            stored = room[: packed.size] if packed is not None else room[PAGE : PAGE + file.size]
            tree = await in_thread(tree_of, stored) if self.signed else None
            await self._write_stored(location, stored)
        return WrittenFile(file, location, digests.digests, digests.tables, packed=packed, tree=tree)

    async def _write_stored(self, location: str, data: memoryview) -> None:
        """Write a file that is in memory, several parts at once."""
        writer = await shielded(self._storage.create(location, len(data)))
        self._open.append(writer)
        limits = self._storage.limits
        step = choose_part_size(limits, self._budget.limit, len(data), self._wanted_part)

        async def write(begin: int) -> None:
            async with self._slots:
                part = detach_view(data[begin : begin + step])
                with span("write", file=location, begin=begin, bytes=len(part)):
                    await writer.write(begin, [part])

        await gather_limited(range(0, len(data), step), write, limits.parts_per_file)
        await writer.finish()

    async def _with_slot(self, file: FilePlan, part: FilePart, digests: FileDigests) -> StagedPart:
        """Prepare one of the parts that are digested and written at once.

        Parts that wait for staging do not count among them, since staging may wait for the memory of the others.
        """
        await self.source.ready(file, part)
        await self._slots.acquire()
        try:
            return await self._next(file, part, digests)
        except BaseException:
            self._slots.release()
            raise

    async def _next(self, file: FilePlan, part: FilePart, digests: FileDigests) -> StagedPart:
        source, held = self.source, None
        needed = source.needs_slot(file, part)
        if needed:
            pinning = source.pinning(self._budget, min(self._total, SEGMENT))
            held = await self._budget.hold(needed, pinning=pinning)
        try:
            return await source.fetch(file, part, held, partial(_digest_part, digests, file, part))
        except BaseException:
            if held is not None:
                held.release()
            raise

    async def _write(self, writer: FileWriter, location: str, part: FilePart, staged: StagedPart) -> None:
        with span("write", file=location, begin=part.begin, bytes=part.end - part.begin):
            await writer.write(part.begin, staged.buffers)
        self._progress(part.end - part.begin)

    def _release(self, staged: StagedPart, _: asyncio.Task[None]) -> None:
        staged.release()
        self._slots.release()


def writes_serially(storage: Storage, source: PartSource) -> bool:
    """Return True if one thread writes a whole file, part by part: nothing of it waits for an event loop."""
    return storage.capabilities.blocking and storage.limits.parts_per_file == 1 and not source.waits


def _digest_part(digests: FileDigests, file: FilePlan, part: FilePart, staged: StagedPart) -> None:
    with span("digest", bytes=part.end - part.begin):
        digests.digest_part(part, staged.shares(file, part))
    if digests.tree is not None:
        with span("hash", bytes=part.end - part.begin):
            digests.tree.update(staged.buffers)


async def write_small(
    storage: Storage, path: str, chunks: Sequence[bytes | bytearray], progress: Progress = unmetered
) -> None:
    """Write a file of a few chunks that are in memory, within the storage's limits for parts."""
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
        await shielded(writer.abort())
        raise
