"""Files in any file system of fsspec: SFTP, WebDAV, Hugging Face, archives, caches, and chains of them.

All calls use the blocking interface, in this library's threads. A synchronous file system is called by one thread. The
asynchronous ones run on fsspec's loop, and several threads wait for them. Awaiting them on this library's loop would
need a second implementation for few file systems, whose files block during writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fsspec.registry import known_implementations, registry

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.fsspec.chain import ConnectedChain
from snapshot.plugins.fsspec.file_info import modified_time, version_token
from snapshot.plugins.fsspec.fsspec_client import CHUNK, PREFIX, THREADS, FsspecClient
from snapshot.plugins.fsspec.fsspec_reader import FsspecReader
from snapshot.plugins.fsspec.fsspec_writer import FsspecWriter
from snapshot.plugins.fsspec.publish import (
    TEMPORARY,
    remove_file,
    remove_unfinished,
    rename_whole,
    temporary_name,
    write_small,
)
from snapshot.plugins.network.retry import Attempt, TransientError, retry_request
from snapshot.plugins.network.transfer import BufferSink
from snapshot.storage import (
    ANYTHING,
    URL,
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

LOOK = 1 << 20
"""Maximum size of a file whose content is part of its token, if its time has whole seconds only."""


def knows_scheme(scheme: str) -> bool:
    """Return True if fsspec has a file system for a scheme, or for the first one of a chain."""
    first = scheme.removeprefix(PREFIX).partition("::")[0]
    return scheme.startswith(PREFIX) or first in registry or first in known_implementations


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

    async def close(self) -> None:
        """Release the file systems."""
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

        async def once(attempt: Attempt) -> None:
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
