"""HTTP/1.1 on the wire: heads, and bodies in pieces that include their chunk framing.

HTTP libraries hide the raw bytes, and a proxy that must change nothing needs them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from snapshot.io.system import fcntl, termios

CHUNK = 1 << 19
"""Maximum number of bytes read at once."""

LONGEST = 1 << 16
"""Maximum size of a head in bytes."""

LINGER = 1.0
"""Seconds to keep reading from a connection that was closed orderly, so that the close is not a reset."""


class Gone(ConnectionError):
    """The peer closed the connection orderly, but in the middle of a message."""


@dataclass(frozen=True, slots=True)
class Head:
    """Head of a request or a response."""

    raw: bytes
    """Raw bytes, with the empty line at the end."""
    start: tuple[str, str, str]
    """The three parts of the first line."""
    headers: Mapping[str, str]
    """Values by name in lower case; repeated headers are joined by commas."""

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        """Return the parsed head; raise ConnectionAbortedError if it is invalid."""
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        one, two, three = [*first.split(" ", 2), "", ""][:3]
        if "HTTP/" not in first:
            raise ConnectionAbortedError(f"invalid HTTP head: {first[:80]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return cls(raw, (one, two, three), headers)

    def changed(self, name: str, value: str | None) -> Head:
        """Return the head with one header changed or removed."""
        lines = self.raw.split(b"\r\n")
        found = [line.partition(b":")[0].strip().lower() == name.lower().encode() for line in lines]
        new = [] if value is None else [f"{name}: {value}".encode("latin-1")]
        changed = [new if hit else [line] for line, hit in zip(lines, found, strict=True)]
        return Head.parse(b"\r\n".join(line for each in changed for line in each))

    @property
    def status(self) -> int:
        """Status of a response."""
        return _number(self.start[1])

    @property
    def stays(self) -> bool:
        """True if this side wants to keep the connection open."""
        connection = self.headers.get("connection", "").lower()
        return "keep-alive" in connection if "HTTP/1.0" in self.start else "close" not in connection


class Piece(NamedTuple):
    """Bytes of a body on the wire. The view is valid until the next piece is read."""

    data: memoryview
    payload: bool
    """True for bytes of the body, False for its framing."""
    last: bool
    """True if the message is known to end with this piece."""


class Channel:
    """A connected socket, read through one buffer, so that heads are parsed and bodies stream without a copy."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bytes = bytearray(CHUNK)
        self._buffer = memoryview(self._bytes)
        self._begin = 0
        self._end = 0

    async def read_some(self, most: int) -> memoryview:
        """Return up to `most` bytes that were received, or wait for the next; empty at the end of the connection."""
        if self._begin == self._end:
            self._begin = 0
            self._end = await asyncio.get_running_loop().sock_recv_into(self.socket, self._buffer)
        begin = self._begin
        self._begin = min(self._end, begin + most)
        return self._buffer[begin : self._begin]

    async def read_until(self, mark: bytes) -> bytes:
        """Return the bytes up to and including a mark; empty if the connection ends before the first byte."""
        while (found := self._bytes.find(mark, self._begin, self._end)) < 0:
            looked_at = self._end - self._begin
            if looked_at > LONGEST:
                raise ConnectionAbortedError(f"invalid HTTP: line or head too long: {bytes(self._buffer[:80])!r}")
            self._buffer[:looked_at] = self._buffer[self._begin : self._end]  # move to the front, to free space
            self._begin, self._end = 0, looked_at
            came = await asyncio.get_running_loop().sock_recv_into(self.socket, self._buffer[looked_at:])
            self._end += came
            if not self._end:
                return b""
            if not came:
                raise Gone("the connection ended in the middle of a head")
        begin, self._begin = self._begin, found + len(mark)
        return bytes(self._buffer[begin : self._begin])

    async def read_head(self) -> Head | None:
        """Return the next head, or None at the end of the connection."""
        raw = await self.read_until(b"\r\n\r\n")
        return Head.parse(raw) if raw else None

    async def send(self, data: bytes | memoryview) -> None:
        """Send all bytes."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def flushed(self) -> None:
        """Return when the peer's kernel has received all bytes: a reset discards the rest."""
        unsent = struct.pack("i", 0)
        while struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, unsent))[0]:
            await asyncio.sleep(0.001)  # there is no event for this, so poll the kernel

    async def left(self) -> None:
        """Raise when the peer ends the connection; return if it sends data, which is not read.

        A client that only closes its sending half counts as disconnected, as servers treat it, too.
        """
        if self._begin < self._end:
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.socket)
        if self.ended():
            raise Gone("the client has left")

    def ended(self) -> bool:
        """Return True if the peer has ended the connection."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    async def finish(self) -> None:
        """Close the connection orderly. Unread input is drained, since it would turn the close into a reset."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER):
                while await self.read_some(CHUNK):
                    pass
        self.close()

    def close(self, *, reset: bool = False) -> None:
        """Close the socket, with or without a reset."""
        if reset and self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Body:
    """A body, in pieces as they are received."""

    def __init__(self, channel: Channel, length: int | None, *, chunked: bool = False) -> None:
        self.length = length
        """Length if known. A body without a length that is not chunked ends with the connection."""
        self.chunked = chunked
        self._channel = channel
        self._left = length or 0
        self._begun = False
        self._over = length == 0

    @classmethod
    def of_request(cls, channel: Channel, head: Head) -> Body:
        """Return the body that follows a request's head."""
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            return cls(channel, None, chunked=True)
        return cls(channel, _number(head.headers.get("content-length", "0")))

    @classmethod
    def of_answer(cls, channel: Channel, head: Head, method: str) -> Body:
        """Return the body that follows the head of the response to a request of this method."""
        if method == "HEAD" or head.status in (204, 304):
            return cls(channel, 0)
        if "content-length" in head.headers or "transfer-encoding" in head.headers:
            return cls.of_request(channel, head)
        return cls(channel, None)

    async def read(self) -> Piece | None:
        """Return the next piece, or None after the last."""
        if self._over:
            return None
        if self.chunked and not self._left:
            return await self._frame()
        data = await self._channel.read_some(CHUNK if self.endless else self._left)
        if not data:
            self._over = self.endless
            if self._over:
                return None
            raise Gone("the connection ended in the middle of a body")
        if not self.endless:
            self._left -= len(data)
            self._over = not self._left and not self.chunked
        return Piece(data, True, self._over)

    @property
    def endless(self) -> bool:
        """True if the body ends with the connection."""
        return self.length is None and not self.chunked

    async def _frame(self) -> Piece:
        """Return the framing between two chunks, or after the last."""
        frame = await self._line() if self._begun else b""
        line = await self._line()
        frame += line
        self._begun = True
        self._left = _number(line.partition(b";")[0].decode("latin-1"), 16)
        while not self._left and line != b"\r\n":  # the trailers, and the empty line after them
            line = await self._line()
            frame += line
        self._over = not self._left
        return Piece(memoryview(frame), False, self._over)

    async def _line(self) -> bytes:
        line = await self._channel.read_until(b"\r\n")
        if not line:
            raise Gone("the connection ended in the middle of a body")
        return line


def _number(text: str, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise ConnectionAbortedError(f"invalid number in HTTP: {text[:80]!r}") from None
