"""Writes to fsspec's file systems: in order, through a blocking handle, under a temporary name."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fsspec.spec import AbstractBufferedFile

from snapshot.errors import StorageError
from snapshot.plugins.fsspec.call_threads import LAST_WORDS, Lane
from snapshot.plugins.fsspec.chain import ConnectedChain
from snapshot.plugins.fsspec.fsspec_client import FsspecClient
from snapshot.plugins.fsspec.publish import remove_file, remove_unfinished, rename_whole, temporary_name, write_small
from snapshot.plugins.network.retry import Attempt, TransientError, retry_request
from snapshot.plugins.network.transfer import RequestBody
from snapshot.storage import Buffer, FileWriter

T = TypeVar("T")
SLOWEST = 1 << 20
"""Minimum rate in bytes per second for handles that send the file when they are closed."""


class FsspecWriter(FileWriter):
    """Writer that sends a short file in one call, with retries, and a long one through a handle, without retries."""

    def __init__(self, client: FsspecClient, path: str, size: int) -> None:
        self._client = client
        self._path = path
        self._url = client.url.join(path)
        self._size = size
        self._aside = temporary_name(client, path)
        self._reached = 0
        self._lane: Lane[ConnectedChain] | None = None
        self._handle: Any = None
        self._whole = self._over = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Copy the bytes to the thread in chunks."""
        self._open()
        body = RequestBody(buffers)
        end = offset + body.nbytes
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{end} do not fit a file of {self._size}")
        if not body.nbytes:
            return
        if offset != self._reached:
            raise StorageError(f"{self._url}: must be written in order: expected offset {self._reached}, got {offset}")
        if body.nbytes == self._size <= self._client.chunk:
            await write_small(self._client, self._path, self._aside, body.read())
            self._reached, self._whole = end, True
            return
        if self._handle is None:
            await self._begin()
        while self._reached < end:
            async with self._client.context.memory.count(min(self._client.chunk, end - self._reached)):
                data = body.read(self._client.chunk)
                written = await self._once("write", _wrote(self._handle, data))
                if isinstance(written, int) and written != len(data):
                    raise StorageError(f"{self._url}: wrote {written} of {len(data)} bytes")
            self._reached += len(data)

    async def _begin(self) -> None:
        """Open the file, with retries, since it is still empty."""
        client = self._client
        mounted = await client.mount()

        async def once(attempt: Attempt) -> None:
            lane = mounted.lane()
            handle = await client.call(
                lane,
                self._path,
                lambda chain: chain.in_folder(self._aside, lambda full: chain.inner.open(full, "wb")),
                attempt,
            )
            self._lane, self._handle = lane, handle

        await retry_request("create", self._url, client.retry_policy, once)

    async def _once(self, name: str, work: Callable[[ConnectedChain], T], longer: float = 0.0) -> T:
        """Make a call without retries, since its effect is unknown after a fault."""
        client, lane = self._client, self._lane
        assert lane is not None
        patience = replace(
            client.retry_policy,
            timeout=client.retry_policy.timeout + longer,
            deadline=client.retry_policy.deadline + longer,
        )
        last: list[TransientError] = []

        async def once(attempt: Attempt) -> T:
            if attempt.number > 1:
                reason = last[0] if last else f"{self._url}: no response to {name} in {patience.timeout:.3g} seconds"
                raise StorageError(f"{reason} (a partial write cannot be retried)")
            try:
                return await client.call(lane, self._path, work, attempt)
            except TransientError as error:
                last.append(error)
                raise

        return await retry_request(name, self._url, patience, once)

    def _open(self) -> None:
        if self._over:
            raise ValueError(f"{self._url}: already finished or aborted")

    async def finish(self) -> None:
        """Close the file, check its size, and rename it."""
        self._open()
        client = self._client
        if self._reached < self._size:
            raise StorageError(f"{self._url}: nothing was written at byte {self._reached} of {self._size}")
        if not self._size:
            await write_small(client, self._path, self._aside, b"")
        elif self._handle is not None:
            await self._once("finish", lambda _: self._handle.close(), self._size / SLOWEST)
            self._handle = None
        found = await client.stored_size("finish", self._path, self._aside)
        if found is not None and found != self._size:
            raise StorageError(f"{self._url}: the stored file has {found} of {self._size} bytes")
        await rename_whole(client, self._path, self._aside, self._size)
        self._over = True

    async def abort(self) -> None:
        """Discard the handle without finishing the file, and remove its bytes."""
        if self._over:
            return
        self._over = True
        handle, lane, self._handle = self._handle, self._lane, None
        if handle is not None and lane is not None:
            _forget(handle)
            if lane.usable:
                with contextlib.suppress(StorageError, TimeoutError):
                    async with asyncio.timeout(LAST_WORDS):
                        await self._client.call(lane, self._path, lambda _: _discard(handle))
        if self._whole and self._aside == self._path:
            await remove_file(self._client, "delete", self._path)
        else:
            await remove_unfinished(self._client, self._path, self._aside)


def _forget(handle: Any) -> None:
    """Keep the garbage collector from finishing an abandoned file, without a call to the file system."""
    if isinstance(handle, AbstractBufferedFile):
        handle.closed = True
    elif isinstance(handle, tempfile.SpooledTemporaryFile):
        tempfile.SpooledTemporaryFile.close(handle)  # webdav4's `close` would send it


def _discard(handle: Any) -> None:
    """Discard an open file without finishing it."""
    with contextlib.suppress(Exception):
        handle.discard()
    if not isinstance(handle, AbstractBufferedFile):
        with contextlib.suppress(Exception):
            handle.close()


def _wrote(handle: Any, data: bytes) -> Callable[[ConnectedChain], Any]:
    return lambda _: handle.write(data)
