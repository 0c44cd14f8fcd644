"""A file on its way into one of fsspec's file systems: in order, through a handle that blocks, beside its name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from snapshot.plugins.attempts import Attempt, RequestBody, TransientError, retry_request
from snapshot.plugins.fsspec_calls import LAST_WORDS, Lane
from snapshot.plugins.fsspec_systems import System, discard, forget

from snapshot.errors import StorageError
from snapshot.storage import Buffer, FileWriter

if TYPE_CHECKING:
    from snapshot.plugins.fsspec import FsspecStorage

T = TypeVar("T")
SLOWEST = 1 << 20
"""Bytes a second that a file which goes up only when it is closed may be sent at."""


class FsspecWriter(FileWriter):
    """A short file goes in one call, which can be made again; what went through a handle cannot."""

    def __init__(self, storage: FsspecStorage, path: str, size: int, chunk: int) -> None:
        self._storage = storage
        self._path = path
        self._url = storage.url.join(path)
        self._size = size
        self._chunk = min(chunk, storage.limits.preferred_part)
        self._made = storage.temporary(path)
        self._reached = 0
        self._lane: Lane[System] | None = None
        self._handle: Any = None
        self._whole = self._over = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Bounce the bytes to the thread, chunk by chunk."""
        self._open()
        body = RequestBody(buffers)
        end = offset + body.nbytes
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{end} do not fit a file of {self._size}")
        if not body.nbytes:
            return
        if offset != self._reached:
            raise StorageError(f"{self._url}: is written in order, and byte {self._reached} comes before {offset}")
        if body.nbytes == self._size <= self._chunk:
            await self._storage.pipe(self._path, self._made, body.read())
            self._reached, self._whole = end, True
            return
        if self._handle is None:
            await self._begin()
        while self._reached < end:
            async with self._storage.context.memory.count(min(self._chunk, end - self._reached)):
                data = body.read(self._chunk)
                written = await self._once("write", _wrote(self._handle, data))
                if isinstance(written, int) and written != len(data):
                    raise StorageError(f"{self._url}: took {written} of {len(data)} bytes")
            self._reached += len(data)

    async def _begin(self) -> None:
        """Open the file, retry_request: nothing is in it yet."""
        storage = self._storage
        mounted = await storage.mount()

        async def once(attempt: Attempt) -> None:
            lane = mounted.lane()
            handle = await storage.call(
                lane,
                self._path,
                lambda system: system.in_folder(self._made, lambda full: system.inner.open(full, "wb")),
                attempt,
            )
            self._lane, self._handle = lane, handle

        await retry_request("create", self._url, storage.retry_policy, once)

    async def _once(self, name: str, work: Callable[[System], T], longer: float = 0.0) -> T:
        """A call that cannot be made again: what of it was done is not known."""
        storage, lane = self._storage, self._lane
        assert lane is not None
        patience = replace(
            storage.retry_policy,
            timeout=storage.retry_policy.timeout + longer,
            deadline=storage.retry_policy.deadline + longer,
        )
        last: list[TransientError] = []

        async def once(attempt: Attempt) -> T:
            if attempt.number > 1:
                reason = last[0] if last else f"{self._url}: no answer to {name} in {patience.timeout:.3g} seconds"
                raise StorageError(f"{reason} (what was written in part cannot be written again)")
            try:
                return await storage.call(lane, self._path, work, attempt)
            except TransientError as error:
                last.append(error)
                raise

        return await retry_request(name, self._url, patience, once)

    def _open(self) -> None:
        if self._over:
            raise ValueError(f"{self._url}: was finished or aborted already")

    async def finish(self) -> None:
        """Close it, see how long it is, and give it its name."""
        self._open()
        storage = self._storage
        if self._reached < self._size:
            raise StorageError(f"{self._url}: nothing was written at byte {self._reached} of {self._size}")
        if not self._size:
            await storage.pipe(self._path, self._made, b"")
        elif self._handle is not None:
            await self._once("finish", lambda _: self._handle.close(), self._size / SLOWEST)
            self._handle = None
        found = await storage.ask(
            "finish", self._path, lambda system: system.inner.info(system.full(self._made)).get("size")
        )
        if found is not None and found != self._size:
            raise StorageError(f"{self._url}: {found} bytes arrived of {self._size}")
        await storage.move(self._path, self._made, self._size)
        self._over = True

    async def abort(self) -> None:
        """Let go of the handle without making the file whole, and remove what there is."""
        if self._over:
            return
        self._over = True
        handle, lane, self._handle = self._handle, self._lane, None
        if handle is not None and lane is not None:
            forget(handle)
            if lane.usable:
                with contextlib.suppress(StorageError, TimeoutError):
                    async with asyncio.timeout(LAST_WORDS):
                        await self._storage.call(lane, self._path, lambda _: discard(handle))
        if self._whole and self._made == self._path:
            await self._storage.delete([self._path])
        else:
            await self._storage.drop(self._path, self._made)


def _wrote(handle: Any, data: bytes) -> Callable[[System], Any]:
    return lambda _: handle.write(data)
