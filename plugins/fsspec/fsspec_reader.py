"""Ranged reads from fsspec's file systems in chunks, whose lengths are checked."""

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
    """Reader that fills a sink over one lane, and never reads a whole file for a range of it."""

    def __init__(self, client: FsspecClient, lane: Lane[ConnectedChain], path: str, sink: BufferSink) -> None:
        self._client = client
        self._lane = lane
        self._path = path
        self._sink = sink

    async def fill(self, attempt: Attempt) -> None:
        """Continue where the previous attempt ended: by ranges if they are supported, else by an open file."""
        self._sink.attempt = attempt
        try:
            if not await self._by_ranges():
                await self._by_handle()
        except (TransientError, StorageNotFoundError):
            raise
        except StorageError:  # some clients raise their own error for a range past the end
            await self._size()
            raise

    async def _call(self, work: Callable[[ConnectedChain], Any]) -> Any:
        return await self._client.call(self._lane, self._path, work, self._sink.attempt)

    async def _size(self) -> int:
        """Return the size of the file; raise CorruptSnapshotError if it ends before the range."""
        sink = self._sink
        size = (await self._call(lambda chain: chain.inner.info(chain.full(self._path)))).get("size")
        if size is not None and sink.end is not None and size < sink.end:
            raise CorruptSnapshotError(
                f"{sink.url}: ends at byte {size}, but bytes {sink.position}-{sink.end} were requested"
            )
        return int(size or 0)

    def _next(self) -> int:
        assert self._sink.end is not None
        return min(self._sink.end - self._sink.position, self._client.chunk)

    async def _by_ranges(self) -> bool:
        """Read by ranges; return False if they are not supported."""
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
                if not client.ranges_proven:  # a range as long as the file might be the file
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
                        raise StorageError(f"{sink.url}: requested {wanted} bytes, got {len(data)}")
                    if not data:
                        await self._size()
                        raise TransientError(f"{sink.url}: the response ended at byte {sink.position}")
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
