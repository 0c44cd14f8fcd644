"""The storage contract: the interface between the library and every storage plugin, and a base for layers."""

from __future__ import annotations

import asyncio
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.io.aio import in_thread, to_the_end
from snapshot.io.aio import shielded as uninterrupted
from snapshot.io.url import URL

# A plugin stores named files under one root. The contract is small, asynchronous and zero-copy: the caller owns all
# buffers, and a plugin only transfers bytes out of or into them.

__all__ = [
    "ABSENT",
    "ANYTHING",
    "URL",
    "Buffer",
    "Capabilities",
    "Clients",
    "Context",
    "Expect",
    "FileStat",
    "FileWriter",
    "Limits",
    "Memory",
    "Storage",
    "check_path",
    "in_thread",
    "map_exceptions",
    "to_the_end",
    "uninterrupted",
]
T = TypeVar("T")
Buffer = Any
"""Any object that exports contiguous bytes, such as memoryview, ctypes arrays and bytes.

Python 3.12 has this as `collections.abc.Buffer`.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a backend. Operations check them before the first byte; the conformance kit tests them."""

    write: bool = True
    list: bool = True
    delete: bool = True
    ranged_read: bool = True
    atomic_put: bool = True
    """`put` is atomic: readers see the whole file or none of it."""
    conditional_put: bool = True
    """`put(..., expect=...)` lets exactly one of several concurrent writers succeed."""
    durable: bool = True
    """Files survive a loss of power once `finish` or `put` returned."""
    concurrent: bool = True
    """Files can be read and written concurrently."""
    shares: Literal["", "link", "copy"] = ""
    """Kind of the names that `share` gives. `copy`: the server makes an independent copy. `link`: both names may have
    one physical copy. Empty: the backend cannot share."""
    renames: bool = False
    """`rename` atomically gives a finished file another name. If False, a file must not be visible before `finish`."""
    guarded_commit: bool = False
    """`commit` fails if its claim was deleted meanwhile, so deleting a claim stops that take.

    If False, clean-up leaves claims alone that are less than a day old.
    """
    blocking: bool = False
    """Calls of this storage wait only in `in_thread`, never on an event loop.

    Then one worker thread can make many calls in a row without the loop, and digest bytes while they are in its CPU
    caches. This covers bulk calls only: `create`, the methods of a writer, and `read_into`.
    """
    local: bool = False
    """Files of the operating system's file systems: a look at one takes microseconds, and no server checks the bytes.

    Then bytes that do not match their digest are not requested again, and ranks do not share their looks at files.
    """


@dataclass(frozen=True, slots=True)
class Limits:
    """Requirements and preferences of a backend for request sizes and parallelism, for the planner."""

    smallest_part: int = 1
    """The minimum size of every part but a file's last."""
    largest_part: int = 1 << 30
    most_parts: int = 1 << 30
    multiple: int = 1
    """Offset and length of every part but a file's last are multiples of this."""
    alignment: int = 1
    """Buffer addresses are multiples of this. If it is above 1, callers pass one staged buffer per part."""
    in_order: bool = False
    """Writes begin in offset order. With `parts_per_file` of 1 they also do not overlap."""
    preferred_part: int = 8 << 20
    grown_part: int = 0
    """The parts of a long file grow up to this length, if requests have a price of their own; 0 if they do not grow."""
    parallel_parts: int = 4
    """The maximum number of concurrent parts over all files."""
    parts_per_file: int = 4
    """The maximum number of concurrent parts of one file that is written."""
    parallel_files: int = 2
    """The preferred number of parallel files for one rank's bytes."""
    hot_part: int = 4 << 20
    """The preferred length of a read that the same thread digests, for a `blocking` storage: fits into a CPU cache."""
    merge_gap: int = 64 << 10
    """Two ranges at most this many bytes apart are read in one request."""


class Memory(Protocol):
    """The memory budget of an operation. A plugin that needs a bounce buffer borrows it here, so that it is counted."""

    def borrow(self, nbytes: int) -> Any:
        """Return an async context manager with a page-aligned, writable memoryview of at least `nbytes` bytes."""
        ...

    def count(self, nbytes: int) -> Any:
        """Return an async context manager that counts `nbytes` bytes that a client allocates itself."""
        ...


class _Unbounded:
    @asynccontextmanager
    async def borrow(self, nbytes: int) -> AsyncIterator[memoryview]:
        yield memoryview(mmap.mmap(-1, max(nbytes, 1)))

    @asynccontextmanager
    async def count(self, nbytes: int) -> AsyncIterator[None]:
        yield


class Clients(Protocol):
    """A cache of expensive resources that storages share: connections, and clients with their credentials."""

    async def get(self, key: Hashable, make: Callable[[], Awaitable[tuple[T, Callable[[], Awaitable[object]]]]]) -> T:
        """Return the cached resource of this key, or create it with `make`, which also returns its close function."""
        ...

    async def release(self, key: Hashable) -> None:
        """Release one use of the resource."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """Settings that an operation passes to the storage that it opens."""

    durable: bool = True
    """True if files must survive a loss of power once `finish` and `put` returned."""
    memory: Memory = field(default_factory=_Unbounded)
    clients: Clients | None = None
    """Shared clients. If None, each storage creates and closes its own."""
    direct_io: str = "auto"
    """Direct I/O for bulk data, if there is a page cache: `auto`, `always` or `never`."""
    lanes: int = 2
    """The number of files that the operation intends to write in parallel."""
    resume: bool = False
    """True if the same bytes may have been written by a process that died: unfinished uploads are continued."""
    file_io: str = "auto"
    """System calls for bulk data in files: `auto`, or `portable` for those that every platform has."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """The result of `stat`."""

    size: int
    mtime: float
    """Modification time in seconds since the epoch."""
    token: str
    """Changes with the content: an ETag, a generation, or inode, size and time."""
    now: float | None = field(default=None, compare=False)
    """Time of the answer by the clock that `mtime` is of; None if that is this machine's clock."""

    @property
    def age(self) -> float:
        """Seconds since the modification. The clock of a server may differ from this machine's."""
        return (time.time() if self.now is None else self.now) - self.mtime


class _Expectation:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ABSENT = _Expectation("ABSENT")
"""`put(..., expect=ABSENT)`: fail if the file exists."""
ANYTHING = _Expectation("ANYTHING")
"""`put(..., expect=ANYTHING)`: replace an existing file."""
Expect = _Expectation | str


class FileWriter(ABC):
    """A file that is being written. `finish` or `abort` ends it; `abort` is allowed after a failed `finish`."""

    @abstractmethod
    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers in order, beginning at `offset`. All parts of a file but the last have the same length.

        Calls may be concurrent for parts that do not overlap, unless `Limits.in_order` is set. The buffers stay valid
        and unchanged until this returns, retries included. A cancelled call does not use them after it has raised.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Complete the file, and make it durable if the context asks for it."""

    @abstractmethod
    async def abort(self) -> None:
        """Delete the unfinished file."""


class Storage(ABC):
    """Named files under one root. Paths are relative, with `/` as separator.

    All errors are subclasses of `StorageError` that name the URL. A missing file is a `StorageNotFoundError`, a failed
    condition a `StorageConflictError`. The exception is a file that ends before a range does, which is a
    `CorruptSnapshotError`.
    """

    capabilities: Capabilities = Capabilities()
    limits: Limits = Limits()
    host: str = ""
    """Set if each host has files of its own: a name for the files that this storage sees.

    The ranks of a take then send each other manifest parts through their process group, and each host stores the
    manifest.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        """Store the arguments. Plugins connect on first use, on the loop that calls them.

        `options` are the user's `storage_options`. A plugin raises `ValueError` for an unknown option.
        """
        self.url = url
        self.options = dict(options)
        self.context = context

    @staticmethod
    def knows_scheme(scheme: str) -> bool:
        """Return True if this class opens URLs of any scheme, and of this one. Only the plugin `fsspec+` is asked."""
        return False

    @abstractmethod
    async def create(self, path: str, size: int) -> FileWriter:
        """Create a file of exactly `size` bytes. It may be visible before `finish`."""

    @abstractmethod
    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers exactly with the bytes from `offset` on, or raise.

        With a `token` from `stat`, raise if the file was replaced since.
        """

    @abstractmethod
    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a small file atomically, and return its token.

        `expect` is ABSENT, ANYTHING, or the token that the existing file must have.
        """

    @abstractmethod
    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return the content of a small file. Raise before reading if it has more than `limit` bytes."""

    @abstractmethod
    async def stat(self, path: str) -> FileStat:
        """Return size, time and token of a file."""

    def expect_size(self, path: str, size: int) -> bool:
        """Raise CorruptSnapshotError from each read of a file that has another size, before a byte of it is stored.

        Return False if this storage cannot: the caller then calls `stat`.
        """
        return False

    @abstractmethod
    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Return the sorted paths of all files that begin with `prefix`.

        If not `recursive`, return the folders of one level with a trailing `/`.
        """

    async def list_root(self) -> Sequence[str] | None:
        """Return the names of the root's own level if one request shows all of them, folders with a trailing `/`.

        None if it does not. The caller then looks at each name that it needs.
        """
        return None

    @abstractmethod
    async def delete(self, paths: Sequence[str]) -> None:
        """Delete files, and folders that become empty. A missing file is not an error."""

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """Run `put(path, data)`, but fail if the file `claim` was deleted meanwhile, if the backend can detect that.

        The claim is deleted afterwards. A claim that cannot be deleted does not fail the commit. Backends with `rename`
        write the data into the claim and rename it.
        """
        token = await self.put(path, data, expect=expect)
        with suppress(StorageError, TimeoutError):
            async with asyncio.timeout(20):
                await self.delete([claim])
        return token

    async def settle(self) -> None:
        """Make the names of finished files as durable as their contents, if that is a separate step.

        `commit` does this for the files that this storage wrote. A rank that wrote files for another rank's commit
        calls it.
        """
        return

    async def drop_caches(self, paths: Sequence[str]) -> None:  # noqa: B027 - few storages have a cache before them
        """Drop cached copies of finished files, so that the next reads come from the storage itself."""

    def share_reads(self) -> None:  # noqa: B027 - few storages have a cache
        """Use a cache of the host for reads from now on: other processes of this host read the same bytes."""

    def switch_source(self, path: str) -> bool:
        """Read a file from another place from now on, since its bytes are damaged. Return False if there is none."""
        return False

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        """Give the finished file at the URL `source` a further name, without transferring its bytes: see `shares`.

        The source is on the same server, but usually below another root. With a `token` from its `stat`, raise if it
        was replaced since. A file at `path` is never overwritten. On return the file is as durable as after `finish`.
        After any error nothing remains at `path`, and the caller writes the file instead.
        """
        raise StorageError(f"{self.url.join(path)}: this storage cannot share files")

    async def rename(self, source: str, path: str) -> None:
        """Rename a finished file, replacing an existing one: see `renames`."""
        raise StorageError(f"{self.url.join(source)}: this storage cannot rename")

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Drop unfinished uploads below `prefix` that are older than `older_than` seconds, and return them."""
        return []

    async def close(self) -> None:
        """Release connections, descriptors and threads."""
        return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.url)!r})"


async def exists(storage: Storage, path: str) -> bool:
    """Return True if a file exists."""
    try:
        await storage.stat(path)
    except StorageNotFoundError:
        return False
    return True


def check_path(path: str) -> str:
    """Return a path that is valid in a storage: below the root, and in normal form.

    >>> check_path("data/1.bin")
    'data/1.bin'
    >>> check_path("data/../../etc/passwd")
    Traceback (most recent call last):
    ValueError: a path in a storage must be relative, without empty parts, '.' or '..', got 'data/../../etc/passwd'
    """
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"a path in a storage must be relative, without empty parts, '.' or '..', got {path!r}")
    return path


@contextmanager
def map_exceptions(url: URL, kinds: Mapping[type[BaseException], type[StorageError]] | None = None) -> Iterator[None]:
    """Convert a backend's exceptions to a `StorageError` that names the URL and keeps the cause.

    Errors of this library pass unchanged. `kinds` maps more exceptions, the most specific first, in addition to
    `FileNotFoundError` and `OSError`.

    >>> with map_exceptions(URL.parse("/data/x")):
    ...     raise PermissionError(13, "Permission denied")
    Traceback (most recent call last):
    snapshot.errors.StorageError: /data/x: Permission denied
    """
    table = {**(kinds or {}), FileNotFoundError: StorageNotFoundError, OSError: StorageError}
    try:
        yield
    except SnapshotError:
        raise
    except tuple(table) as error:  # type: ignore[misc]  # a tuple made of a table's keys
        made = next(ours for theirs, ours in table.items() if isinstance(error, theirs))
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raised = made(f"{url}: {reason}")
        if isinstance(error, OSError):
            raised.errno = error.errno
        raise raised from error


# A storage around another one, for storages that change how files are read.


class StorageWrapper(Storage):
    """A storage whose calls are those of another one, unless a subclass replaces them."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.options, self.context = inner.url, inner.options, inner.context
        self.limits, self.capabilities, self.host = inner.limits, inner.capabilities, inner.host

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        await self.inner.read_into(path, offset, buffers, token=token)

    async def create(self, path: str, size: int) -> FileWriter:
        return await self.inner.create(path, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        return await self.inner.put(path, data, expect=expect)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        return await self.inner.get(path, limit=limit)

    async def stat(self, path: str) -> FileStat:
        return await self.inner.stat(path)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        return await self.inner.list(prefix, recursive=recursive)

    async def list_root(self) -> Sequence[str] | None:
        return await self.inner.list_root()

    async def delete(self, paths: Sequence[str]) -> None:
        await self.inner.delete(paths)

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        return await self.inner.commit(claim, path, data, expect=expect)

    async def settle(self) -> None:
        await self.inner.settle()

    async def drop_caches(self, paths: Sequence[str]) -> None:
        await self.inner.drop_caches(paths)

    def share_reads(self) -> None:
        self.inner.share_reads()

    def switch_source(self, path: str) -> bool:
        return self.inner.switch_source(path)

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        await self.inner.share(source, path, token=token)

    async def rename(self, source: str, path: str) -> None:
        await self.inner.rename(source, path)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        return await self.inner.sweep(prefix, older_than)

    async def close(self) -> None:
        await self.inner.close()


class ReadOnlyStorage(Storage):
    """Another storage, for reading only."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.options, self.context = inner.url, inner.options, inner.context
        self.limits = inner.limits
        has = inner.capabilities
        self.capabilities = Capabilities(
            write=False,
            delete=False,
            atomic_put=False,
            conditional_put=False,
            list=has.list,
            ranged_read=has.ranged_read,
            concurrent=has.concurrent,
            blocking=has.blocking,
            local=has.local,
        )

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        await self.inner.read_into(path, offset, buffers, token=token)

    def share_reads(self) -> None:
        self.inner.share_reads()

    async def stat(self, path: str) -> FileStat:
        return await self.inner.stat(path)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        return await self.inner.get(path, limit=limit)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        return await self.inner.list(prefix, recursive=recursive)

    async def close(self) -> None:
        await self.inner.close()

    async def create(self, path: str, size: int) -> FileWriter:
        raise self._refusal

    async def put(self, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        raise self._refusal

    async def delete(self, paths: Sequence[str]) -> None:
        raise self._refusal

    @property
    def _refusal(self) -> StorageError:
        return StorageError(f"{self.url}: is open for reading only")
