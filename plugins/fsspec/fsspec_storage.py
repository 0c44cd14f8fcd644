"""Whatever fsspec knows and no plugin of ours speaks itself: SFTP, WebDAV, Hugging Face, archives, caches, and chains.

Everything goes through the blocking face that all of its file systems have, in threads of our own: one that is not
asynchronous is called by one thread, in turn; the others run on fsspec's own loop, and several threads wait for them.
To await those on our loop would be a second way beside the first, for few systems, whose files opened for writing
block all the same; what they spend beyond it is a thread's switch in requests over a network.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fsspec.registry import known_implementations, registry
from snapshot.plugins.attempts import Attempt, BufferSink, RetryPolicy, TransientError, retry_request
from snapshot.plugins.fsspec_calls import Lane, Mount
from snapshot.plugins.fsspec_faults import LostError, fault, hidden, secrets_in, shown
from snapshot.plugins.fsspec_infos import listed, version, when
from snapshot.plugins.fsspec_reader import Reader
from snapshot.plugins.fsspec_systems import System, chain, connect, disconnect, traits, unknown_options
from snapshot.plugins.fsspec_writer import FsspecWriter

from snapshot.errors import MissingExtraError, SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
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

T = TypeVar("T")
CHUNK = 4 << 20
"""So many bytes are held beside the caller's memory at once, by one call."""
LOOK = 1 << 20
"""Files up to this long are looked at where a time of whole seconds does not tell two contents apart."""
THREADS = 8
"""That wait for a system which does several things at once."""
PREFIX = "fsspec+"
_OURS = ("timeout", "deadline", "part_bytes")
_TEMPORARY = re.compile(r"(?:.*/)?\.[^/]+\.[0-9a-f]{16}\.tmp")


def known(scheme: str) -> bool:
    """Whether fsspec has a file system for the scheme of a URL, or for the first one of a chain."""
    first = scheme.removeprefix(PREFIX).partition("::")[0]
    return scheme.startswith(PREFIX) or first in registry or first in known_implementations


class FsspecStorage(Storage):
    """Any URL of fsspec's, chains included. Options are those of its file systems, and `timeout`, `deadline` and
    `part_bytes` as for object stores; options for an inner one of a chain stand in a dict under its protocol's name.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        theirs = {name: value for name, value in options.items() if name not in _OURS}
        self.retry_policy = RetryPolicy(
            **{name: options[name] for name in ("timeout", "deadline") if options.get(name) is not None}
        )
        try:
            links = chain(url.reveal().removeprefix(PREFIX), theirs, self.retry_policy)
        except ImportError as error:
            raise MissingExtraError(f"{url}: {error}") from error
        if unknown := unknown_options(links, theirs):
            raise ValueError(f"{url}: unknown storage_options {', '.join(map(repr, unknown))}")
        values = [*secrets_in(theirs), *url.location.rpartition("@")[0].split(":")[1:], url.query]
        self._secrets = [value for value in [*values, *secrets_in([link.options for link in links])] if len(value) > 3]
        self._known = traits(links)
        self._links = links
        many = all(link.cls.async_impl for link in links)
        self._how = (lambda: connect(links, self._known)), disconnect, THREADS if many else 1
        self.capabilities = self._capabilities()
        self.limits = Limits(
            in_order=True,
            preferred_part=options.get("part_bytes") or 8 << 20,
            parallel_parts=THREADS if many else 2,
            parts_per_file=1,
            parallel_files=4 if many else 1,
            merge_gap=1 << 20,
        )
        if isinstance(self.limits.preferred_part, bool) or not self.limits.preferred_part >= 1:
            raise ValueError(f"part_bytes={options['part_bytes']!r} is not a number of bytes above 0")
        self._mounted: Mount[System] | None = None
        self.proven = False
        """Whether a range was answered by what can be nothing but that range."""

    def _capabilities(self) -> Capabilities:
        known = self._known
        return Capabilities(
            write=known.write,
            delete=known.write,
            atomic_put=known.write and (known.whole or known.move is not None),
            conditional_put=False,  # `mode="create"` looks first, and writes then, in all of them
            durable=known.durable,
            server_side_copy=known.copies,
        )

    # Calls

    async def mount(self) -> Mount[System]:
        """The file system, shared by the storages of its URL and options."""
        if self._mounted is None:
            clients = self.context.clients
            mounted = Mount(*self._how)
            if clients is not None:

                async def make() -> tuple[Mount[System], Callable[[], Any]]:
                    return mounted, mounted.close

                mounted = await clients.get(self._key(), make)
            self._mounted = mounted
        return self._mounted

    def _key(self) -> tuple[str, ...]:
        options = json.dumps(self.options, sort_keys=True, default=lambda value: f"{type(value)} {id(value)}")
        return type(self).__qualname__, self.url.reveal(), options

    async def close(self) -> None:
        """Give the file system back; its connections are closed unless others use it, too."""
        mounted, self._mounted = self._mounted, None
        if mounted is None:
            return
        if self.context.clients is not None:
            await self.context.clients.release(self._key())
        else:
            await mounted.close()

    async def call(
        self, lane: Lane[System], path: str, work: Callable[[System], T], attempt: Attempt | None = None
    ) -> T:
        """One call, whose errors become ours. `work` is given no memory of the caller's."""
        url = self.url.join(path)
        try:
            return await lane.call(work, attempt)
        except TransientError as error:
            raise TransientError(f"{url}: {error}", refused=error.refused) from error
        except SnapshotError:
            raise
        except Exception as error:  # noqa: BLE001 - every client has errors of its own; each is translated
            text = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}".rstrip(": ")
            made = fault(error, f"{url}: {hidden(str(text), self._secrets)}")
            if isinstance(made, LostError):
                lane.retire()  # some clients never connect again
            words = shown(error)
            raise made from (error if hidden(words, self._secrets) == words else None)

    async def ask(self, name: str, path: str, work: Callable[[System], T], within: float | None = None) -> T:
        """A call, made retry_request."""
        mounted = await self.mount()

        async def once(attempt: Attempt) -> T:
            return await self.call(mounted.lane(), path, work, attempt)

        return await retry_request(name, self.url.join(path), self.retry_policy, once, within)

    def need(self, capability: str) -> None:
        """Raise unless it is declared."""
        if not getattr(self.capabilities, capability):
            raise StorageError(f"{self.url}: this storage cannot {capability.replace('_', ' ')}")

    # Reading

    async def stat(self, path: str) -> FileStat:
        """One call; a second one to look at what was written a moment ago, where times are whole seconds."""
        check_path(path)
        return await self.ask("stat", path, self._stat(path))

    def _stat(self, path: str, data: bytes | None = None) -> Callable[[System], FileStat]:
        url, coarse = self.url.join(path), self._known.coarse

        def work(system: System) -> FileStat:
            full = system.full(path)
            info = system.inner.info(full)
            if info.get("type") == "directory" or info.get("size") is None:
                raise StorageNotFoundError(f"{url}: is no file")
            size, found = int(info["size"]), None
            if coarse and size <= LOOK:
                found = data if data is not None and len(data) == size else system.cat(path)
            return FileStat(size, when(info), version(info, found))

        return work

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Chunk by chunk, by ranges where the file system has them, else out of a file that is opened."""
        check_path(path)
        sink = BufferSink(self.url.join(path), offset, buffers, token)
        if token is not None or sink.full:
            await self._pinned(path, token)
        if sink.full:
            return
        mounted = await self.mount()

        async def once(attempt: Attempt) -> None:
            await Reader(self, mounted.lane(), path, sink, CHUNK).fill(attempt)

        await retry_request("read", sink.url, self.retry_policy, once)
        if token is not None:
            await self._pinned(path, token)

    async def _pinned(self, path: str, token: str | None) -> None:
        if (await self.stat(path)).token != token and token is not None:
            raise StorageConflictError(f"{self.url.join(path)}: was replaced while it was read")

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Two calls for a short one: how long it is, and all of it."""
        url = self.url.join(check_path(path))

        def whole(system: System) -> bytes | int:
            size = system.inner.info(system.full(path)).get("size")
            if size is None:
                raise StorageNotFoundError(f"{url}: is no file")
            if limit is not None and size > limit:
                raise StorageError(f"{url}: has {size:,} bytes, more than the {limit:,} allowed")
            if size > CHUNK:
                return int(size)
            data = bytes(system.cat(path))
            if len(data) != size:
                raise TransientError(f"got {len(data)} bytes of {size}")  # cut off, or replaced meanwhile
            return data

        found = await self.ask("get", path, whole)
        if isinstance(found, bytes):
            return found
        data = bytearray(found)
        await self.read_into(path, 0, [data], token=(await self.stat(path)).token)
        return bytes(data)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """A call a folder. What is not finished is not shown."""
        found = [path for path, _ in await self._entries(prefix, recursive)]
        return sorted(path for path in found if not _TEMPORARY.fullmatch(path))

    async def _entries(self, prefix: str, recursive: bool) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Each path that begins with a prefix, and its info. (fsspec's own `find` takes errors for emptiness.)"""
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        found, pending = [], [folder]
        while pending:
            here = pending.pop()
            for name, info in await self.ask("list", here, listed(here)):
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

    def temporary(self, path: str) -> str:
        """Where a file is written, before it has its name."""
        if self._known.move is None:
            return path
        folder, slash, name = path.rpartition("/")
        return f"{folder}{slash}.{name}.{secrets.token_hex(8)}.tmp"

    async def create(self, path: str, size: int) -> FileWriter:
        """Nothing is asked of the server before the first part is written."""
        check_path(path)
        self.need("write")
        return FsspecWriter(self, path, size, CHUNK)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write it beside, and move it to its name."""
        check_path(path)
        self.need("write")
        if expect is not ANYTHING:
            self.need("conditional_put")
        made, data = self.temporary(path), bytes(data)
        try:
            await self.pipe(path, made, data)
            await self.move(path, made, len(data))
        except BaseException:
            await self.drop(path, made)
            raise
        return (await self.ask("stat", path, self._stat(path, data))).token

    async def pipe(self, path: str, made: str, data: bytes) -> None:
        """Write a short file, all at once; again if need be."""
        async with self.context.memory.count(len(data)):
            await self.ask(
                "put", path, lambda system: system.in_folder(made, lambda full: system.inner.pipe_file(full, data))
            )

    async def move(self, path: str, made: str, size: int) -> None:
        """Give a file that is whole its name."""
        move, mounted = self._known.move, await self.mount()

        async def once(attempt: Attempt) -> None:
            def work(system: System) -> None:
                if move is None or path == made:
                    return
                try:
                    move(system.inner, system.full(made), system.full(path))
                except Exception:
                    # an attempt without an answer may have moved it: then it is gone from where it was
                    if not attempt.uncertain or system.inner.exists(system.full(made)):
                        raise
                    if system.inner.info(system.full(path)).get("size") != size:
                        raise

            await self.call(mounted.lane(), path, work, attempt)

        await retry_request("rename", self.url.join(path), self.retry_policy, once)

    async def drop(self, path: str, made: str) -> None:
        """Remove what was not finished, and the folders that were made for it; no error if it cannot be."""
        if made != path:
            try:
                await self.ask("abort", path, self._removed(made), within=min(10.0, self.retry_policy.deadline))
            except StorageError:
                return  # `sweep` will find it

    def _removed(self, path: str) -> Callable[[System], None]:
        known = self._known

        def work(system: System) -> None:
            try:
                known.remove(system.inner, system.full(path))
            except Exception as error:
                if not isinstance(fault(error, ""), StorageNotFoundError):
                    raise
            if known.folders:
                try:
                    system.remove_folders(path)
                except Exception as error:
                    if isinstance(fault(error, ""), TransientError):
                        raise

        return work

    async def delete(self, paths: Sequence[str]) -> None:
        """One call a file, and one for each folder that it leaves empty."""
        for path in paths:
            check_path(path)
        self.need("delete")
        for path in paths:
            await self.ask("delete", path, self._removed(path))

    async def copy(self, source: str, path: str) -> None:
        """The server copies, beside, and moves it to its name."""
        check_path(source)
        check_path(path)
        self.need("server_side_copy")
        size, made = (await self.stat(source)).size, self.temporary(path)
        try:
            await self.ask(
                "copy",
                source,
                lambda system: system.in_folder(made, lambda full: system.inner.cp_file(system.full(source), full)),
            )
            await self.move(path, made, size)
        except BaseException:
            await self.drop(path, made)
            raise

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Remove the temporary files that killed processes left."""
        if not (self.capabilities.write and self._known.move is not None):
            return []
        before = time.time() - older_than
        entries = await self._entries(prefix.rpartition("/")[0] + "/" if "/" in prefix else "", True)
        old = [
            path
            for path, info in entries
            if path.startswith(prefix) and _TEMPORARY.fullmatch(path) and when(info) < before
        ]
        await self.delete(old)
        return old
