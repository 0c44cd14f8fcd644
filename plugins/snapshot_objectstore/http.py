"""HTTP by aiohttp: sessions, the bytes of a request without extra copies, and errors."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

from snapshot.errors import (
    SnapshotError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io.bodies import RequestBody, ResponseSink, past_end_error
from snapshot.io.retry import RetryPolicy, TransientError
from snapshot.io.url import URL

# The bytes of one request: sinks for a response, and bodies that are sent without a copy.


# HTTP by aiohttp: sessions without retries, bodies without extra copies, and the translation of statuses.

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def parse_content_range(header: str | None, length: int | None) -> tuple[int, int | None]:
    """Return the first byte of a response, and the length of the file, from `Content-Range`.

    Without that header the response is the whole file.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if not found:
        return 0, length
    return int(found[1]), int(found[2]) if found[2] != "*" else None


def without_resending(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """Return the session with its own retries switched off.

    aiohttp repeats a request if a kept connection is closed. If the repeated `put` is refused, the caller cannot know
    whether the first request had taken effect.
    """
    session._retry_connection = False
    return session


@asynccontextmanager
async def released_response(response: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """Release the connection of a response at the end if all of it was read, and otherwise close it."""
    try:
        yield
    finally:
        if response.content.at_eof():
            response.release()
        else:
            response.close()


async def drain_into(response: aiohttp.ClientResponse, sink: ResponseSink) -> None:
    """Pass the body of a response to a sink as it arrives, until the sink is full."""
    while not sink.full and (chunk := await response.content.readany()):
        sink.take(chunk)


class BodyPayload(payload.Payload):
    """Payload that sends a `RequestBody` without copying it."""

    _value: RequestBody

    def __init__(self, value: RequestBody, *args: object, **kwargs: object) -> None:
        super().__init__(value, *args, **kwargs)  # type: ignore[arg-type]
        self._size = value.nbytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Raise TypeError, since a part of a file is not text."""
        raise TypeError("a part of a file is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send all pieces. On return or error no byte is left in a buffer, so that its memory can be reused."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Send all pieces; aiohttp calls this with the length from the headers."""
        transport = getattr(writer, "transport", None)
        if transport is not None:
            transport.set_write_buffer_limits(high=0)  # `drain` waits until the buffer is empty
        try:
            for piece in self._value.pieces():
                await writer.write(piece)
                await writer.drain()
                self._value.progress()
        except BaseException:
            if transport is not None:
                transport.abort()
            raise

    async def close(self) -> None:
        """Do nothing: the payload holds no resources."""


def is_unknown_host(error: BaseException | None) -> bool:
    """Return True if a host name does not exist, which is not a transient error."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        found = getattr(error, "os_error", None) or error.__cause__ or error.__context__
        error = found if isinstance(found, BaseException) else None
    return False


def connection_fault(error: Exception, url: URL) -> StorageError:
    """Return this library's error for a broken connection, without the client's text, which may show the whole URL."""
    what = f"{url}: {type(error).__name__}"
    if isinstance(error, OSError) and error.strerror:
        what += f": {error.strerror}"
    if isinstance(error, aiohttp.ClientSSLError) or is_unknown_host(error):
        return StorageError(what)
    passing = isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, EOFError))
    return TransientError(what) if passing else StorageError(what)


class StatusError(Exception):
    """Response with an error status, raised by a driver; `fault` translates it."""

    def __init__(self, status: int, reason: str, after: str = "", detail: str = "") -> None:
        super().__init__(f"HTTP {status} {reason}{': ' if detail else ''}{detail}".rstrip())
        self.status = status
        self.after = float(after) if after.isdecimal() else None

    @classmethod
    def of(cls, response: aiohttp.ClientResponse, detail: str = "") -> StatusError:
        return cls(response.status, response.reason or "", response.headers.get("Retry-After", ""), detail)


def status_fault(error: StatusError, url: URL) -> SnapshotError:
    """Return this library's error for an error status."""
    said = f"{url}: {error}"
    if error.status in (404, 410):
        return StorageNotFoundError(said)
    if error.status == 416:
        return past_end_error(url)
    if error.status in (408, 425, 429) or (error.status >= 500 and error.status not in (501, 505)):
        return TransientError(said, after=error.after, refused=error.status in (425, 429))
    fault = StorageError(said)
    fault.errno = errno.EACCES if error.status in (400, 401, 403) else None
    return fault


def new_session(
    headers: Mapping[str, str],
    retry_policy: RetryPolicy,
    connections: int,
    *,
    verify: bool | str = True,
    proxy: str | None = None,
) -> aiohttp.ClientSession:
    """Return a session whose only time-out is for connecting, since `retry_request` times the attempts."""
    context = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
    made = aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=connections, ssl=context),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(retry_policy.timeout, retry_policy.deadline)),
        auto_decompress=False,
        trust_env=True,
        proxy=proxy,
        read_bufsize=1 << 20,
    )
    return without_resending(made)


payload.PAYLOAD_REGISTRY.register(BodyPayload, RequestBody)
