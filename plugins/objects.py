"""Object stores: what S3, GCS and Azure have in common. A driver says how each request is made, once; everything
around it stands here: retries, ranges and their lengths, parts, conditional puts whose answer was lost, cleaning up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.attempts import Attempt, Body, PassingError, Patience, Scatter, Sink, Whole, patiently
from snapshot.plugins.drivers import Driver, Page
from snapshot.plugins.uploads import LAST_WORDS, abandoned
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
_AROUND = re.compile(r"(AWS|AZURE|GOOGLE|GCS|CLOUDSDK)_|\w+_proxy$", re.IGNORECASE)
"""What clients look up in the environment when they are made."""
AT_ONCE = 16
"""Deletions that go side by side where a store has no request for many."""


D = TypeVar("D", bound=Driver)


class ObjectStorage(Storage, Generic[D]):
    """Files in an object store, by way of a driver that is made on first use and shared by all that are alike."""

    capabilities = Capabilities(server_side_copy=True)
    known: Mapping[str, str] = {}
    """The options of the plugin, each with a sentence; those of all plugins of this kind are in `COMMON`."""
    secret: frozenset[str] = frozenset()
    """The options whose values must not be seen."""
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
            raise ValueError(f"{url}: what a query would say is said with storage_options here")
        self.bucket, _, folder = url.apart()[1].partition("/")
        if not self.bucket:
            raise ValueError(f"{url}: names no bucket, as in {url.scheme}://bucket/run/step-1")
        try:
            self._root = f"{check_path(folder)}/" if folder else ""
        except ValueError as error:  # some clients would ask for something else
            raise ValueError(f"{url}: {error}") from None
        self.patience = Patience(
            **{name: options[name] for name in ("timeout", "deadline") if options.get(name) is not None}
        )
        self.limits = self._limits()
        self._driver: asyncio.Future[tuple[D, Callable[[], Awaitable[object]]]] | None = None
        self._key = (type(self).__qualname__, url.scheme, self.bucket, url.query, _digest(url, options))

    def _limits(self) -> Limits:
        limits = self.driver_limits()
        size, at_once = self.options.get("part_bytes"), self.options.get("concurrency")
        for name, value in (("part_bytes", size), ("concurrency", at_once)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{self.url}: {name}={value!r} is not a whole number")
        if size is not None:
            if not limits.smallest_part <= size <= limits.largest_part:
                least, most = limits.smallest_part, limits.largest_part
                raise ValueError(f"{self.url}: part_bytes={size!r} is not from {least} to {most}")
            limits = replace(limits, preferred_part=int(size))
        if at_once is not None:
            if at_once < 1:
                raise ValueError(f"{self.url}: concurrency={at_once!r} is less than 1")
            per_file = 1 if limits.in_order and limits.parts_per_file == 1 else int(at_once)
            limits = replace(limits, parallel_parts=int(at_once), parts_per_file=per_file)
        return limits

    def driver_limits(self) -> Limits:
        """What the store wants of its parts: known before there is a driver."""
        raise NotImplementedError

    async def connect(self) -> D:
        """Make a driver, on the loop that will use it."""
        raise NotImplementedError

    async def driver(self) -> D:
        """The driver, made if there is none yet."""
        if self._driver is None:
            self._driver = asyncio.ensure_future(self._open())
        making = self._driver
        try:
            return (await asyncio.shield(making))[0]
        except Exception:
            if self._driver is making:
                self._driver = None
            raise

    async def _open(self) -> tuple[D, Callable[[], Awaitable[object]]]:
        """A driver, and how it is given back."""
        clients = self.context.clients
        if clients is None:
            return await self._make()
        return await clients.get(self._key, self._make), lambda: clients.release(self._key)

    async def _make(self) -> tuple[D, Callable[[], Awaitable[object]]]:
        try:
            driver = await self.connect()
        except Exception as error:  # noqa: BLE001 - every client has errors of its own
            raised, cause = self.ours(error, self.url, None)
        else:
            return driver, partial(_closed, driver, self.options)
        raise raised from cause

    async def close(self) -> None:
        """Give the driver back; it is closed unless others use it, too."""
        making, self._driver = self._driver, None
        if making is None:
            return
        if not making.done():  # whoever needed it has given up: a client that cannot be made is not waited for
            making.cancel()
            await asyncio.wait([making], timeout=1)
        with contextlib.suppress(Exception, asyncio.CancelledError):  # it was raised where it was needed
            _, give_back = making.result()
            await give_back()

    def _need(self, capability: str) -> None:
        if not getattr(self.capabilities, capability):
            raise StorageError(f"{self.url}: this storage cannot {capability.replace('_', ' ')}")

    def key(self, path: str) -> str:
        """The whole key of a path."""
        return self._root + check_path(path)

    def ours(self, error: Exception, url: URL, driver: D | None) -> tuple[Exception, Exception | None]:
        """What is raised for a client's error, and its cause, unless that would show a secret.

        To be raised outside of the `except`, which would make it known as the context.
        """
        if isinstance(error, (SnapshotError, TimeoutError)):
            return error, error.__cause__ if isinstance(error.__cause__, Exception) else None
        if driver is None or isinstance(error, ValueError):
            made: SnapshotError = StorageError(f"{url}: {type(error).__name__}: {error}")
        else:
            made = driver.fault(error, url)
        made.args = tuple(self._hidden(str(each)) for each in made.args)
        shown = f"{error!r} {error}"
        return made, error if self._hidden(shown) == shown and "<Token-" not in shown else None

    def secrets(self) -> list[str]:
        """What must not be seen in an error, wherever a client puts it."""
        password = self.url.apart()[0].partition(":")[2]
        proxy = urlsplit(str(self.options.get("proxy") or "")).password or ""
        given = [self.options.get(name) for name in self.secret]
        return [*(each for each in given if isinstance(each, str)), password, unquote(password), self.url.query, proxy]

    def _hidden(self, text: str) -> str:
        for value in self.secrets():
            if len(value) > 3:
                text = text.replace(value, "***")
        return text

    async def ask(
        self, name: str, path: str, request: Callable[[D, Attempt], Awaitable[T]], within: float | None = None
    ) -> T:
        """Make a request of the driver, patiently."""
        url = self.url.join(path)

        async def once(attempt: Attempt) -> T:
            driver = await self.driver()
            try:
                return await request(driver, attempt)
            except Exception as error:  # noqa: BLE001 - every client has errors of its own
                raised, cause = self.ours(error, url, driver)
            raise raised from cause

        return await patiently(name, url, self.patience, once, within)

    # Reading

    async def _fill(self, name: str, path: str, sink: Sink) -> None:
        key = self.key(path)

        async def once(driver: D, attempt: Attempt) -> None:
            sink.attempt = attempt
            if not sink.full:  # else all had arrived when the connection broke
                await driver.read(key, sink)
                sink.ended()

        await self.ask(name, path, once)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """One ranged request, drained into the buffers as it arrives."""
        sink = Scatter(self.url.join(path), offset, buffers, token)
        if sink.end == offset:
            await self.stat(path)
        else:
            await self._fill("read", path, sink)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """One request."""
        sink = Whole(self.url.join(path), limit)
        await self._fill("get", path, sink)
        return bytes(sink.data)

    async def stat(self, path: str) -> FileStat:
        """One request."""
        key = self.key(path)
        return await self.ask("stat", path, lambda driver, _: driver.head(key))

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """A request a page."""
        self._need("list")
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        start, found, following = self._root + prefix, set[str](), None
        while True:
            page = await self.ask("list", prefix, partial(_listed, start, recursive, following))
            found.update(key for key in page.keys if not key.endswith("/"))
            found.update(page.folders)
            following = page.following
            if following is None:
                return sorted(key[len(self._root) :] for key in found)

    # Writing

    async def create(self, path: str, size: int) -> FileWriter:
        """Nothing is asked of the store before the first part is written."""
        self._need("write")
        key = self.key(path)
        return (await self.ask("connect", path, _itself)).writer(self, path, key, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """One request. A refusal after an attempt without an answer may be due to our own success: so look."""
        self._need("write")
        return await self.put_body(path, Body([data]), expect)

    async def put_body(self, path: str, body: Body, expect: Expect) -> str:
        """The same for a body."""
        key = self.key(path)

        async def once(driver: D, attempt: Attempt) -> str:
            body.attempt = attempt
            body.seek(0)
            try:
                return await driver.put(key, body, expect)
            except Exception as error:
                refused = error if isinstance(error, StorageError) else driver.fault(error, self.url.join(path))
                if isinstance(refused, StorageNotFoundError) and isinstance(expect, str):
                    refused = StorageConflictError(f"{self.url.join(path)}: is gone ({refused})")
                if isinstance(refused, StorageConflictError):
                    if attempt.uncertain and (token := await self._stands(driver, key, path, body)):
                        return token
                    raise refused from error
                raise

        return await self.ask("put", path, once)

    async def _stands(self, driver: D, key: str, path: str, body: Body) -> str | None:
        """The token of what stands at a path, if it is this body's bytes."""
        sink = Whole(self.url.join(path), body.nbytes)
        try:
            await driver.read(key, sink)
        except Exception as error:  # what cannot be read is not ours, unless reading it may be tried again
            fault = error if isinstance(error, StorageError) else driver.fault(error, sink.url)
            if isinstance(fault, (StorageNotFoundError, StorageConflictError)):
                return None
            if isinstance(fault, PassingError):
                raise
            unknown = StorageError(f"{sink.url}: was written by us or by another, and cannot be looked at: {fault}")
            unknown.uncertain = True
            raise unknown from error
        body.seek(0)
        return sink.token if sink.data == body.read() else None

    async def delete(self, paths: Sequence[str]) -> None:
        """As many a request as the store takes; several requests side by side."""
        self._need("delete")
        keys = {self.key(path): path for path in paths}
        if not keys:
            return
        size = (await self.ask("connect", "", _itself)).batch
        names = list(keys)
        batches = [names[at : at + size] for at in range(0, len(names), size)]
        at_once = asyncio.Semaphore(AT_ONCE)

        async def drop(batch: Sequence[str]) -> None:
            async with at_once:
                await self.ask("delete", keys[batch[0]], lambda driver, _: driver.delete(batch))

        for outcome in await asyncio.gather(*map(drop, batches), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def copy(self, source: str, path: str) -> None:
        """The store copies; no byte passes through here."""
        self._need("server_side_copy")
        origin, key = self.key(source), self.key(path)
        await self.ask("copy", source, lambda driver, _: driver.copy(origin, key))

    async def abandon_all(self, path: str) -> None:
        """Abandon all uploads to a path; what cannot be found is left to `sweep`."""
        key = self.key(path)
        with contextlib.suppress(StorageError):
            found = await self.ask("list uploads", path, lambda driver, _: driver.uploads(key), LAST_WORDS)
            for each, upload, _ in found:
                if each == key:
                    await self.ask("abort", path, partial(abandoned, key, upload), LAST_WORDS)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Abandon the uploads that a killed process left."""
        found = await self.ask("list uploads", prefix, lambda driver, _: driver.uploads(self._root + prefix))
        old = [(key, upload) for key, upload, began in found if began < time.time() - older_than]
        for key, upload in old:
            await self.ask("abort", key[len(self._root) :], partial(abandoned, key, upload))
        return sorted({key[len(self._root) :] for key, _ in old})


async def _listed(start: str, recursive: bool, following: Any, driver: Driver, _: Attempt) -> Page:
    return await driver.list(start, recursive, following)


async def _closed(driver: Driver, options: Mapping[str, Any]) -> None:
    """Close a driver. Until then the options are held, whose objects' addresses stand in the key of a shared one."""
    await driver.close()


async def _itself(driver: D, _: Attempt) -> D:
    return driver


COMMON: Mapping[str, str] = {
    "timeout": "Seconds without a byte moved, after which a request is made again (60).",
    "deadline": "Seconds after which a request that keeps failing is given up (300).",
    "part_bytes": "How many bytes go up, or come down, in one request.",
    "concurrency": "How many requests for bulk bytes are under way at once.",
}


def _digest(url: URL, options: Mapping[str, Any]) -> str:
    """A key under which equal options, in an equal environment, find each other's driver; never shown."""
    around = {name: value for name, value in os.environ.items() if _AROUND.match(name)}
    found = [url.apart()[0], sorted(options.items()), sorted(around.items())]
    return json.dumps(found, sort_keys=True, default=lambda value: f"{type(value).__qualname__} {id(value)}")
