"""Bodies of HTTP requests and answers by aiohttp, without a copy more than the client makes."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

from snapshot.errors import StorageError
from snapshot.plugins.attempts import Body, PassingError, Sink
from snapshot.storage import URL

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def content_range(header: str | None, length: int | None) -> tuple[int, int | None]:
    """Where an answer begins, and how long the whole file is: by `Content-Range`, or else it is all of the file."""
    found = _RANGE.fullmatch(header.strip()) if header else None
    if not found:
        return 0, length
    return int(found[1]), int(found[2]) if found[2] != "*" else None


def made_once(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """The session, without requests that it makes again by itself where a kept connection turns out to be closed:
    a `put` that was refused could not tell any more whether the first one had taken effect."""
    session._retry_connection = False
    return session


@asynccontextmanager
async def drained(response: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """Read an answer inside; its connection is used again if all of it was read, and closed if not."""
    try:
        yield
    finally:
        if response.content.at_eof():
            response.release()
        else:
            response.close()


async def pour(response: aiohttp.ClientResponse, sink: Sink) -> None:
    """Give an answer's body to a sink as it arrives, until that is full."""
    while not sink.full and (chunk := await response.content.readany()):
        sink.take(chunk)


class BodyPayload(payload.Payload):
    """Sends a `Body` from where it lies."""

    _value: Body

    def __init__(self, value: Body, *args: object, **kwargs: object) -> None:
        super().__init__(value, *args, **kwargs)  # type: ignore[arg-type]
        self._size = value.nbytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Only for what is text."""
        raise TypeError("a part of a file is no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """All of it, piece by piece. When this ends, one way or the other, no byte of it is waiting to be sent: the
        memory may not be there any more when the loop gets to it."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """The same; aiohttp asks for it with the length that the headers tell."""
        transport = getattr(writer, "transport", None)
        if transport is not None:
            transport.set_write_buffer_limits(high=0)  # `drain` waits until nothing is left
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
        """Nothing is held."""


def nowhere(error: BaseException | None) -> bool:
    """Whether a name is one that no server has: which will not pass."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        found = getattr(error, "os_error", None) or error.__cause__ or error.__context__
        error = found if isinstance(found, BaseException) else None
    return False


def lost(error: Exception, url: URL) -> StorageError:
    """What became of a connection, as one of our errors. The client's text may show the whole URL: it is left out."""
    what = f"{url}: {type(error).__name__}"
    if isinstance(error, OSError) and error.strerror:
        what += f": {error.strerror}"
    if isinstance(error, aiohttp.ClientSSLError) or nowhere(error):
        return StorageError(what)
    passing = isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, EOFError))
    return PassingError(what) if passing else StorageError(what)


payload.PAYLOAD_REGISTRY.register(BodyPayload, Body)
