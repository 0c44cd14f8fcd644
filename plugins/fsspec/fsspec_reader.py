"""A range of a file on its way out of one of fsspec's file systems, chunk by chunk; each chunk's length is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snapshot.plugins.attempts import Attempt, BufferSink, TransientError
from snapshot.plugins.fsspec_calls import Lane
from snapshot.plugins.fsspec_systems import System

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError

if TYPE_CHECKING:
    from snapshot.plugins.fsspec import FsspecStorage


class Reader:
    """Fills a sink, over one lane. A file system that ignores a range must not become a wrong tensor."""

    def __init__(self, storage: FsspecStorage, lane: Lane[System], path: str, sink: BufferSink, chunk: int) -> None:
        self._storage = storage
        self._lane = lane
        self._path = path
        self._sink = sink
        self._chunk = min(chunk, storage.limits.preferred_part)

    async def fill(self, attempt: Attempt) -> None:
        """Go on where the attempt before this one ended: by ranges where there are any, else out of an opened file."""
        self._sink.attempt = attempt
        try:
            if not await self._by_ranges():
                await self._by_handle()
        except (TransientError, StorageNotFoundError):
            raise
        except StorageError:  # some have an error of their own for a range behind the end
            await self._size()
            raise

    async def _call(self, work: Callable[[System], Any]) -> Any:
        return await self._storage.call(self._lane, self._path, work, self._sink.attempt)

    async def _size(self) -> int:
        """How long the file is, if it is long enough."""
        sink = self._sink
        size = (await self._call(lambda system: system.inner.info(system.full(self._path)))).get("size")
        if size is not None and sink.end is not None and size < sink.end:
            raise CorruptSnapshotError(f"{sink.url}: ends at byte {size}, before bytes {sink.position}-{sink.end} do")
        return int(size or 0)

    def _next(self) -> int:
        assert self._sink.end is not None
        return min(self._sink.end - self._sink.position, self._chunk)

    async def _by_ranges(self) -> bool:
        """Whether it could be read so."""
        sink, storage = self._sink, self._storage
        while not sink.full:
            wanted = self._next()
            async with storage.context.memory.count(wanted):
                data = await self._call(_range(self._path, sink.position, wanted))
                if data is None:
                    return False
                if len(data) > wanted:
                    await self._call(_without_ranges)
                    return False
                if len(data) < wanted:
                    await self._size()
                    raise TransientError(f"{sink.url}: got {len(data)} bytes of {wanted} from byte {sink.position} on")
                if not storage.proven:  # as long as the whole file is, it might be that
                    storage.proven = await self._size() > wanted
                sink.take(data)
        return True

    async def _by_handle(self) -> None:
        sink, begin = self._sink, self._sink.position

        def opened(system: System) -> Any:
            handle = system.outer.open(system.full(self._path), "rb")
            try:
                handle.seek(begin)
            except BaseException:
                handle.close()
                raise
            return handle

        handle = await self._call(opened)
        try:
            while not sink.full:
                wanted = self._next()
                async with self._storage.context.memory.count(wanted):
                    data = await self._call(_read(handle, wanted))
                    if len(data) > wanted:
                        raise StorageError(f"{sink.url}: asked for {wanted} bytes and got {len(data)}")
                    if not data:
                        await self._size()
                        raise TransientError(f"{sink.url}: broke off at byte {sink.position}")
                    sink.take(data)
        finally:
            if self._lane.usable:
                with contextlib.suppress(StorageError):
                    await self._call(lambda _: handle.close())


def _range(path: str, begin: int, nbytes: int) -> Callable[[System], Any]:
    def work(system: System) -> Any:
        return system.cat(path, begin, begin + nbytes, cached=True) if system.ranged else None

    return work


def _without_ranges(system: System) -> None:
    system.ranged = False


def _read(handle: Any, nbytes: int) -> Callable[[System], Any]:
    return lambda _: handle.read(nbytes)
