"""Any web server, read-only: snapshots that somebody has published, by ranged requests."""

from __future__ import annotations

import errno
import ssl
from base64 import b64encode
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import yarl

from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.plugins.attempts import PassingError, Sink, ends_early
from snapshot.plugins.drivers import Driver, Page
from snapshot.plugins.objects import ObjectStorage
from snapshot.plugins.streams import content_range, drained, lost, made_once, pour
from snapshot.storage import URL, Capabilities, Context, FileStat, Limits

LIMITS = Limits(preferred_part=16 << 20, parallel_parts=8, merge_gap=1 << 20)


class StatusError(Exception):
    """Raised by a driver for an answer that says no; `fault` makes one of ours of it."""

    def __init__(self, status: int, reason: str, after: str = "", detail: str = "") -> None:
        super().__init__(f"HTTP {status} {reason}{': ' if detail else ''}{detail}".rstrip())
        self.status = status
        self.after = float(after) if after.isdecimal() else None

    @classmethod
    def of(cls, response: aiohttp.ClientResponse, detail: str = "") -> StatusError:
        """Of an answer."""
        return cls(response.status, response.reason or "", response.headers.get("Retry-After", ""), detail)


def status_fault(error: StatusError, url: URL) -> SnapshotError:
    """What a status means, wherever it comes from."""
    said = f"{url}: {error}"
    if error.status in (404, 410):
        return StorageNotFoundError(said)
    if error.status == 416:
        return ends_early(url)
    if error.status in (408, 425, 429) or (error.status >= 500 and error.status not in (501, 505)):
        return PassingError(said, after=error.after, refused=error.status in (425, 429))
    fault = StorageError(said)
    fault.errno = errno.EACCES if error.status in (400, 401, 403) else None
    return fault


class HttpDriver(Driver):
    """One request a method, by aiohttp's client. A key is what follows the host."""

    def __init__(self, session: aiohttp.ClientSession, base: str, query: str) -> None:
        self._session = session
        self._base = base
        self._query = query

    def _url(self, key: str) -> str:
        return f"{self._base}/{quote(key)}" + (f"?{self._query}" if self._query else "")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def head(self, key: str) -> FileStat:
        """`HEAD`; where a server knows none, the head of a `GET` of one byte."""
        async with self._session.head(self._url(key), allow_redirects=True) as answer:
            if answer.status < 300 and answer.content_length is not None:
                return _stat(answer, answer.content_length)
            if answer.status in (404, 410) or answer.status >= 500:
                raise StatusError.of(answer)
        async with self._session.get(self._url(key), headers={"Range": "bytes=0-0"}) as answer:
            empty = answer.status == 416
            if answer.status >= 300 and not empty:
                raise StatusError.of(answer)
            _, total = content_range(answer.headers.get("Content-Range"), answer.content_length)
            answer.close()
            if total is None and not empty:
                raise StorageError(f"{self._base}/{key}: the server does not say how long the file is")
            return _stat(answer, total or 0)

    async def read(self, key: str, sink: Sink) -> None:
        """`GET`, with a range."""
        headers = {"Range": sink.range} if sink.range else {}
        answer = await self._session.get(self._url(key), headers=headers)
        async with drained(answer):
            if answer.status >= 300:
                raise StatusError.of(answer)
            at, total = content_range(answer.headers.get("Content-Range"), answer.content_length)
            sink.starts(at, total, _stat(answer, total or 0).token)
            await pour(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Nothing says what a web server has."""
        raise NotImplementedError

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """By the status, or by what became of the connection."""
        if isinstance(error, StatusError):
            return status_fault(error, url)
        return lost(error, url)


def _stat(answer: aiohttp.ClientResponse, size: int) -> FileStat:
    modified = answer.headers.get("Last-Modified") or answer.headers.get("Date")
    when = parsedate_to_datetime(modified).timestamp() if modified else 0.0
    token = answer.headers.get("ETag") or f"{answer.headers.get('Last-Modified', '')} {size}"
    return FileStat(size, when, token)


class HttpStorage(ObjectStorage[HttpDriver]):
    """`https://host/folder`, and `https://host/folder?query`, whose query goes with every request."""

    capabilities = Capabilities(
        write=False, list=False, delete=False, atomic_put=False, conditional_put=False, durable=False
    )
    known: Mapping[str, str] = {
        "headers": "Headers that go with every request, as `Authorization`.",
        "username": "For basic authentication; `https://user:password@host/` says the same.",
        "password": "For basic authentication.",
        "token": "For bearer authentication.",
        "verify": "Whether the server's certificate is checked (True), or the file of the authorities to trust.",
        "proxy": "URL of a proxy; without it, what the environment says.",
    }
    secret = frozenset({"password", "token"})
    takes_query = True

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        self._root = unquote(self._root)  # it is part of a URL, and what lies below it is quoted together with it
        user, _, password = url.apart()[0].partition(":")
        user, password = options.get("username") or unquote(user), options.get("password") or unquote(password)
        self._headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        if options.get("token"):
            self._headers["Authorization"] = f"Bearer {options['token']}"
        elif user:
            self._headers["Authorization"] = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        sent = yarl.URL(f"http://host/?{url.query}")  # which writes a query in a way of its own
        self._secrets = [password, unquote(url.query), sent.query_string, sent.raw_query_string]
        self._secrets += [each for name, each in self._headers.items() if name != "Accept-Encoding"]

    def driver_limits(self) -> Limits:
        return LIMITS

    async def connect(self) -> HttpDriver:
        """A session on this loop."""
        verify, proxy = self.options.get("verify", True), self.options.get("proxy")
        session = new_session(self, self._headers, verify=verify, proxy=proxy)
        return HttpDriver(session, f"{self.url.scheme}://{self.bucket}", self.url.query)

    def secrets(self) -> list[str]:
        """Those in headers, and the query in every form that a client may write it in."""
        return [*self._secrets, *super().secrets()]


def new_session(
    storage: ObjectStorage[Any], headers: Mapping[str, str], *, verify: bool | str = True, proxy: str | None = None
) -> aiohttp.ClientSession:
    """A session whose only time-out is that of connecting: an attempt has a clock of its own."""
    context = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
    patience = storage.patience
    made = aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=2 * storage.limits.parallel_parts + 64, ssl=context),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(patience.timeout, patience.deadline)),
        auto_decompress=False,
        trust_env=True,
        proxy=proxy,
        read_bufsize=1 << 20,
    )
    return made_once(made)
