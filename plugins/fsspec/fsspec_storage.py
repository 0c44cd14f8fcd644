"""Whatever fsspec knows and no plugin of ours speaks itself: SFTP, WebDAV, Hugging Face, archives, caches, and chains.

Everything goes through the blocking face that all of its file systems have, in threads of our own: one that is not
asynchronous is called by one thread, in turn; the others run on fsspec's own loop, and several threads wait for them.
To await those on our loop would be a second way beside the first, for few systems, whose files opened for writing
block all the same; what they spend beyond it is a thread's switch in requests over a network.
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
"""Files up to this long are looked at where a time of whole seconds does not tell two contents apart."""


def knows_scheme(scheme: str) -> bool:
    """Whether fsspec has a file system for the scheme of a URL, or for the first one of a chain."""
    first = scheme.removeprefix(PREFIX).partition("::")[0]
    return scheme.startswith(PREFIX) or first in registry or first in known_implementations


class FsspecStorage(Storage):
    """Any URL of fsspec's, chains included. Options are those of its file systems, and `timeout`, `deadline` and
    `part_bytes` as for object stores; options for an inner one of a chain stand in a dict under its protocol's name.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        self._client = FsspecClient(url, self.options, context)
        known, concurrent = self._client.known, self._client.concurrent
        self.capabilities = Capabilities(
            write=known.writes,
            delete=known.writes,
            atomic_put=known.writes,
            conditional_put=False,  # `mode="create"` looks first, and writes then, in all of them
            durable=known.seen_when_closed,
            server_side_copy=known.copies,
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
        """Give the file systems back."""
        await self._client.close()

    def _require(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise StorageError(f"{self.url}: this storage cannot {capability.replace('_', ' ')}")

    # Reading

    async def stat(self, path: str) -> FileStat:
        """One call; a second one to look at what was written a moment ago, where times are whole seconds."""
        check_path(path)
        return await self._client.send_request("stat", path, self._stat(path))

    def _stat(self, path: str, data: bytes | None = None) -> Callable[[ConnectedChain], FileStat]:
        url, coarse = self.url.join(path), self._client.known.coarse

        def work(chain: ConnectedChain) -> FileStat:
            full = chain.full(path)
            info = chain.inner.info(full)
            if info.get("type") == "directory" or info.get("size") is None:
                raise StorageNotFoundError(f"{url}: is no file")
            size, found = int(info["size"]), None
            if coarse and size <= LOOK:
                found = data if data is not None and len(data) == size else chain.cat(path)
            return FileStat(size, modified_time(info), version_token(info, found))

        return work

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Chunk by chunk, by ranges where the file chain has them, else out of a file that is opened."""
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
            raise StorageConflictError(f"{self.url.join(path)}: was replaced while it was read")

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Two calls for a short one: how long it is, and all of it."""
        url = self.url.join(check_path(path))

        def whole(chain: ConnectedChain) -> bytes | int:
            size = chain.inner.info(chain.full(path)).get("size")
            if size is None:
                raise StorageNotFoundError(f"{url}: is no file")
            if limit is not None and size > limit:
                raise StorageError(f"{url}: has {size:,} bytes, more than the {limit:,} allowed")
            if size > CHUNK:
                return int(size)
            data = bytes(chain.cat(path))
            if len(data) != size:
                raise TransientError(f"got {len(data)} bytes of {size}")  # cut off, or replaced meanwhile
            return data

        found = await self._client.send_request("get", path, whole)
        if isinstance(found, bytes):
            return found
        data = bytearray(found)
        await self.read_into(path, 0, [data], token=(await self.stat(path)).token)
        return bytes(data)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """A call a folder. What is not finished is not shown."""
        found = [path for path, _ in await self._entries(prefix, recursive)]
        return sorted(path for path in found if not TEMPORARY.fullmatch(path))

    async def _entries(self, prefix: str, recursive: bool) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Each path that begins with a prefix, and its info. (fsspec's own `find` takes errors for emptiness.)"""
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
        """Nothing is asked of the server before the first part is written."""
        check_path(path)
        self._require("write")
        return FsspecWriter(self._client, path, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write it beside, and move it to its name."""
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
        """One call a file, and one for each folder that it leaves empty."""
        for path in paths:
            check_path(path)
        self._require("delete")
        for path in paths:
            await remove_file(self._client, "delete", path)

    async def copy(self, source: str, path: str) -> None:
        """The server copies, beside, and moves it to its name."""
        check_path(source)
        check_path(path)
        self._require("server_side_copy")
        size, aside = (await self.stat(source)).size, temporary_name(self._client, path)
        try:
            await self._client.send_request(
                "copy",
                source,
                lambda chain: chain.in_folder(aside, lambda full: chain.inner.cp_file(chain.full(source), full)),
            )
            await rename_whole(self._client, path, aside, size)
        except BaseException:
            await remove_unfinished(self._client, path, aside)
            raise

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Remove the temporary files that killed processes left."""
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
