"""Files in an object store, through a driver: ranges, listings, deletions, and uploads in parts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.storage import ANYTHING, Buffer, Capabilities, Expect, FileStat, FileWriter, check_path
from snapshot.io.url import URL
from snapshot.plugins.network.http import BufferSink, BytesSink, RequestBody, ResponseSink
from snapshot.plugins.network.retry import Attempt
from snapshot.plugins.objectstore.driver import ConnectedStorage, Driver, Page, put_object

# Uploads of files to an object store, whole or in parts.

LAST_WORDS = 10.0
"""Maximum seconds to clean up after a failure, since the caller waits for the error."""
PARTS_AT_ONCE = 16
"""Maximum concurrent parts of a copy, whose bytes do not pass through this host."""


async def abandon_upload(key: str, upload: str, driver: Driver, _: Attempt) -> None:
    """Abort an upload; to be passed to `send_request`."""
    await driver.abandon(key, upload)


async def copy_object(storage: ConnectedStorage[Any], source: str, token: str, path: str, size: int) -> None:
    """Let the store copy version `token` of an object: in one request, or in parts. Nothing remains after an error."""
    key, uncertain = storage.key(path), False
    writer = ObjectWriter(storage, path, key, size)

    async def once(driver: Driver, attempt: Attempt) -> None:
        nonlocal uncertain
        uncertain = attempt.uncertain
        await driver.copy(source, token, key, attempt)

    try:
        longest = (await storage.driver()).largest_copy
        if size <= longest:
            await storage.send_request("share", path, once)
        else:
            length = max(longest, -(-size // storage.limits.most_parts))

            async def part(offset: int) -> None:
                await writer.copy(source, token, offset, min(length, size - offset))

            await gather_limited(range(0, size, length), part, PARTS_AT_ONCE)
            await writer.finish()
        made = (await storage.stat(path)).size
        if made != size:
            raise StorageError(f"{storage.url.join(path)}: the store copied {made} of {size} bytes")
    except BaseException as error:
        await writer.abort()
        if uncertain or not isinstance(error, (StorageConflictError, StorageNotFoundError)):
            with contextlib.suppress(asyncio.CancelledError, StorageError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await storage.delete([path])
        raise


class ObjectWriter(FileWriter):
    """Writer that uploads a file in one request if one write has all of it, and otherwise in parts."""

    def __init__(self, storage: ConnectedStorage[Any], path: str, key: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._key = key
        self._size = size
        self._url = storage.url.join(path)
        limits = storage.limits
        self._part_length = max(limits.smallest_part, -(-size // limits.most_parts), 1)
        """Length of a part, from which offsets are numbered. The first write sets it."""
        self._upload: asyncio.Task[str] | None = None
        self._parts: dict[int, str] = {}
        self._written: dict[int, int] = {}
        self._stored: Mapping[int, str] = {}
        """The tags of parts that an earlier process uploaded."""
        self._resumes = storage.context.resume
        self._whole = self._over = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Upload a part in one request."""
        body, path, key = RequestBody(buffers), self._path, self._key
        if self._over:
            raise ValueError(f"{self._url}: already finished or aborted")
        end = offset + body.nbytes
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{end} do not fit a file of {self._size}")
        if not body.nbytes:
            return
        if body.nbytes == self._size:
            await put_object(self._storage, path, body, ANYTHING)
            self._whole = True
            return
        number, upload = await self._add_part(offset, body.nbytes)
        if number in self._stored and await in_thread(
            (await self._storage.driver()).is_part, self._stored[number], body
        ):
            self._parts[number] = self._stored[number]
            return

        async def once(driver: Driver, attempt: Attempt) -> str:
            body.attempt = attempt
            body.seek(0)
            return await driver.part(key, upload, number, offset, body, last=end == self._size)

        self._parts[number] = await self._storage.send_request("upload", path, once)

    async def copy(self, source: str, token: str, offset: int, nbytes: int) -> None:
        """Let the store copy a part from another object of this size, in this version."""
        number, upload = await self._add_part(offset, nbytes)
        key, end = self._key, offset + nbytes
        self._parts[number] = await self._storage.send_request(
            "share",
            self._path,
            lambda driver, _: driver.copy_part(key, upload, number, source, token, begin=offset, end=end),
        )

    async def _add_part(self, offset: int, nbytes: int) -> tuple[int, str]:
        """Record a part. Return its number, and the name of the upload."""
        if not self._written and offset + nbytes < self._size:
            self._part_length = nbytes
        number = offset // self._part_length + 1
        if number in self._parts or self._written.get(offset, nbytes) != nbytes:
            raise StorageError(f"{self._url}: all parts of a file but the last must have one length")
        self._written[offset] = nbytes
        self._parts[number] = ""
        return number, await self._upload_name()

    async def _upload_name(self) -> str:
        """Return the name of the upload, which the first part begins."""
        if self._upload is None:
            self._upload = asyncio.ensure_future(self._begin())
        return await asyncio.shield(self._upload)

    async def _begin(self) -> str:
        """Begin an upload, or continue the newest one of an earlier process."""
        key, size, send = self._key, self._size, self._storage.send_request
        if self._resumes:
            found = await send("list uploads", self._path, lambda driver, _: driver.uploads(key))
            begun = [(when, name) for each, name, when in found if each == key]
            if begun:
                upload = str(max(begun)[1])
                self._stored = await send("list parts", self._path, lambda driver, _: driver.parts(key, upload))
                return upload
        name: str = await send("begin", self._path, lambda driver, _: driver.begin(key, size))
        return name

    async def finish(self) -> None:
        """Complete the upload."""
        if self._over:
            raise ValueError(f"{self._url}: already finished or aborted")
        if not self._size:
            await self._storage.put(self._path, b"")
        elif not self._whole:
            reached = 0
            for offset, length in sorted(self._written.items()):
                if offset != reached:
                    break
                reached += length
            if reached < self._size or not all(self._parts.values()):
                raise StorageError(f"{self._url}: nothing was written at byte {reached} of {self._size}")
            await self._storage.send_request("finish", self._path, self._complete)
        self._over = True

    async def _complete(self, driver: Driver, attempt: Attempt) -> None:
        """Complete the upload. If it does not exist after an attempt without a response, check the object."""
        upload = await self._upload_name()
        try:
            await driver.complete(self._key, upload, dict(sorted(self._parts.items())))
        except Exception as error:
            fault = error if isinstance(error, StorageError) else driver.fault(error, self._url)
            if not (attempt.uncertain and isinstance(fault, StorageNotFoundError)):
                raise
            if (await driver.head(self._key)).size != self._size:
                raise

    async def abort(self) -> None:
        """Abort the upload, or delete the file if it was uploaded in one request."""
        if self._over:
            return
        self._over = True
        begun, key = self._upload, self._key
        if begun is not None and not self._resumes:
            with contextlib.suppress(asyncio.CancelledError, StorageError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    upload = await begun
                    await self._storage.send_request(
                        "abort", self._path, partial(abandon_upload, key, upload), LAST_WORDS
                    )
        if self._whole:
            await self._storage.delete([self._path])


# Files in an object store, through a driver: ranges and their lengths, listings, deletions, unfinished uploads.

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
