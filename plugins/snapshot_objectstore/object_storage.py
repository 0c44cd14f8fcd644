"""Object stores: the interface of a store, requests with retries, and files: ranges, listings, uploads in parts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from snapshot.errors import (
    BucketNotFoundError,
    CorruptSnapshotError,
    SnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.bodies import BufferSink, BytesSink, RequestBody, ResponseSink
from snapshot.io.retry import RequestAttempts, RetryPolicy, TransientError, retry_request
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

# Requests to one kind of object store: the interface of a new store.


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: keys, folders (ending in `/`), and the marker of the next page."""

    keys: Sequence[str]
    folders: Sequence[str] = ()
    following: Any = None


class Driver(ABC):
    """Requests to one kind of store: one request per method, without retries. Keys are complete, without the bucket.

    `fault` translates all errors of the methods.
    """

    batch = 1
    """Maximum keys of one `delete`."""
    _date = ""
    _dated: tuple[float, float] | None = None
    """The time of the last dated answer, by the server's clock and by this machine's monotonic one."""

    def note_date(self, date: str | None) -> None:
        """Record the `Date` of an answer."""
        if date and date != self._date:
            self._date = date
            with contextlib.suppress(ValueError):
                self._dated = parsedate_to_datetime(date).timestamp(), time.monotonic()

    def now(self) -> float:
        """Return the time by the server's clock; by this machine's if no answer had a date."""
        return time.time() if self._dated is None else self._dated[0] + time.monotonic() - self._dated[1]

    def describe(self, size: int, mtime: float, token: str) -> FileStat:
        """Return what an answer says of an object. Both times are by the server's clock."""
        return FileStat(size, mtime, token, self.now())

    largest_copy = 1 << 60
    """Maximum bytes of one `copy`, and of one `copy_part` of a longer object."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Return this library's error for a client's error: a TransientError if the request may be retried."""

    @abstractmethod
    async def head(self, key: str) -> FileStat:
        """Return size, time and token of an object."""

    @abstractmethod
    async def read(self, key: str, sink: ResponseSink) -> None:
        """Request `sink.range`, in version `sink.token` if there is one, and pass the response to the sink."""

    @abstractmethod
    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Return one page of the keys that begin with a prefix."""

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Store a whole object; return the new token."""
        raise NotImplementedError

    async def begin(self, key: str, size: int) -> str:
        """Begin a multipart upload; return its name."""
        raise NotImplementedError

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Upload a part; return its tag for `complete`. `body.attempt.number` is above 1 in a retry."""
        raise NotImplementedError

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Join the parts into an object."""
        raise NotImplementedError

    async def abandon(self, key: str, upload: str) -> None:
        """Abort an upload and drop its parts; no error if it does not exist."""
        raise NotImplementedError

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """Return key, name and start time of the unfinished uploads."""
        return []

    async def parts(self, key: str, upload: str) -> Mapping[int, str]:
        """Return the tags of an unfinished upload's parts, by their numbers."""
        return {}

    def is_part(self, tag: str, body: RequestBody) -> bool:
        """Return True if a tag proves that a stored part has the bytes of a body."""
        return False

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most `batch` keys; no error for those that do not exist."""
        raise NotImplementedError

    async def copy(self, source: str, token: str, key: str, attempt: RequestAttempts) -> None:
        """Copy version `token` of an object of at most `largest_copy` bytes within the store.

        The key has no object yet, except perhaps that of an earlier attempt: see `attempt.uncertain`.
        """
        raise NotImplementedError

    async def copy_part(
        self, key: str, upload: str, number: int, source: str, token: str, *, begin: int, end: int
    ) -> str:
        """Copy a range of version `token` of a longer object as a part of an upload; return its tag for `complete`."""
        raise NotImplementedError


# Requests to an object store: options, limits, a shared driver, retries, and errors without secrets.

T = TypeVar("T")
D = TypeVar("D", bound=Driver)
_ENVIRONMENT = re.compile(r"(AWS|AZURE|GOOGLE|GCS|CLOUDSDK)_|\w+_proxy$", re.IGNORECASE)
"""Environment variables that clients read when they are created."""
COMMON: Mapping[str, str] = {
    "timeout": "Seconds without a transferred byte, after which a request is retried (60).",
    "deadline": "Seconds after which a failing request is no longer retried (300).",
    "part_bytes": "Number of bytes in one upload or download request.",
    "concurrency": "Number of concurrent requests for bulk bytes.",
}


class ConnectedStorage(Storage, Generic[D]):
    """A storage that sends requests through a driver, created on first use and shared by equal storages."""

    known: Mapping[str, str] = {}
    """Options of the plugin, each with a description, in addition to `COMMON`."""
    secret: frozenset[str] = frozenset()
    """Options whose values are hidden in errors."""
    takes_query = False

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        unknown = [name for name in options if name not in self.known and name not in COMMON]
        if unknown:
            raise ValueError(
                f"{url}: unknown storage_options {', '.join(map(repr, unknown))}; known are "
                f"{', '.join(sorted([*self.known, *COMMON]))}"
            )
        if url.query and not self.takes_query:
            raise ValueError(f"{url}: a query is not supported; pass storage_options")
        self.bucket, _, folder = url.apart()[1].partition("/")
        if not self.bucket:
            raise ValueError(f"{url}: no bucket; expected e.g. {url.scheme}://bucket/run/step-1")
        try:
            self._root = f"{check_path(folder)}/" if folder else ""
        except ValueError as error:  # some clients would normalize the path
            raise ValueError(f"{url}: {error}") from None
        self.retry_policy = RetryPolicy(
            **{name: options[name] for name in ("timeout", "deadline") if options.get(name) is not None}
        )
        self.limits = self._limits()
        self._driver: asyncio.Future[tuple[D, Callable[[], Awaitable[object]]]] | None = None
        self._sizes: dict[str, int] = {}
        """The expected sizes of files that are read."""
        self._client_key = (type(self).__qualname__, url.scheme, self.bucket, url.query, _sharing_key(url, options))

    def _limits(self) -> Limits:
        limits = self.driver_limits()
        size, at_once = self.options.get("part_bytes"), self.options.get("concurrency")
        for name, value in (("part_bytes", size), ("concurrency", at_once)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{self.url}: {name} must be an integer, got {value!r}")
        if size is not None:
            if not limits.smallest_part <= size <= limits.largest_part:
                least, most = limits.smallest_part, limits.largest_part
                raise ValueError(f"{self.url}: part_bytes must be from {least} to {most}, got {size!r}")
            limits = replace(limits, preferred_part=int(size), grown_part=0)
        if at_once is not None:
            if at_once < 1:
                raise ValueError(f"{self.url}: concurrency must be at least 1, got {at_once!r}")
            per_file = 1 if limits.in_order and limits.parts_per_file == 1 else int(at_once)
            limits = replace(limits, parallel_parts=int(at_once), parts_per_file=per_file)
        return limits

    @property
    def connections(self) -> int:
        """Maximum connections of a client: those for bulk bytes, and some for small requests."""
        return 2 * self.limits.parallel_parts + 64

    def driver_limits(self) -> Limits:
        """Return the limits of the store's parts, which are known before a driver exists."""
        raise NotImplementedError

    async def connect(self) -> D:
        """Return a new driver, created on the loop that will use it."""
        raise NotImplementedError

    async def driver(self) -> D:
        """Return the driver, created on first use."""
        if self._driver is None:
            self._driver = asyncio.ensure_future(self._acquire_driver())
        making = self._driver
        try:
            return (await asyncio.shield(making))[0]
        except Exception:
            if self._driver is making:
                self._driver = None
            raise

    async def _acquire_driver(self) -> tuple[D, Callable[[], Awaitable[object]]]:
        """Return a driver, and the function that releases it."""
        clients = self.context.clients
        if clients is None:
            return await self._make_driver()
        return await clients.get(self._client_key, self._make_driver), lambda: clients.release(self._client_key)

    async def _make_driver(self) -> tuple[D, Callable[[], Awaitable[object]]]:
        try:
            driver = await self.connect()
        except Exception as error:  # noqa: BLE001 - every client has its own errors
            raised, cause = self.translate_error(error, self.url, None)
        else:
            return driver, partial(_close_driver, driver, self.options)
        raise raised from cause

    async def close(self) -> None:
        """Release the driver; it is closed if no other storage uses it."""
        making, self._driver = self._driver, None
        if making is None:
            return
        if not making.done():  # the caller was cancelled: do not wait for a client that hangs
            making.cancel()
            await asyncio.wait([making], timeout=1)
        with contextlib.suppress(Exception, asyncio.CancelledError):  # the first user has seen the error
            _, give_back = making.result()
            await give_back()

    def _require(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise StorageError(f"{self.url}: this storage cannot {capability.replace('_', ' ')}")

    def key(self, path: str) -> str:
        """Return the whole key of a path."""
        return self._root + check_path(path)

    def key_of(self, source: URL) -> str:
        """Return the whole key of a file below any root of the same bucket; raise StorageError for another bucket."""
        try:
            there = type(self)(source, self.options, self.context)
        except ValueError as error:
            raise StorageError(f"{source}: cannot be shared: {error}") from None
        if there._client_key != self._client_key or not there._root:
            raise StorageError(f"{source}: cannot be shared with {self.url}, which is in another bucket or account")
        return there._root.removesuffix("/")

    def translate_error(self, error: Exception, url: URL, driver: D | None) -> tuple[Exception, Exception | None]:
        """Return this library's error for a client's error, and its cause unless that shows a secret.

        Raise the error outside of the `except`, which would keep the client's error as the context.
        """
        if isinstance(error, (SnapshotError, TimeoutError)):
            return error, error.__cause__ if isinstance(error.__cause__, Exception) else None
        if driver is None or isinstance(error, ValueError):
            made: SnapshotError = StorageError(f"{url}: {type(error).__name__}: {error}")
        else:
            made = driver.fault(error, url)
        made.args = tuple(self._redact(str(each)) for each in made.args)
        shown = f"{error!r} {error}"
        return made, error if self._redact(shown) == shown and "<Token-" not in shown else None

    def secrets(self) -> list[str]:
        """Return the texts that must not appear in an error."""
        password = self.url.apart()[0].partition(":")[2]
        proxy = urlsplit(str(self.options.get("proxy") or "")).password or ""
        given = [self.options.get(name) for name in self.secret]
        return [*(each for each in given if isinstance(each, str)), password, unquote(password), self.url.query, proxy]

    def _redact(self, text: str) -> str:
        for value in self.secrets():
            if len(value) > 3:
                text = text.replace(value, "***")
        return text

    async def send_request(
        self,
        name: str,
        path: str | URL,
        request: Callable[[D, RequestAttempts], Awaitable[T]],
        within: float | None = None,
    ) -> T:
        """Send a request by the driver, and retry it after transient faults. Errors name the path below the root."""
        url = path if isinstance(path, URL) else self.url.join(path)

        async def once(attempt: RequestAttempts) -> T:
            driver = await self.driver()
            try:
                return await request(driver, attempt)
            except Exception as error:  # noqa: BLE001 - every client has its own errors
                raised, cause = self.translate_error(error, url, driver)
            raise raised from cause

        return await retry_request(name, url, self.retry_policy, once, within)


async def _close_driver(driver: Driver, options: Mapping[str, Any]) -> None:
    """Close a driver. Keep the options alive until then: the key of a shared driver has addresses of their objects."""
    await driver.close()


def _sharing_key(url: URL, options: Mapping[str, Any]) -> str:
    """Return a key that is equal for equal options in an equal environment. It has secrets: never show it."""
    around = {name: value for name, value in os.environ.items() if _ENVIRONMENT.match(name)}
    found = [url.apart()[0], sorted(options.items()), sorted(around.items())]
    return json.dumps(found, sort_keys=True, default=lambda value: f"{type(value).__qualname__} {id(value)}")


# Upload of a whole object in one request, under a condition whose response may be lost.


async def put_object(storage: ConnectedStorage[Any], path: str, body: RequestBody, expect: Expect) -> str:
    """Store an object; return its token.

    A condition that fails after an attempt without a response may fail because that attempt succeeded. So the object is
    compared with the body.
    """
    key, url = storage.key(path), storage.url.join(path)

    async def once(driver: Driver, attempt: RequestAttempts) -> str:
        body.attempt = attempt
        body.seek(0)
        try:
            return await driver.put(key, body, expect)
        except Exception as error:
            refused = error if isinstance(error, StorageError) else driver.fault(error, url)
            if isinstance(refused, StorageNotFoundError) and isinstance(expect, str):
                refused = StorageConflictError(f"{url}: is missing ({refused})")
            if isinstance(refused, StorageConflictError):
                sink = BytesSink(url, body.nbytes)
                if attempt.uncertain and (token := await _find_own(driver, key, body, sink)):
                    return token
                raise refused from error
            raise

    return await storage.send_request("put", path, once)


async def _find_own(driver: Driver, key: str, body: RequestBody, sink: BytesSink) -> str | None:
    """Return the token of the object under a key if it has this body's bytes."""
    try:
        await driver.read(key, sink)
    except Exception as error:  # an unreadable object is foreign, unless the read may be retried
        fault = error if isinstance(error, StorageError) else driver.fault(error, sink.url)
        if isinstance(fault, (StorageNotFoundError, StorageConflictError)):
            return None
        if isinstance(fault, TransientError):
            raise
        unknown = StorageError(f"{sink.url}: written by this process or by another, and cannot be read: {fault}")
        unknown.uncertain = True
        raise unknown from error
    body.seek(0)
    return sink.token if sink.data == body.read() else None


# Uploads of files to an object store, whole or in parts.

LAST_WORDS = 10.0
"""Maximum seconds to clean up after a failure, since the caller waits for the error."""
PARTS_AT_ONCE = 16
"""Maximum concurrent parts of a copy, whose bytes do not pass through this host."""


async def abandon_upload(key: str, upload: str, driver: Driver, _: RequestAttempts) -> None:
    """Abort an upload; to be passed to `send_request`."""
    await driver.abandon(key, upload)


async def copy_object(storage: ConnectedStorage[Any], source: str, token: str, path: str, size: int) -> None:
    """Let the store copy version `token` of an object: in one request, or in parts. Nothing remains after an error."""
    key, uncertain = storage.key(path), False
    writer = ObjectWriter(storage, path, key, size)

    async def once(driver: Driver, attempt: RequestAttempts) -> None:
        nonlocal uncertain
        uncertain = attempt.uncertain
        await driver.copy(source, token, key, attempt)

    try:
        longest = (await storage.driver()).largest_copy
        if size <= longest:
            await storage.send_request("share", path, once)
        else:
            length = max(longest, -(-size // storage.limits.most_parts))

            async def part(offset: int) -> None:
                await writer.copy(source, token, offset, min(length, size - offset))

            await gather_limited(range(0, size, length), part, PARTS_AT_ONCE)
            await writer.finish()
        made = (await storage.stat(path)).size
        if made != size:
            raise StorageError(f"{storage.url.join(path)}: the store copied {made} of {size} bytes")
    except BaseException as error:
        await writer.abort()
        if uncertain or not isinstance(error, (StorageConflictError, StorageNotFoundError)):
            with contextlib.suppress(asyncio.CancelledError, StorageError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await storage.delete([path])
        raise


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
        self._stored: Mapping[int, str] = {}
        """The tags of parts that an earlier process uploaded."""
        self._resumes = storage.context.resume
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
        number, upload = await self._add_part(offset, body.nbytes)
        if number in self._stored and await in_thread(
            (await self._storage.driver()).is_part, self._stored[number], body
        ):
            self._parts[number] = self._stored[number]
            return

        async def once(driver: Driver, attempt: RequestAttempts) -> str:
            body.attempt = attempt
            body.seek(0)
            return await driver.part(key, upload, number, offset, body, last=end == self._size)

        self._parts[number] = await self._storage.send_request("upload", path, once)

    async def copy(self, source: str, token: str, offset: int, nbytes: int) -> None:
        """Let the store copy a part from another object of this size, in this version."""
        number, upload = await self._add_part(offset, nbytes)
        key, end = self._key, offset + nbytes
        self._parts[number] = await self._storage.send_request(
            "share",
            self._path,
            lambda driver, _: driver.copy_part(key, upload, number, source, token, begin=offset, end=end),
        )

    async def _add_part(self, offset: int, nbytes: int) -> tuple[int, str]:
        """Record a part. Return its number, and the name of the upload."""
        if not self._written and offset + nbytes < self._size:
            self._part_length = nbytes
        number = offset // self._part_length + 1
        if number in self._parts or self._written.get(offset, nbytes) != nbytes:
            raise StorageError(f"{self._url}: all parts of a file but the last must have one length")
        self._written[offset] = nbytes
        self._parts[number] = ""
        return number, await self._upload_name()

    async def _upload_name(self) -> str:
        """Return the name of the upload, which the first part begins."""
        if self._upload is None:
            self._upload = asyncio.ensure_future(self._begin())
        return await asyncio.shield(self._upload)

    async def _begin(self) -> str:
        """Begin an upload, or continue the newest one of an earlier process."""
        key, size, send = self._key, self._size, self._storage.send_request
        if self._resumes:
            found = await send("list uploads", self._path, lambda driver, _: driver.uploads(key))
            begun = [(when, name) for each, name, when in found if each == key]
            if begun:
                upload = str(max(begun)[1])
                self._stored = await send("list parts", self._path, lambda driver, _: driver.parts(key, upload))
                return upload
        name: str = await send("begin", self._path, lambda driver, _: driver.begin(key, size))
        return name

    async def finish(self) -> None:
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

    async def _complete(self, driver: Driver, attempt: RequestAttempts) -> None:
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
        if begun is not None and not self._resumes:
            with contextlib.suppress(asyncio.CancelledError, StorageError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    upload = await begun
                    await self._storage.send_request(
                        "abort", self._path, partial(abandon_upload, key, upload), LAST_WORDS
                    )
        if self._whole:
            await self._storage.delete([self._path])


# Files in an object store, through a driver: ranges and their lengths, listings, deletions, unfinished uploads.

AT_ONCE = 16
"""Maximum concurrent `delete` requests."""


class ObjectStorage(ConnectedStorage[D]):
    """Base of storages in object stores. Subclasses provide a driver for the requests."""

    capabilities = Capabilities(shares="copy")

    # Reading

    async def _fill(self, name: str, path: str, sink: ResponseSink) -> None:
        key = self.key(path)

        async def once(driver: D, attempt: RequestAttempts) -> None:
            sink.attempt = attempt
            if not sink.full:  # else the connection broke after the last byte
                await driver.read(key, sink)
                sink.ended()

        await self.send_request(name, path, once)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read a range in one request, directly into the buffers."""
        sink = BufferSink(self.url.join(path), offset, buffers, token)
        sink.size = self._sizes.get(path)
        if sink.end == offset:
            await self.stat(path)
            return
        try:
            await self._fill("read", path, sink)
        except StorageNotFoundError as error:
            if sink.size is None:
                raise
            raise CorruptSnapshotError(f"{self.url.join(path)} is missing") from error

    def expect_size(self, path: str, size: int) -> bool:
        """Compare the file's size in each response, before its first byte is stored."""
        self._sizes[path] = size
        return True

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Read a small file in one request."""
        sink = BytesSink(self.url.join(path), limit)
        await self._fill("get", path, sink)
        return bytes(sink.data)

    async def stat(self, path: str) -> FileStat:
        """Return size, time and token, in one request."""
        key = self.key(path)
        return await self.send_request("stat", path, lambda driver, _: driver.head(key))

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """List paths, in one request per page."""
        self._require("list")
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        start, found, following = self._root + prefix, set[str](), None
        while True:
            page = await self.send_request("list", prefix, partial(_listed, start, recursive, following))
            found.update(key for key in page.keys if not key.endswith("/"))
            found.update(page.folders)
            following = page.following
            if following is None:
                return sorted(key[len(self._root) :] for key in found)

    async def list_root(self) -> Sequence[str] | None:
        """List one page; None if there are more, or if listing is not permitted."""
        try:
            page = await self.send_request("list", "", partial(_listed, self._root, False, None))
        except BucketNotFoundError:
            raise
        except StorageError:
            return None
        if page.following is not None:
            return None
        return [name for key in (*page.keys, *page.folders) if (name := key[len(self._root) :])]

    # Writing

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file. The first part sends the first request."""
        self._require("write")
        key = self.key(path)
        await self.send_request("connect", path, _connected)
        return ObjectWriter(self, path, key, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a small file in one request."""
        self._require("write")
        return await put_object(self, path, RequestBody([data]), expect)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete in batches, several requests concurrently."""
        self._require("delete")
        keys = {self.key(path): path for path in paths}
        if not keys:
            return
        size = (await self.send_request("connect", "", _connected)).batch
        names = list(keys)
        batches = [names[at : at + size] for at in range(0, len(names), size)]
        at_once = asyncio.Semaphore(AT_ONCE)

        async def drop(batch: Sequence[str]) -> None:
            async with at_once:
                await self.send_request("delete", keys[batch[0]], lambda driver, _: driver.delete(batch))

        for outcome in await asyncio.gather(*map(drop, batches), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        """Let the store copy the object, and compare the size."""
        if not self.capabilities.shares:
            await super().share(source, path, token=token)
        self.key(path)
        origin = self.key_of(source)
        found = await self.send_request("stat", source, lambda driver, _: driver.head(origin))
        if token is not None and token != found.token:
            raise StorageConflictError(f"{source}: was replaced")
        with contextlib.suppress(StorageNotFoundError):
            await self.stat(path)
            raise StorageConflictError(f"{self.url.join(path)}: already exists")
        await copy_object(self, origin, found.token, path, found.size)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Abort the uploads of killed processes."""
        found = await self.send_request("list uploads", prefix, lambda driver, _: driver.uploads(self._root + prefix))
        now = (await self.driver()).now()
        old = [(key, upload) for key, upload, began in found if began < now - older_than]
        for key, upload in old:
            await self.send_request("abort", key[len(self._root) :], partial(abandon_upload, key, upload))
        return sorted({key[len(self._root) :] for key, _ in old})


async def _listed(start: str, recursive: bool, following: Any, driver: Driver, _: RequestAttempts) -> Page:
    return await driver.list(start, recursive, following)


async def _connected(driver: D, _: RequestAttempts) -> D:
    return driver
