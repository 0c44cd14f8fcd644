"""Calls to the file systems of a URL: chains, with replacements for unsafe calls, and threads that can be abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import inspect
import json
import os
import pkgutil
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from fsspec.asyn import sync
from fsspec.core import _un_chain
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from snapshot.errors import MissingExtraError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.io.retry import RequestAttempts, RetryPolicy, TransientError, retry_request
from snapshot.io.storage import Context
from snapshot.io.url import URL

# Blocking calls in threads that can be abandoned, since a client may hang forever.
#
# Such a thread never gets the caller's memory, since it may use it at any later time.

S = TypeVar("S")
T = TypeVar("T")
LAST_WORDS = 5.0
"""Maximum seconds to close a connection."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[Any], Any]
    attempt: RequestAttempts | None
    future: Future[Any] = field(default_factory=Future)
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Lock that a thread takes to run the job, or the caller to withdraw it."""
    over: bool = False
    """True if the job has run. The future does not show it: a cancelled caller cancels the future."""

    def end(self, result: Any, error: BaseException | None = None) -> None:
        self.over = True
        with contextlib.suppress(InvalidStateError):  # the caller was cancelled
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class Lane(Generic[S]):
    """A file system and the threads that call it, used on the loop that created it.

    The threads are daemons and do not belong to an executor, since the interpreter would wait for those at its exit.
    """

    def __init__(self, make: Callable[[], S], close: Callable[[S], None], threads: int) -> None:
        self._make = make
        self._close = close
        self._threads = threads
        self._started = 0
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._system: S | None = None
        self._making = threading.Lock()
        self._jobs: dict[_Job, None] = {}
        self._closing: _Job | None = None
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()

    @property
    def usable(self) -> bool:
        """True if the lane accepts calls: not after `retire`, in a forked child, or on another loop."""
        return self._closing is None and self._process == os.getpid() and self._loop is asyncio.get_running_loop()

    async def call(self, work: Callable[[S], T], attempt: RequestAttempts | None = None) -> T:
        """Call the file system in one of the threads. A cancellation during the call retires the lane."""
        if not self.usable:
            raise TransientError("the connection was abandoned", refused=True)
        job = _Job(work, attempt)
        self._jobs[job] = None
        if self._started < self._threads:
            self._started += 1
            threading.Thread(target=self._run, name="snapshot-fsspec", daemon=True).start()
        self._queue.put(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            if not job.turn.acquire(blocking=False) and not job.over:
                self.retire()
            raise
        finally:
            self._jobs.pop(job, None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.turn.acquire(blocking=False):
                self._do_job(job)
            del job  # otherwise its bytes stay alive until the next job

    def _do_job(self, job: _Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._restart_clocks, job)
        try:
            if job is self._closing:
                system, self._system = self._system, None
                result = self._close(system) if system is not None else None
            else:
                result = job.work(self._get_system())
        except asyncio.CancelledError as error:  # raised by the client itself
            job.end(None, ConnectionError(f"{type(error).__name__} in the client"))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            job.end(None, error)
        else:
            job.end(result)

    def _get_system(self) -> S:
        with self._making:
            if self._system is None:
                self._system = self._make()
            return self._system

    def _restart_clocks(self, job: _Job) -> None:
        """Restart the time-outs of a starting job, and of the jobs queued behind it."""
        for each in self._jobs:
            if each.attempt is not None and (each is job or not each.turn.locked()):
                each.attempt.progress()

    def retire(self) -> None:
        """Accept no more calls. Refuse the queued ones, let the running ones end, and then close the file system."""
        if self._closing is not None:
            return
        self._closing = closing = _Job(lambda _: None, None)
        for job in self._jobs:
            if job.turn.acquire(blocking=False):
                job.end(None, TransientError("the connection was abandoned", refused=True))
        self._queue.put(closing)
        for _ in range(self._started):
            self._queue.put(None)

    async def close(self) -> None:
        """Retire the lane, and wait some seconds until it is closed."""
        self.retire()
        if self._started and self._closing is not None and self._process == os.getpid():
            with contextlib.suppress(Exception):  # a connection that cannot be closed is abandoned
                await asyncio.wait_for(asyncio.wrap_future(self._closing.future), LAST_WORDS)


class Mount(Generic[S]):
    """The current lane of a file system, replaced after it was retired."""

    def __init__(self, make: Callable[[], S], close: Callable[[S], None], threads: int) -> None:
        self._how = make, close, threads
        self._lane: Lane[S] | None = None

    def lane(self) -> Lane[S]:
        """Return a usable lane."""
        if self._lane is None or not self._lane.usable:
            self._lane = Lane(*self._how)
        return self._lane

    async def close(self) -> None:
        """Close the file system, and end its threads."""
        lane, self._lane = self._lane, None
        if lane is not None:
            await lane.close()


# Errors of fsspec's many clients: their translation, and their text without secrets.

_TRANSIENT = {
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("asyncssh", "ConnectionLost"),
    ("asyncssh", "SFTPConnectionLost"),
    ("asyncssh", "SFTPNoConnection"),
    ("asyncssh", "ChannelOpenError"),
    ("botocore", "HTTPClientError"),
    ("requests", "ConnectionError"),
    ("webdav4", "BadGatewayError"),
    ("webdav4", "ResourceLocked"),
}
"""Transient errors by package and class, for classes that are not derived from Python's own."""


class LostError(TransientError):
    """Broken connection: the next attempt uses a new one."""


def translate(error: BaseException, said: str) -> StorageError:
    """Return this library's error for a client's error, with the text `said`."""
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    if isinstance(error, FileNotFoundError) or ("webdav4", "ResourceNotFound") in bases:
        return StorageNotFoundError(said)
    status = _status(error)
    if status in (404, 410):
        return StorageNotFoundError(said)
    if status is not None and (status in (408, 425, 429) or (status >= 500 and status not in (501, 505, 507))):
        return TransientError(said, refused=status in (425, 429))
    if isinstance(error, socket.gaierror):
        return StorageError(said) if error.errno == socket.EAI_NONAME else LostError(said)
    lost = isinstance(error, (ConnectionError, TimeoutError, EOFError)) or bool(bases & _TRANSIENT)
    if lost or (isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)):
        return LostError(said)
    made = StorageError(said)
    if isinstance(error, OSError):
        made.errno = error.errno
    return made


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from any of the clients' attributes."""
    response = getattr(error, "response", None)
    for holder, name in [(error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")]:
        status = getattr(holder, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


_HARMLESS = {
    "host",
    "port",
    "username",
    "user",
    "base_url",
    "endpoint_url",
    "known_hosts",
    "client_keys",
    "cache_storage",
    "fo",
    "path",
    "root",
}
_CREDENTIALS = re.compile(r"(://[^/\s:@]*):[^/\s@]*@")


def secrets_in(options: Any, name: str = "") -> Iterator[str]:
    """Yield the values to hide: all except addresses, since any other option may be a key."""
    if isinstance(options, Mapping):
        for each, value in options.items():
            yield from secrets_in(value, str(each))
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from secrets_in(value, name)
    elif isinstance(options, (str, bytes)) and name not in _HARMLESS:
        text = options if isinstance(options, str) else options.decode(errors="replace")
        if len(text) > 3:
            yield text


def redact(text: str, values: Sequence[str]) -> str:
    """Return a client's text without secrets."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return _CREDENTIALS.sub(r"\1:***@", text)


def all_words(error: BaseException | None) -> str:
    """Return all text of an error that a traceback shows."""
    words = []
    while error is not None:
        words.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__
    return " ".join(words)


# Time and version of a file, from the field names of each file system of fsspec.

_TIMES = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")
_VERSIONS = ("etag", "ETag", "generation", "version_id", "VersionId", "ino", "blob_id", "md5", "content_md5", "crc32c")


def modified_time(info: Mapping[str, Any]) -> float:
    """Return the time of a file. A file of unknown age counts as new, since old ones are cleaned up."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            value = _parse_time(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    return time.time()


def _parse_time(text: str) -> datetime | None:
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError):
            return read(text)
    return None


def version_token(info: Mapping[str, Any], data: bytes | None) -> str:
    """Return a digest of all fields that change with the content, and of the content if it is given."""
    seen = [f"{name}={info[name]}" for name in ("size", *_TIMES, *_VERSIONS) if info.get(name) is not None]
    digest = hashlib.sha256("\n".join(seen).encode())
    digest.update(data or b"")
    return digest.hexdigest()[:32]


# Calls to the file systems of a URL: in threads, shared between storages, with errors that hide secrets.

CHUNK = 4 << 20
"""Maximum bytes that one call holds in addition to the caller's memory."""
THREADS = 8
"""Threads that wait for a file system with concurrent calls."""
PREFIX = "fsspec+"
_OURS = ("timeout", "deadline", "part_bytes")


class FsspecClient:
    """The file systems of one URL and its options, created on first use."""

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        self.url = url
        self.context = context
        self._options = options
        theirs = {name: value for name, value in options.items() if name not in _OURS}
        self.retry_policy = RetryPolicy(
            **{name: options[name] for name in ("timeout", "deadline") if options.get(name) is not None}
        )
        self.part_bytes = options.get("part_bytes") or 8 << 20
        if isinstance(self.part_bytes, bool) or not self.part_bytes >= 1:
            raise ValueError(f"part_bytes must be a number of bytes above 0, got {options['part_bytes']!r}")
        self.chunk = min(CHUNK, self.part_bytes)
        try:
            links = parse_chain(url.reveal().removeprefix(PREFIX), theirs, self.retry_policy)
        except ImportError as error:
            raise MissingExtraError(f"{url}: {error}") from error
        if unknown := unknown_options(links, theirs):
            raise ValueError(f"{url}: unknown storage_options {', '.join(map(repr, unknown))}")
        values = [*secrets_in(theirs), *url.location.rpartition("@")[0].split(":")[1:], url.query]
        self.secrets = [value for value in [*values, *secrets_in([link.options for link in links])] if len(value) > 3]
        self.known = chain_traits(links)
        self.concurrent = all(link.cls.async_impl for link in links)
        """True if calls run concurrently."""
        self._links = links
        self._mounted: Mount[ConnectedChain] | None = None
        self.ranges_proven = False
        """True once a response was certainly a range, and not the whole file."""

    async def mount(self) -> Mount[ConnectedChain]:
        """Return the file systems, shared by the storages of this URL and these options."""
        if self._mounted is None:
            clients = self.context.clients
            links, known = self._links, self.known
            mounted = Mount(lambda: connect(links, known), disconnect, THREADS if self.concurrent else 1)
            if clients is not None:

                async def make() -> tuple[Mount[ConnectedChain], Callable[[], Any]]:
                    return mounted, mounted.close

                mounted = await clients.get(self._key(), make)
            self._mounted = mounted
        return self._mounted

    def _key(self) -> tuple[str, ...]:
        options = json.dumps(self._options, sort_keys=True, default=lambda value: f"{type(value)} {id(value)}")
        return type(self).__qualname__, self.url.reveal(), options

    async def close(self) -> None:
        """Release the file systems; they are closed if no other storage uses them."""
        mounted, self._mounted = self._mounted, None
        if mounted is None:
            return
        if self.context.clients is not None:
            await self.context.clients.release(self._key())
        else:
            await mounted.close()

    async def call(
        self,
        lane: Lane[ConnectedChain],
        path: str,
        work: Callable[[ConnectedChain], T],
        attempt: RequestAttempts | None = None,
    ) -> T:
        """Make one call, and translate its errors. Never pass the caller's memory to `work`."""
        url = self.url.join(path)
        try:
            return await lane.call(work, attempt)
        except TransientError as error:
            raise TransientError(f"{url}: {error}", refused=error.refused) from error
        except SnapshotError:
            raise
        except Exception as error:  # noqa: BLE001 - every client has its own errors; each is translated
            text = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}".rstrip(": ")
            made = translate(error, f"{url}: {redact(str(text), self.secrets)}")
            if isinstance(made, LostError):
                lane.retire()  # some clients never reconnect
            words = all_words(error)
            raise made from (error if redact(words, self.secrets) == words else None)

    async def send_request(
        self, name: str, path: str, work: Callable[[ConnectedChain], T], within: float | None = None
    ) -> T:
        """Make a call, and retry it after transient faults."""
        mounted = await self.mount()

        async def once(attempt: RequestAttempts) -> T:
            return await self.call(mounted.lane(), path, work, attempt)

        return await retry_request(name, self.url.join(path), self.retry_policy, once, within)

    async def stored_size(self, name: str, path: str, stored: str) -> int | None:
        """Return the size of a file under its temporary name; None if the file system does not report it."""
        size = await self.send_request(name, path, lambda chain: chain.inner.info(chain.full(stored)).get("size"))
        return None if size is None else int(size)


# WebDAV by webdav4, with safe replacements for its rename, read and remove.


def move_file(fs: Any, source: str, path: str) -> None:
    """Rename a file in one step; webdav4's `mv` copies and removes it."""
    fs.client.move(source, path, overwrite=True)


def read_range(fs: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Read a range in one GET; webdav4's own read needs three requests, and does not quote the name."""
    headers = {"Accept-Encoding": "identity"}
    if start is not None and end is not None:
        headers["Range"] = f"bytes={start}-{end - 1}"
    with fs.client.http.stream("GET", fs.client.join_url(path), headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        at = start or 0 if answer.status_code == 206 else 0  # a server without ranges sends the whole file
        found = bytearray()
        for chunk in answer.iter_bytes():
            found += chunk[max((start or 0) - at, 0) :]
            at += len(chunk)
            if end is not None and at >= end:
                break
        return bytes(found if end is None else found[: end - (start or 0)])


def remove_file(fs: Any, path: str) -> None:
    """Remove a file, but never a folder: DELETE would remove its contents, too."""
    if fs.info(path)["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    fs.rm_file(path)


def remove_folder(fs: Any, path: str) -> None:
    """Remove an empty folder. Rename it first: DELETE would also remove a file that is added after the check."""
    if fs.ls(path, detail=False):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    folder, _, name = path.rpartition("/")
    aside = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
    fs.client.move(path, aside)  # from here on no process adds a file
    late = fs.ls(aside, detail=False)
    if late:
        fs.makedirs(path, exist_ok=True)
        for each in late:
            name = quote(each.rstrip("/").rpartition("/")[2])
            fs.client.move(f"{aside}/{name}", f"{path}/{name}")
    fs.rm_file(aside)


# Table of the properties of fsspec's file systems, which implement fsspec's contract in different ways.
#
# A file must appear in one step: by a rename, or when it is closed. File systems that are not in the table are read
# only.


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a class of file systems."""

    move: Callable[[Any, str, str], None] | None = None
    """Function that renames a file in one step, over an existing one. If set, files get a temporary name, and folders
    are created before their files, and removed after them."""
    seen_when_closed: bool = False
    """True if a file is invisible until it is closed, and durable then. It is written under its final name."""
    coarse: bool = False
    """True if times have whole seconds only, so that a token needs the content as well."""
    quoted: bool = False
    """True if names must be quoted as in a URL."""
    cat: Callable[[Any, str, int | None, int | None], bytes] | None = None
    """Function that reads a range, if `cat_file` does not do that well."""
    remove: Callable[[Any, str], None] = lambda fs, path: fs.rm_file(path)
    remove_folder: Callable[[Any, str], None] = lambda fs, path: fs.rmdir(path)
    """Function that removes a folder if it is empty."""
    close: Callable[[Any], None] = lambda fs: None
    defaults: Callable[[RetryPolicy], Mapping[str, Any]] = lambda policy: {}
    """Default options."""
    takes: Sequence[str] | None = None
    """Callables whose parameters are options, too; None if unknown."""

    @property
    def writes(self) -> bool:
        """True if a file can appear in one step."""
        return self.move is not None or self.seen_when_closed


def _move_in_memory(fs: Any, source: str, path: str) -> None:
    fs.cp_file(source, path)  # `mv` would expand `*` and `[` in names
    fs.rm_file(source)


def _remove_folder_by_ssh(fs: Any, path: str) -> None:
    sync(fs.loop, fs._rmdir, path)  # `rmdir` of the base class does nothing


def _close_ssh(fs: Any) -> None:
    sync(fs.loop, fs._pool.close, timeout=2)
    sync(fs.loop, fs._stack.aclose, timeout=2)


def _ssh_defaults(policy: RetryPolicy) -> Mapping[str, Any]:
    seconds = policy.timeout  # ends abandoned calls
    return {
        "connect_timeout": seconds,
        "login_timeout": seconds,
        "keepalive_interval": max(seconds / 2, 1),
        "known_hosts": (),  # those of ~/.ssh: by default sshfs trusts any host
    }


def _close_zip(fs: Any) -> None:
    fs.close()
    fs.of.close()  # `close` leaves the archive's file open


def _move(fs: Any, source: str, path: str) -> None:
    fs.mv(source, path)


_OBJECT_STORE = Traits(seen_when_closed=True)
_KNOWN: Mapping[str, Traits] = {
    "fsspec.implementations.memory.MemoryFileSystem": Traits(move=_move_in_memory, takes=()),
    "fsspec.implementations.local.LocalFileSystem": Traits(move=_move, takes=()),
    "webdav4.fsspec.WebdavFileSystem": Traits(
        move=move_file,
        coarse=True,
        quoted=True,
        cat=read_range,
        remove=remove_file,
        remove_folder=remove_folder,
        close=lambda fs: fs.client.http.close(),
        defaults=lambda policy: {"retry": False, "timeout": policy.timeout},
        takes=("webdav4.client:Client", "httpx:Client"),
    ),
    "sshfs.spec.SSHFileSystem": Traits(
        move=_move,
        coarse=True,
        remove_folder=_remove_folder_by_ssh,
        close=_close_ssh,
        defaults=_ssh_defaults,
        takes=("asyncssh:connect", "asyncssh:SSHClientConnectionOptions.prepare"),
    ),
    "fsspec.implementations.sftp.SFTPFileSystem": Traits(move=_move, coarse=True, close=lambda fs: fs.client.close()),
    "fsspec.implementations.ftp.FTPFileSystem": Traits(move=_move, coarse=True),
    "s3fs.core.S3FileSystem": _OBJECT_STORE,
    "gcsfs.core.GCSFileSystem": _OBJECT_STORE,
    "adlfs.spec.AzureBlobFileSystem": _OBJECT_STORE,
    "ossfs.base.BaseOSSFileSystem": _OBJECT_STORE,
    "huggingface_hub.hf_file_system.HfFileSystem": _OBJECT_STORE,
    "fsspec.implementations.zip.ZipFileSystem": Traits(close=_close_zip, takes=()),
    "fsspec.implementations.cached.CachingFileSystem": Traits(takes=()),
    "fsspec.implementations.dirfs.DirFileSystem": Traits(takes=()),
}


def traits_of(cls: type) -> Traits:
    """Return the traits of a class, or of its nearest base class."""
    for base in cls.__mro__:
        known = _KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    return Traits()


# File systems of a chained URL: parse the URL, check the options, connect and close.

_WRAPPERS = (CachingFileSystem, DirFileSystem)
"""File systems that wrap another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """One file system of a chained URL."""

    protocol: str
    cls: type[AbstractFileSystem]
    path: str
    """Prefix of the storage's paths."""
    options: Mapping[str, Any]


def parse_chain(text: str, options: Mapping[str, Any], retry_policy: RetryPolicy) -> list[Link]:
    """Return the file systems of a URL, the outermost first."""
    parts = text.split("::")
    links: list[Link] = []
    for part, (path, protocol, given) in reversed(list(zip(parts, _un_chain(text, _copied(options)), strict=True))):
        cls = get_filesystem_class(protocol)
        if issubclass(cls, _WRAPPERS) and not part.partition("://")[2]:  # a wrapper without a path
            path = links[-1].path if links and not issubclass(cls, DirFileSystem) else ""  # noqa: PLW2901
        links.append(Link(protocol, cls, path or "", {**traits_of(cls).defaults(retry_policy), **given}))
    return links[::-1]


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options, since fsspec changes them."""
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in options.items()}


def unknown_options(links: Sequence[Link], options: Mapping[str, Any]) -> list[str]:
    """Return the options that no file system accepts, as far as known."""
    own = {name: value for name, value in options.items() if name not in {link.protocol for link in links}}
    found = []
    for link in links:
        given = {**(options.get(link.protocol) or {}), **(own if link is links[0] else {})}
        accepted = _accepted(link.cls)
        if accepted is not None:
            found += [name for name in given if name not in accepted]
    return found


def _accepted(cls: type) -> set[str] | None:
    """Return the options of a class, or None if it passes them on to an unknown callable."""
    names = set(inspect.signature(AbstractFileSystem.__init__).parameters)
    names |= {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "protocol"}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                return names
        if base is AbstractFileSystem:
            break
    takes = traits_of(cls).takes
    if takes is None:
        return None
    for text in takes:
        names.update(inspect.signature(pkgutil.resolve_name(text)).parameters)
    return names


def chain_traits(links: Sequence[Link]) -> Traits:
    """Return the traits of a chain: those of its outermost file system, except for `dir`."""
    return next((traits_of(link.cls) for link in links if not issubclass(link.cls, DirFileSystem)), Traits())


@dataclass(slots=True)
class ConnectedChain:
    """Connected file systems of a URL, used by the threads of one lane."""

    outer: Any
    """File system for reading whole files."""
    inner: Any
    """File system for all other calls: the same, or the one behind a cache, since a cache misses changes."""
    root: str
    ranged: bool
    """True if `cat_file` supports a range."""
    known: Traits
    folders: set[str] = field(default_factory=set)
    """Folders that were created."""

    def full(self, path: str) -> str:
        """Return the name of a file, quoted if the file system requires that."""
        full = self.plain(path)
        return quote(full) if self.known.quoted else full

    def cat(self, path: str, start: int | None = None, end: int | None = None, *, cached: bool = False) -> Any:
        """Return a file's bytes, or a range of them."""
        fs, full = self.outer if cached else self.inner, self.full(path)
        if self.known.cat is not None:
            return self.known.cat(fs, full, start, end)
        return fs.cat_file(full, start=start, end=end) if start is not None else fs.cat_file(full)

    def plain(self, path: str) -> str:
        """Return the name of a file."""
        return f"{self.root}/{path}".rstrip("/") if self.root else path

    def list_folder(self, path: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return names and infos of a folder's entries; none if the folder does not exist."""
        try:
            entries = self.inner.ls(self.full(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        named = [(entry["name"].strip("/"), entry) for entry in entries]
        itself = self.plain(path).strip("/")
        return [(name.rpartition("/")[2], entry) for name, entry in named if name != itself]

    def in_folder(self, path: str, action: Callable[[str], Any]) -> Any:
        """Call an action that creates a file, after creating its folder."""
        full = self.full(path)
        folder = full.rpartition("/")[0]
        if self.known.move is None or not folder:
            return action(full)
        if folder in self.folders:
            try:
                return action(full)
            except Exception as error:
                if not (isinstance(error, FileNotFoundError) or type(error).__name__ == "ResourceConflict"):
                    raise
        self.inner.makedirs(folder, exist_ok=True)
        self.folders.add(folder)
        return action(full)

    def remove_folders(self, path: str) -> None:
        """Remove the empty folders above a file, up to the root, and the root."""
        while path:
            path = path.rpartition("/")[0]
            self.folders.discard(self.full(path))
            if not self.full(path).strip("/"):
                return
            self.known.remove_folder(self.inner, self.full(path))


def connect(links: Sequence[Link], known: Traits) -> ConnectedChain:
    """Connect the file systems, as `fsspec.core.url_to_fs` does, but without caches."""
    made: dict[str, Any] = {}
    for number, link in enumerate(reversed(links)):
        options = {**link.options, **made, "skip_instance_cache": True}
        made = {"target_options": options, "target_protocol": link.protocol, "fo": link.path}
        if number == len(links) - 1:
            outer = link.cls(**options)
    root = links[0].path.rstrip("/")
    for each in _nested(outer):
        if hasattr(each, "dircache"):
            each.dircache = DirCache(use_listings_cache=False)  # not every class has the option
    while isinstance(outer, DirFileSystem):
        root = f"{outer.path}/{root}".rstrip("/")
        outer = outer.fs
    inner = outer.fs if isinstance(outer, CachingFileSystem) else outer
    name = "_cat_file" if outer.async_impl else "cat_file"
    method = getattr(type(outer), name)
    arguments = inspect.signature(method).parameters
    ranged = known.cat is not None
    ranged |= outer is inner and {"start", "end"} <= set(arguments) and method is not AbstractFileSystem.cat_file
    return ConnectedChain(outer, inner, root, ranged, known)


def _nested(fs: Any) -> Iterator[Any]:
    while isinstance(fs, AbstractFileSystem):
        yield fs
        fs = vars(fs).get("fs")


def disconnect(chain: ConnectedChain) -> None:
    """Close the connections. Unknown file systems are closed when they are garbage-collected."""
    for each in _nested(chain.outer):
        with contextlib.suppress(Exception):  # a broken connection cannot be closed
            traits_of(type(each)).close(each)
