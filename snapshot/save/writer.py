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
from typing import Any, Protocol

from snapshot.events import span
from snapshot.io.aio import gather_limited, in_thread, run_inline, shielded
from snapshot.io.arena import SEGMENT, arena
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import cancel_all
from snapshot.io.session import Session
from snapshot.io.storage import FileWriter, Storage
from snapshot.plan.layout import FilePart, FilePlan, choose_part_size
from snapshot.plan.plan_cache import cut_file_cached
from snapshot.progress import unmetered
from snapshot.save.base_files import BaseFile
from snapshot.save.compression import FilePacker, PackedResult, Packing
from snapshot.save.digests import FileDigests
from snapshot.save.staging import PartSource, StagedPart
from snapshot.tensors.digest import FileTree, RunningTree, tree_of
from snapshot.tensors.memory import detach_view
from snapshot.tensors.split_zstd import PAGE

Progress = Callable[[int], None]


class PartsAhead(Protocol):
    """Parts that are staged ahead of the writer."""

    async def get(self, number: int, position: int) -> StagedPart:
        """Return a part of a file as soon as it is ready. The caller releases it."""
        ...

    def stop(self, error: BaseException) -> None:
        """Stop staging."""
        ...

    def release(self) -> None:
        """Release parts that were not requested."""
        ...


class PartSink(Protocol):
    """A writer of the data files in place of this process."""

    async def write(
        self,
        session: Session,
        files: Sequence[FilePlan],
        locations: Sequence[str],
        parts: Sequence[Sequence[FilePart]],
        *,
        staging: PartsAhead,
        progress: Progress,
        packing: Packing | None,
        signed: bool,
    ) -> list[WrittenFile]:
        """Write all files from staged parts, as `Writer.write` does. If one fails, delete all of them."""
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
        """`most_files`: the number of files written in parallel. `staging` ahead must use the same number.

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
        return cut_file_cached(file, choose_part_size(limits, self._budget.limit, file.size, self._wanted_part))

    @property
    def serial(self) -> bool:
        """Return True if one thread writes a whole file, part by part, if nothing is staged ahead."""
        blocking = self._storage.capabilities.blocking and not self.source.waits
        return blocking and self._storage.limits.parts_per_file == 1

    async def write(
        self, files: Sequence[FilePlan], locations: Sequence[str], staging: PartsAhead | None = None
    ) -> list[WrittenFile]:
        """Write all files. If one fails, abort and delete all of them."""
        self._total = sum(file.size for file in files)
        self._packers = asyncio.Semaphore(self.packing.at_once if self.packing is not None else 1)
        if self.packing is not None:
            work = [
                partial(self._packed, number, file, where, staging, self.packing)
                for number, (file, where) in enumerate(zip(files, locations, strict=True))
            ]
        elif staging is None and self.serial:
            work = [partial(in_thread, run_inline, self._serial, *each) for each in zip(files, locations, strict=True)]
        else:
            work = [
                partial(self._lane, number, file, where, staging)
                for number, (file, where) in enumerate(zip(files, locations, strict=True))
            ]
        lanes = [asyncio.create_task(self._in_turn(each)) for each in work]
        try:
            return list(await asyncio.gather(*lanes))
        except BaseException as error:
            if staging is not None:
                staging.stop(error)
            await shielded(self._abort(lanes))
            raise
        finally:
            if staging is not None:
                staging.release()

    async def _in_turn(self, lane: Callable[[], Coroutine[Any, Any, WrittenFile]]) -> WrittenFile:
        async with self._files:
            return await lane()

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

    async def _lane(self, number: int, file: FilePlan, location: str, staging: PartsAhead | None) -> WrittenFile:
        writer = await shielded(self._storage.create(location, file.size))
        self._open.append(writer)
        this = asyncio.current_task()
        if this is not None and this.cancelling():  # cancelled meanwhile
            raise asyncio.CancelledError
        digests = self._digests(file)
        writes: set[asyncio.Task[None]] = set()
        limits = self._storage.limits
        at_once = limits.parts_per_file
        try:
            for position, part in enumerate(self.parts(file)):
                ahead = await staging.get(number, position) if staging is not None else None
                staged = await self._with_slot(file, part, digests, ahead)
                try:
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

    async def _packed(
        self, number: int, file: FilePlan, location: str, staging: PartsAhead | None, packing: Packing
    ) -> WrittenFile:
        """Compress a file in memory, then write it: a storage must know its size first."""
        async with packing.room(PAGE + file.size) as room:
            packer = FilePacker(*packing.layout(file), room)
            digests = self.source.digests(file)
            async with self._packers:
                for position, part in enumerate(self.parts(file)):
                    if self._stopped:
                        raise asyncio.CancelledError
                    ahead = await staging.get(number, position) if staging is not None else None
                    staged = ahead or await self._next(file, part, digests)
                    try:
                        if ahead is not None:
                            await in_thread(_digest_part, digests, file, part, ahead)
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

    async def _with_slot(
        self, file: FilePlan, part: FilePart, digests: FileDigests, ahead: StagedPart | None
    ) -> StagedPart:
        """Prepare one of the parts that are digested and written at once: staged ahead, or now.

        Parts that wait for staging do not count among them, since staging may wait for the memory of the others.
        """
        try:
            await self._slots.acquire()
        except BaseException:
            if ahead is not None:
                ahead.release()
            raise
        try:
            if ahead is None:
                return await self._next(file, part, digests)
            await in_thread(_digest_part, digests, file, part, ahead)
            return ahead
        except BaseException:
            if ahead is not None:
                ahead.release()
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
