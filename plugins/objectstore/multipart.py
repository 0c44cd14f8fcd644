"""Uploads of files to an object store, whole or in parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from snapshot.aio import gather_limited
from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.network.retry import Attempt
from snapshot.plugins.network.transfer import RequestBody
from snapshot.plugins.objectstore.conditional_put import put_object
from snapshot.plugins.objectstore.connection import ConnectedStorage
from snapshot.plugins.objectstore.driver import Driver
from snapshot.storage import ANYTHING, Buffer, FileWriter, in_thread

LAST_WORDS = 10.0
"""Maximum seconds to clean up after a failure, since the caller waits for the error."""
AT_ONCE = 16
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

            await gather_limited(range(0, size, length), part, AT_ONCE)
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
