"""Read-only snapshots on any web server, by ranged requests."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import yarl

from snapshot.errors import SnapshotError, StorageError
from snapshot.io.bodies import ResponseSink
from snapshot.io.storage import URL, Capabilities, Context, FileStat, Limits
from snapshot_objectstore.http import (
    StatusError,
    connection_fault,
    drain_into,
    new_session,
    parse_content_range,
    released_response,
    status_fault,
)
from snapshot_objectstore.object_storage import Driver, ObjectStorage, Page

LIMITS = Limits(preferred_part=16 << 20, parallel_parts=8, merge_gap=1 << 20)


class HttpDriver(Driver):
    """Driver of web servers, by aiohttp. A key is the part of a URL after the host."""

    def __init__(self, session: aiohttp.ClientSession, base: str, query: str) -> None:
        self._session = session
        self._base = base
        self._query = query

    def _url(self, key: str) -> str:
        return f"{self._base}/{quote(key)}" + (f"?{self._query}" if self._query else "")

    async def close(self) -> None:
        await self._session.close()

    async def head(self, key: str) -> FileStat:
        """Send a `HEAD`, or a `GET` of one byte if the server does not support it."""
        async with self._session.head(self._url(key), allow_redirects=True) as answer:
            if answer.status < 300 and answer.content_length is not None:
                return _stat(answer, answer.content_length)
            if answer.status in (404, 410) or answer.status >= 500:
                raise StatusError.of(answer)
        async with self._session.get(self._url(key), headers={"Range": "bytes=0-0"}) as answer:
            empty = answer.status == 416
            if answer.status >= 300 and not empty:
                raise StatusError.of(answer)
            _, total = parse_content_range(answer.headers.get("Content-Range"), answer.content_length)
            answer.close()
            if total is None and not empty:
                raise StorageError(f"{self._base}/{key}: the server does not report the file's size")
            return _stat(answer, total or 0)

    async def read(self, key: str, sink: ResponseSink) -> None:
        headers = {"Range": sink.range} if sink.range else {}
        answer = await self._session.get(self._url(key), headers=headers)
        async with released_response(answer):
            if answer.status >= 300:
                raise StatusError.of(answer)
            at, total = parse_content_range(answer.headers.get("Content-Range"), answer.content_length)
            sink.starts(at, total, _stat(answer, total or 0).token)
            await drain_into(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Raise NotImplementedError: web servers do not list files."""
        raise NotImplementedError

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Translate by the status, or by the state of the connection."""
        if isinstance(error, StatusError):
            return status_fault(error, url)
        return connection_fault(error, url)


def _stat(answer: aiohttp.ClientResponse, size: int) -> FileStat:
    modified = answer.headers.get("Last-Modified") or answer.headers.get("Date")
    when = parsedate_to_datetime(modified).timestamp() if modified else 0.0
    token = answer.headers.get("ETag") or f"{answer.headers.get('Last-Modified', '')} {size}"
    return FileStat(size, when, token)


class HttpStorage(ObjectStorage[HttpDriver]):
    """Files below `https://host/folder`. The query of `https://host/folder?query` is sent with every request."""

    capabilities = Capabilities(
        write=False, list=False, delete=False, atomic_put=False, conditional_put=False, durable=False
    )
    known: Mapping[str, str] = {
        "headers": "Headers of every request, such as `Authorization`.",
        "username": "For basic authentication, like `https://user:password@host/`.",
        "password": "For basic authentication.",
        "token": "For bearer authentication.",
        "verify": "Check the server's certificate (True), or the file of trusted authorities.",
        "proxy": "URL of a proxy; default: from the environment.",
    }
    secret = frozenset({"password", "token"})
    takes_query = True

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        self._root = unquote(self._root)  # `_url` quotes it together with the path below it
        user, _, password = url.apart()[0].partition(":")
        user, password = options.get("username") or unquote(user), options.get("password") or unquote(password)
        self._headers = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        if options.get("token"):
            self._headers["Authorization"] = f"Bearer {options['token']}"
        elif user:
            self._headers["Authorization"] = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        sent = yarl.URL(f"http://host/?{url.query}")  # yarl normalizes queries
        self._secrets = [password, unquote(url.query), sent.query_string, sent.raw_query_string]
        self._secrets += [each for name, each in self._headers.items() if name != "Accept-Encoding"]

    def driver_limits(self) -> Limits:
        return LIMITS

    async def connect(self) -> HttpDriver:
        """Create a session on this loop."""
        verify, proxy = self.options.get("verify", True), self.options.get("proxy")
        session = new_session(self._headers, self.retry_policy, self.connections, verify=verify, proxy=proxy)
        return HttpDriver(session, f"{self.url.scheme}://{self.bucket}", self.url.query)

    def secrets(self) -> list[str]:
        """Return the secrets, including those in headers, and the query in every form that a client may write."""
        return [*self._secrets, *super().secrets()]
