"""Files in any file system of fsspec: SFTP, WebDAV, Hugging Face, archives, caches, and chains of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fsspec.registry import known_implementations, registry
from fsspec.spec import AbstractBufferedFile

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.bodies import BufferSink, RequestBody
from snapshot.io.retry import RequestAttempts, TransientError, retry_request
from snapshot.io.storage import (
    ANYTHING,
    Buffer,
    Capabilities,
    Context,
    Expect,
    FileStat,
    FileWriter,
    Limits,
    Storage,
    check_path,
)
from snapshot.io.url import URL
from snapshot_fsspec.client import (
    CHUNK,
    LAST_WORDS,
    PREFIX,
    THREADS,
    ConnectedChain,
    FsspecClient,
    Lane,
    modified_time,
    translate,
    version_token,
)

# Atomic writes: under a temporary name and renamed, if the file system renames in one step.

TEMPORARY = re.compile(r"(?:.*/)?\.[^/]+\.[0-9a-f]{16}\.tmp")


def temporary_name(client: FsspecClient, path: str) -> str:
    """Return the name under which a file is written."""
    if client.known.move is None:
        return path
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{secrets.token_hex(8)}.tmp"


async def write_small(client: FsspecClient, path: str, aside: str, data: bytes) -> None:
    """Write a short file in one call, with retries."""
    async with client.context.memory.count(len(data)):
        await client.send_request(
            "put", path, lambda chain: chain.in_folder(aside, lambda full: chain.inner.pipe_file(full, data))
        )


async def rename_whole(client: FsspecClient, path: str, aside: str, size: int) -> None:
    """Rename a finished file."""
    move, mounted = client.known.move, await client.mount()

    async def once(attempt: RequestAttempts) -> None:
        def work(chain: ConnectedChain) -> None:
            if move is None or path == aside:
                return
            try:
                move(chain.inner, chain.full(aside), chain.full(path))
            except Exception:
                # an attempt without a response may have renamed it: then the temporary name does not exist
                if not attempt.uncertain or chain.inner.exists(chain.full(aside)):
                    raise
                if chain.inner.info(chain.full(path)).get("size") != size:
                    raise

        await client.call(mounted.lane(), path, work, attempt)

    await retry_request("rename", client.url.join(path), client.retry_policy, once)


async def remove_unfinished(client: FsspecClient, path: str, aside: str) -> None:
    """Remove an unfinished file and its folders, without an error if that fails."""
    if aside == path:
        return
    try:
        await remove_file(client, "abort", aside, within=min(10.0, client.retry_policy.deadline))
    except StorageError:
        return  # `sweep` will find it


async def remove_file(client: FsspecClient, name: str, path: str, within: float | None = None) -> None:
    """Remove a file and the folders that become empty; no error if it does not exist."""
    known = client.known

    def work(chain: ConnectedChain) -> None:
        try:
            known.remove(chain.inner, chain.full(path))
        except Exception as error:
            if not isinstance(translate(error, ""), StorageNotFoundError):
                raise
        if known.move is not None:
            try:
                chain.remove_folders(path)
            except Exception as error:
                if isinstance(translate(error, ""), TransientError):
                    raise

    await client.send_request(name, path, work, within)


# Ranged reads from fsspec's file systems in chunks, whose lengths are checked.


class FsspecReader:
    """Reader that fills a sink over one lane, and never reads a whole file for a range of it."""

    def __init__(self, client: FsspecClient, lane: Lane[ConnectedChain], path: str, sink: BufferSink) -> None:
        self._client = client
        self._lane = lane
        self._path = path
        self._sink = sink

    async def fill(self, attempt: RequestAttempts) -> None:
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


# Writes to fsspec's file systems: in order, through a blocking handle, under a temporary name.

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

        async def once(attempt: RequestAttempts) -> None:
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

        async def once(attempt: RequestAttempts) -> T:
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


# Files in any file system of fsspec
#
# All calls use the blocking interface, in this library's threads. A synchronous file system is called by one thread.
# The asynchronous ones run on fsspec's loop, and several threads wait for them. Awaiting them on this library's loop
# would need a second implementation for few file systems, whose files block during writes.

LOOK = 1 << 20
"""Maximum size of a file whose content is part of its token, if its time has whole seconds only."""


class FsspecStorage(Storage):
    """Files below any URL of fsspec, including chains.

    Options are those of the file system, and `timeout`, `deadline` and `part_bytes` as for object stores. Options of
    an inner file system of a chain are a dict under the name of its protocol.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        self._client = FsspecClient(url, self.options, context)
        known, concurrent = self._client.known, self._client.concurrent
        self.capabilities = Capabilities(
            write=known.writes,
            delete=known.writes,
            atomic_put=known.writes,
            conditional_put=False,  # `mode="create"` is never atomic in fsspec
            durable=known.seen_when_closed,
        )
        self.limits = Limits(
            in_order=True,
            preferred_part=self._client.part_bytes,
            parallel_parts=THREADS if concurrent else 2,
            parts_per_file=1,
            parallel_files=4 if concurrent else 1,
            merge_gap=1 << 20,
        )

    @staticmethod
    def knows_scheme(scheme: str) -> bool:
        """Return True if fsspec has a file system for a scheme, or for the first one of a chain."""
        first = scheme.removeprefix(PREFIX).partition("::")[0]
        return scheme.startswith(PREFIX) or first in registry or first in known_implementations

    async def close(self) -> None:
        await self._client.close()

    def _require(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise StorageError(f"{self.url}: this storage cannot {capability.replace('_', ' ')}")

    # Reading

    async def stat(self, path: str) -> FileStat:
        """Return size, time and token; read a short file if its time has whole seconds only."""
        check_path(path)
        return await self._client.send_request("stat", path, self._stat(path))

    def _stat(self, path: str, data: bytes | None = None) -> Callable[[ConnectedChain], FileStat]:
        url, coarse = self.url.join(path), self._client.known.coarse

        def work(chain: ConnectedChain) -> FileStat:
            full = chain.full(path)
            info = chain.inner.info(full)
            if info.get("type") == "directory" or info.get("size") is None:
                raise StorageNotFoundError(f"{url}: not a file")
            size, found = int(info["size"]), None
            if coarse and size <= LOOK:
                found = data if data is not None and len(data) == size else chain.cat(path)
            return FileStat(size, modified_time(info), version_token(info, found))

        return work

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read in chunks: by ranges if they are supported, else by an open file."""
        check_path(path)
        sink = BufferSink(self.url.join(path), offset, buffers, token)
        if token is not None or sink.full:
            await self._pinned(path, token)
        if sink.full:
            return
        mounted = await self._client.mount()

        async def once(attempt: RequestAttempts) -> None:
            await FsspecReader(self._client, mounted.lane(), path, sink).fill(attempt)

        await retry_request("read", sink.url, self._client.retry_policy, once)
        if token is not None:
            await self._pinned(path, token)

    async def _pinned(self, path: str, token: str | None) -> None:
        if (await self.stat(path)).token != token and token is not None:
            raise StorageConflictError(f"{self.url.join(path)}: replaced during the read")

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Read a small file in two calls: its size, and its content."""
        url = self.url.join(check_path(path))

        def whole(chain: ConnectedChain) -> bytes | int:
            size = chain.inner.info(chain.full(path)).get("size")
            if size is None:
                raise StorageNotFoundError(f"{url}: not a file")
            if limit is not None and size > limit:
                raise StorageError(f"{url}: has {size:,} bytes, more than the {limit:,} allowed")
            if size > CHUNK:
                return int(size)
            data = bytes(chain.cat(path))
            if len(data) != size:
                raise TransientError(f"got {len(data)} bytes of {size}")  # truncated, or replaced meanwhile
            return data

        found = await self._client.send_request("get", path, whole)
        if isinstance(found, bytes):
            return found
        data = bytearray(found)
        await self.read_into(path, 0, [data], token=(await self.stat(path)).token)
        return bytes(data)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """List finished files, in one call per folder."""
        found = [path for path, _ in await self._entries(prefix, recursive)]
        return sorted(path for path in found if not TEMPORARY.fullmatch(path))

    async def _entries(self, prefix: str, recursive: bool) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return the paths that begin with a prefix, and their infos. fsspec's `find` would ignore errors."""
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        found, pending = [], [folder]
        while pending:
            here = pending.pop()
            for name, info in await self._client.send_request(
                "list", here, partial(ConnectedChain.list_folder, path=here)
            ):
                path = f"{here}/{name}" if here else name
                if info.get("type") != "directory":
                    if path.startswith(prefix):
                        found.append((path, info))
                elif f"{path}/".startswith(prefix):
                    if recursive:
                        pending.append(path)
                    else:
                        found.append((f"{path}/", info))
        return found

    # Writing

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file. The first part sends the first call."""
        check_path(path)
        self._require("write")
        return FsspecWriter(self._client, path, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a small file under a temporary name, and rename it."""
        check_path(path)
        self._require("write")
        if expect is not ANYTHING:
            self._require("conditional_put")
        aside, data = temporary_name(self._client, path), bytes(data)
        try:
            await write_small(self._client, path, aside, data)
            await rename_whole(self._client, path, aside, len(data))
        except BaseException:
            await remove_unfinished(self._client, path, aside)
            raise
        return (await self._client.send_request("stat", path, self._stat(path, data))).token

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete files and the folders that become empty, in one call each."""
        for path in paths:
            check_path(path)
        self._require("delete")
        for path in paths:
            await remove_file(self._client, "delete", path)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Remove the temporary files of killed processes."""
        if not (self.capabilities.write and self._client.known.move is not None):
            return []
        before = time.time() - older_than
        entries = await self._entries(prefix.rpartition("/")[0] + "/" if "/" in prefix else "", True)
        old = [
            path
            for path, info in entries
            if path.startswith(prefix) and TEMPORARY.fullmatch(path) and modified_time(info) < before
        ]
        await self.delete(old)
        return old
