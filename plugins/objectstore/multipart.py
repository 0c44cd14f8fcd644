"""Uploads of files to an object store, whole or in parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.plugins.network.retry import Attempt
from snapshot.plugins.network.transfer import RequestBody
from snapshot.plugins.objectstore.conditional_put import put_object
from snapshot.plugins.objectstore.connection import ConnectedStorage
from snapshot.plugins.objectstore.driver import Driver
from snapshot.storage import ANYTHING, Buffer, FileWriter

LAST_WORDS = 10.0
"""Maximum seconds to clean up after a failure, since the caller waits for the error."""


async def abandon_upload(key: str, upload: str, driver: Driver, _: Attempt) -> None:
    """Abort an upload; to be passed to `send_request`."""
    await driver.abandon(key, upload)


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
        if not self._written and end < self._size:
            self._part_length = body.nbytes
        number = offset // self._part_length + 1
        if number in self._parts or self._written.get(offset, body.nbytes) != body.nbytes:
            raise StorageError(f"{self._url}: all parts of a file but the last must have one length")
        self._written[offset] = body.nbytes
        self._parts[number] = ""
        upload = await self._upload_name()

        async def once(driver: Driver, attempt: Attempt) -> str:
            body.attempt = attempt
            body.seek(0)
            return await driver.part(key, upload, number, offset, body, last=end == self._size)

        self._parts[number] = await self._storage.send_request("upload", path, once)

    async def _upload_name(self) -> str:
        """Return the name of the upload, which the first part begins."""
        if self._upload is None:
            key, size = self._key, self._size
            self._upload = asyncio.ensure_future(
                self._storage.send_request("begin", self._path, lambda driver, _: driver.begin(key, size))
            )
        return await asyncio.shield(self._upload)

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
        if begun is not None:
            with contextlib.suppress(asyncio.CancelledError, StorageError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    upload = await begun
                    await self._storage.send_request(
                        "abort", self._path, partial(abandon_upload, key, upload), LAST_WORDS
                    )
        if self._whole:
            await self._storage.delete([self._path])
