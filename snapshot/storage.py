"""The storage contract: the one seam between the library and every backend.

A plugin stores named files under one root. The contract is small, asynchronous, and copies nothing: whoever calls owns
the memory, a plugin only moves bytes out of it or into it.
"""

from __future__ import annotations

import asyncio
import mmap
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from snapshot.aio import in_thread
from snapshot.aio import shielded as uninterrupted
from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.url import URL

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
    "uninterrupted",
]
T = TypeVar("T")
Buffer = Any
"""Whatever exports contiguous bytes: a memoryview, a ctypes array, bytes. (A `collections.abc.Buffer` from 3.12 on.)"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Verbs check it before the first byte; the conformance kit tests what is declared."""

    write: bool = True
    list: bool = True
    delete: bool = True
    ranged_read: bool = True
    atomic_put: bool = True
    """A `put` is seen whole or not at all."""
    conditional_put: bool = True
    """`put(..., expect=...)` lets exactly one of several writers win."""
    durable: bool = True
    """What `finish` and `put` returned from survives the loss of power."""
    concurrent: bool = True
    """Several files may be read and written at once."""
    server_side_copy: bool = False
    renames: bool = False
    """`rename` gives a finished file another name, at once. Elsewhere a file is not seen before it is finished."""
    guarded_commit: bool = False
    """`commit` fails if its claim was deleted meanwhile: then a cleaner that deletes a claim stops that take. Elsewhere
    claims that are younger than a day are left alone."""
    blocking: bool = False
    """Its calls wait for nothing but `in_thread`: then a thread of the engine's may make many of them in a row, without
    the loop, and digest bytes while they are in its caches. Bulk calls only: `create`, a writer's, `read_into`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend wants of the parts that it is given. A plain value: the planner reads it, and does no I/O."""

    smallest_part: int = 1
    """Every part but a file's last is at least this long."""
    largest_part: int = 1 << 30
    most_parts: int = 1 << 30
    multiple: int = 1
    """Offset and length of every part but a file's last are multiples of this."""
    alignment: int = 1
    """The addresses of the buffers are multiples of this; above 1, callers pass one staged buffer a part."""
    in_order: bool = False
    """Writes begin in the order of their offsets; with `parts_per_file` of 1 they do not overlap, either."""
    preferred_part: int = 8 << 20
    parallel_parts: int = 4
    """How many parts may be under way at once, over all files."""
    parts_per_file: int = 4
    """How many of them may be of one file that is written."""
    parallel_files: int = 2
    """Into how many files side by side the bytes of one rank are best cut."""
    merge_gap: int = 64 << 10
    """Two ranges this close to each other are read in one request."""


class Memory(Protocol):
    """An operation's memory: what a plugin must bounce, it borrows here, so that it counts towards the budget."""

    def borrow(self, nbytes: int) -> Any:
        """Return a context manager (asynchronous) over a page-aligned, writable memoryview of at least `nbytes`
        bytes."""
        ...

    def count(self, nbytes: int) -> Any:
        """Return a context manager (asynchronous) for the time in which a client holds so many bytes of its own
        making."""
        ...


class _Unbounded:
    @asynccontextmanager
    async def borrow(self, nbytes: int) -> AsyncIterator[memoryview]:
        yield memoryview(mmap.mmap(-1, max(nbytes, 1)))

    @asynccontextmanager
    async def count(self, nbytes: int) -> AsyncIterator[None]:
        yield


class Clients(Protocol):
    """Where storages share what is dear to make: connections, and clients with their credentials."""

    async def get(self, key: Hashable, make: Callable[[], Awaitable[tuple[T, Callable[[], Awaitable[object]]]]]) -> T:
        """Return what `make` made for this key, now or before; it also gives the function that closes it."""
        ...

    async def release(self, key: Hashable) -> None:
        """One that called `get` needs it no more."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """What an operation tells the storage that it opens."""

    durable: bool = True
    """Whether `finish` and `put` must survive the loss of power."""
    memory: Memory = field(default_factory=_Unbounded)
    clients: Clients | None = None
    """Where there are none, each storage makes and closes its own."""
    direct_io: str = "auto"
    """`auto`, `always` or `never`: whether bulk bytes go around the page cache (where there is one)."""
    lanes: int = 2
    """How many streams the operation would like to write side by side."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """What `stat` says of a file."""

    size: int
    mtime: float
    """Seconds since the epoch."""
    token: str
    """Changes whenever the content does: an ETag, a generation, or inode, size and time."""


class _Expectation:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ABSENT = _Expectation("ABSENT")
"""`put(..., expect=ABSENT)`: only if nothing is there."""
ANYTHING = _Expectation("ANYTHING")
"""`put(..., expect=ANYTHING)`: whatever is there is replaced."""
Expect = _Expectation | str


class FileWriter(ABC):
    """One file while it is written. Either `finish` or `abort` ends it; `abort` may be called after a failed
    `finish`."""

    @abstractmethod
    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after the other from `offset` on. All parts of a file but the last are equally long.

        May be called concurrently for parts that do not overlap, unless `Limits.in_order`. The buffers stay valid, and
        unchanged, until this returns, retries included; a call that is cancelled uses them no more once it has raised.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Make the file whole, and durable if the context asked for it."""

    @abstractmethod
    async def abort(self) -> None:
        """Leave nothing behind."""


class Storage(ABC):
    """Named files under one root. Paths are relative, with `/` between their parts.

    Errors are ours: `StorageNotFoundError` where a file is not there, `StorageConflictError` where an expectation does
    not hold, `CorruptSnapshotError` where a file ends before a range does, `StorageError` for the rest; each names the
    URL.
    """

    capabilities: Capabilities = Capabilities()
    limits: Limits = Limits()

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        """Store the arguments; plugins connect lazily, on first use, on the loop that calls them.

        `options` are the user's `storage_options`: a plugin raises `ValueError` for one that it does not know.
        """
        self.url = url
        self.options = dict(options)
        self.context = context

    @abstractmethod
    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file of exactly `size` bytes. It may or may not be visible before `finish`."""

    @abstractmethod
    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers exactly with the bytes from `offset` on, or raise.

        With a `token` from `stat`, a file that was replaced since is an error, not a mixture.
        """

    @abstractmethod
    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a small file atomically; the new token. `expect` is ABSENT, ANYTHING, or the token it must have now."""

    @abstractmethod
    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return a small file's content; more than `limit` bytes is an error before they are read."""

    @abstractmethod
    async def stat(self, path: str) -> FileStat:
        """Size, time and token of a file."""

    @abstractmethod
    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Return the paths of all files that begin with `prefix`, sorted; folders of one level end in `/` if not
        recursive."""

    @abstractmethod
    async def delete(self, paths: Sequence[str]) -> None:
        """Delete files; what is not there is no error. Folders left empty go too."""

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """`put(path, data)`, such that it fails if the file `claim` was deleted meanwhile, where the backend can tell.

        The claim is gone afterwards, if it can be deleted: what could not is no reason to say that nothing was
        committed. Backends that rename write the data into the claim and rename that.
        """
        token = await self.put(path, data, expect=expect)
        with suppress(StorageError, TimeoutError):
            async with asyncio.timeout(20):
                await self.delete([claim])
        return token

    async def settle(self) -> None:
        """Make the names of finished files as durable as their bytes, where that is apart. `commit` does it for
        what this storage wrote; whoever wrote for another one's commit has to ask."""
        return

    async def drop_caches(self, paths: Sequence[str]) -> None:  # noqa: B027 - few storages have a cache before them
        """Let the next reads of finished files come from the storage itself, where the system keeps a copy of them."""

    async def copy(self, source: str, path: str) -> None:
        """Copy a file within this storage, without its bytes passing through here: see `server_side_copy`."""
        raise StorageError(f"{self.url.join(source)}: this storage cannot copy on its own")

    async def rename(self, source: str, path: str) -> None:
        """Give a finished file another name; what had that is replaced: see `renames`."""
        raise StorageError(f"{self.url.join(source)}: this storage cannot rename")

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Drop unfinished uploads below `prefix` that are older than so many seconds; what was dropped."""
        return []

    async def close(self) -> None:
        """Give back connections, descriptors and threads."""
        return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.url)!r})"


def check_path(path: str) -> str:
    """Return the path, if it is one that a storage may be given: it can't leave the root, nor name one file in two
    ways.

    >>> check_path("data/1.bin")
    'data/1.bin'
    >>> check_path("data/../../etc/passwd")
    Traceback (most recent call last):
    ValueError: 'data/../../etc/passwd': a path in a storage is relative, without empty parts, '.' or '..'
    """
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r}: a path in a storage is relative, without empty parts, '.' or '..'")
    return path


@contextmanager
def map_exceptions(url: URL, kinds: Mapping[type[BaseException], type[StorageError]] | None = None) -> Iterator[None]:
    """Turn a backend's exceptions into ours, naming the URL and keeping the cause.

    Ours pass as they are. `kinds` maps more exceptions, the most special first; `FileNotFoundError` and `OSError`
    are known.

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
