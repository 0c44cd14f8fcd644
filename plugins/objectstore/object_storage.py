"""Files in an object store, through a driver: ranges and their lengths, listings, deletions, unfinished uploads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from snapshot.errors import StorageConflictError, StorageNotFoundError
from snapshot.plugins.network.retry import Attempt
from snapshot.plugins.network.transfer import BufferSink, BytesSink, RequestBody, ResponseSink
from snapshot.plugins.objectstore.conditional_put import put_object
from snapshot.plugins.objectstore.connection import ConnectedStorage
from snapshot.plugins.objectstore.driver import Driver, Page
from snapshot.plugins.objectstore.multipart import ObjectWriter, abandon_upload, copy_object
from snapshot.storage import ANYTHING, URL, Buffer, Capabilities, Expect, FileStat, FileWriter, check_path

D = TypeVar("D", bound=Driver)
AT_ONCE = 16
"""Maximum concurrent `delete` requests."""


class ObjectStorage(ConnectedStorage[D]):
    """Base of storages in object stores. Subclasses provide a driver for the requests."""

    capabilities = Capabilities(shares="copy")

    # Reading

    async def _fill(self, name: str, path: str, sink: ResponseSink) -> None:
        key = self.key(path)

        async def once(driver: D, attempt: Attempt) -> None:
            sink.attempt = attempt
            if not sink.full:  # else the connection broke after the last byte
                await driver.read(key, sink)
                sink.ended()

        await self.send_request(name, path, once)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read a range in one request, directly into the buffers."""
        sink = BufferSink(self.url.join(path), offset, buffers, token)
        if sink.end == offset:
            await self.stat(path)
        else:
            await self._fill("read", path, sink)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Read a small file in one request."""
        sink = BytesSink(self.url.join(path), limit)
        await self._fill("get", path, sink)
        return bytes(sink.data)

    async def stat(self, path: str) -> FileStat:
        """Return size, time and token, in one request."""
        key = self.key(path)
        return await self.send_request("stat", path, lambda driver, _: driver.head(key))

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """List paths, in one request per page."""
        self._require("list")
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        start, found, following = self._root + prefix, set[str](), None
        while True:
            page = await self.send_request("list", prefix, partial(_listed, start, recursive, following))
            found.update(key for key in page.keys if not key.endswith("/"))
            found.update(page.folders)
            following = page.following
            if following is None:
                return sorted(key[len(self._root) :] for key in found)

    # Writing

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file. The first part sends the first request."""
        self._require("write")
        key = self.key(path)
        await self.send_request("connect", path, _connected)
        return ObjectWriter(self, path, key, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a small file in one request."""
        self._require("write")
        return await put_object(self, path, RequestBody([data]), expect)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete in batches, several requests concurrently."""
        self._require("delete")
        keys = {self.key(path): path for path in paths}
        if not keys:
            return
        size = (await self.send_request("connect", "", _connected)).batch
        names = list(keys)
        batches = [names[at : at + size] for at in range(0, len(names), size)]
        at_once = asyncio.Semaphore(AT_ONCE)

        async def drop(batch: Sequence[str]) -> None:
            async with at_once:
                await self.send_request("delete", keys[batch[0]], lambda driver, _: driver.delete(batch))

        for outcome in await asyncio.gather(*map(drop, batches), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        """Let the store copy the object, and compare the size."""
        if not self.capabilities.shares:
            await super().share(source, path, token=token)
        self.key(path)
        origin = self.key_of(source)
        found = await self.send_request("stat", source, lambda driver, _: driver.head(origin))
        if token is not None and token != found.token:
            raise StorageConflictError(f"{source}: was replaced")
        with contextlib.suppress(StorageNotFoundError):
            await self.stat(path)
            raise StorageConflictError(f"{self.url.join(path)}: already exists")
        await copy_object(self, origin, found.token, path, found.size)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Abort the uploads of killed processes."""
        found = await self.send_request("list uploads", prefix, lambda driver, _: driver.uploads(self._root + prefix))
        old = [(key, upload) for key, upload, began in found if began < time.time() - older_than]
        for key, upload in old:
            await self.send_request("abort", key[len(self._root) :], partial(abandon_upload, key, upload))
        return sorted({key[len(self._root) :] for key, _ in old})


async def _listed(start: str, recursive: bool, following: Any, driver: Driver, _: Attempt) -> Page:
    return await driver.list(start, recursive, following)


async def _connected(driver: D, _: Attempt) -> D:
    return driver
