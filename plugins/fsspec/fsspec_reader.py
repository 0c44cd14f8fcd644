"""A range of a file on its way out of one of fsspec's file chains, chunk by chunk; each chunk's length is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError
from snapshot.plugins.fsspec.call_threads import Lane
from snapshot.plugins.fsspec.chain import ConnectedChain
from snapshot.plugins.fsspec.fsspec_client import FsspecClient
from snapshot.plugins.network.retry import Attempt, TransientError
from snapshot.plugins.network.transfer import BufferSink


class FsspecReader:
    """Fills a sink, over one lane. A file chain that ignores a range must not become a wrong tensor."""

    def __init__(self, client: FsspecClient, lane: Lane[ConnectedChain], path: str, sink: BufferSink) -> None:
        self._client = client
        self._lane = lane
        self._path = path
        self._sink = sink

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

    async def _call(self, work: Callable[[ConnectedChain], Any]) -> Any:
        return await self._client.call(self._lane, self._path, work, self._sink.attempt)

    async def _size(self) -> int:
        """How long the file is, if it is long enough."""
        sink = self._sink
        size = (await self._call(lambda chain: chain.inner.info(chain.full(self._path)))).get("size")
        if size is not None and sink.end is not None and size < sink.end:
            raise CorruptSnapshotError(f"{sink.url}: ends at byte {size}, before bytes {sink.position}-{sink.end} do")
        return int(size or 0)

    def _next(self) -> int:
        assert self._sink.end is not None
        return min(self._sink.end - self._sink.position, self._client.chunk)

    async def _by_ranges(self) -> bool:
        """Whether it could be read so."""
        sink, client = self._sink, self._client
        while not sink.full:
            wanted = self._next()
            async with client.context.memory.count(wanted):
                data = await self._call(_range(self._path, sink.position, wanted))
                if data is None:
                    return False
                if len(data) > wanted:
                    await self._call(_without_ranges)
                    return False
                if len(data) < wanted:
                    await self._size()
                    raise TransientError(f"{sink.url}: got {len(data)} bytes of {wanted} from byte {sink.position} on")
                if not client.ranges_proven:  # as long as the whole file is, it might be that
                    client.ranges_proven = await self._size() > wanted
                sink.take(data)
        return True

    async def _by_handle(self) -> None:
        sink, begin = self._sink, self._sink.position

        def opened(chain: ConnectedChain) -> Any:
            handle = chain.outer.open(chain.full(self._path), "rb")
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
                async with self._client.context.memory.count(wanted):
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


def _range(path: str, begin: int, nbytes: int) -> Callable[[ConnectedChain], Any]:
    def work(chain: ConnectedChain) -> Any:
        return chain.cat(path, begin, begin + nbytes, cached=True) if chain.ranged else None

    return work


def _without_ranges(chain: ConnectedChain) -> None:
    chain.ranged = False


def _read(handle: Any, nbytes: int) -> Callable[[ConnectedChain], Any]:
    return lambda _: handle.read(nbytes)
