"""The protocol between a process and its writer process: short, ordered messages over a socket, with descriptors.

Tensor bytes are never sent: they are in shared segments, and messages contain their location.
"""

from __future__ import annotations

import array
import asyncio
import socket
import struct
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from snapshot import errors
from snapshot.decoding import decode_msgpack
from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.plan.layout import Extent, FilePart, FilePlan

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 256 << 10
_DESCRIPTORS = 16
"""The maximum number of descriptors per receive call: the kernel passes on those of one message only."""


FileResult = tuple[list[str], dict[int, bytes], tuple[int, bytes, str] | None, tuple[int, bytes] | None]
"""The digests of a file's extents, the digest tables, and two tuples or None.

The first one is for a compressed file: its size, its table and its digest. The second one is for a file of a signed
snapshot: the size and the hashes of its stored bytes.
"""


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The base class of all messages."""


class FileLane(Message):
    """A file to write, with the properties that a writer needs."""

    location: str
    size: int
    part_bytes: int
    """The size of its parts: both sides split it in the same way."""
    begin: int
    """The begin of its first extent."""
    ends: bytes
    """The end of each extent, as 64-bit integers; the next extent begins there."""
    kinds: bytes = b""
    """If the file is compressed, the kind of blocks of each extent."""

    @classmethod
    def of(cls, file: FilePlan, location: str, parts: Sequence[FilePart], kinds: bytes = b"") -> FileLane:
        """Create the message for a file."""
        begin = file.extents[0].begin if file.extents else file.size
        ends = array.array("Q", [extent.end for extent in file.extents]).tobytes()
        return cls(location, file.size, parts[0].end if parts else 1, begin, ends, kinds)

    def file(self) -> FilePlan:
        """Return the file without the content of its header, which is in the first part."""
        extents, begin = [], self.begin
        for end in array.array("Q", self.ends):
            extents.append(Extent(0, begin, end))
            begin = end
        return FilePlan(b"", tuple(extents), self.size)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the length and the kind of each extent of a file that is compressed."""
        ends = array.array("Q", self.ends)
        return [(end - begin, kind) for begin, end, kind in zip([self.begin, *ends], ends, self.kinds, strict=False)]


class Begin(Message):
    """Write these files."""

    take: int
    url: str
    options: bytes
    """A pickle."""
    durable: bool
    budget: int
    lanes: list[FileLane]
    plugins: list[tuple[str, str, str]]
    """Scheme, module and name of each registered plugin."""
    environment: list[tuple[bytes, bytes]]
    path: list[bytes]
    """The module search path: plugins may come from a folder of their own."""
    umask: int
    """The umask for new files; -1 if it is unknown."""
    packing: int = 0
    """Memory for compression; 0 if files are not compressed."""
    signed: bool = False
    """True if stored bytes are hashed."""


class Map(Message):
    """Map a segment, whose descriptor is attached."""

    segment: int
    size: int


class Unmap(Message):
    """Unmap this segment: it is no longer used."""

    segment: int


class Give(Message):
    """A part was staged at this location."""

    take: int
    file: int
    position: int
    segment: int
    offset: int
    nbytes: int


class Cancel(Message):
    """Cancel a take and delete its files."""

    take: int


class Moved(Message):
    """A number of bytes was stored."""

    take: int
    nbytes: int


class Free(Message):
    """A part's memory is no longer read."""

    take: int
    file: int
    position: int


class Happened(Message):
    """An event, for this process's handlers."""

    name: str
    verb: str
    path: str
    fields: dict[str, Any]


class Finished(Message):
    """All files of a take are complete."""

    take: int
    files: list[FileResult]


class Failed(Message):
    """A take failed or was cancelled. Its files were deleted, and its memory is no longer read."""

    take: int
    kind: str
    """The name of a class in `snapshot.errors`."""
    text: str
    number: int | None = None
    """The `errno` of a storage error."""
    fields: dict[str, Any] = {}
    notes: list[str] = []
    trace: str = ""

    @classmethod
    def of(cls, take: int, error: BaseException) -> Failed:
        """Create the message for an error."""
        theirs = (each for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
        kind = next(theirs, SnapshotError)
        text = str(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
        held = vars(error) if isinstance(error, kind) else {}
        fields = {name: value for name, value in held.items() if _is_plain(value) and not name.startswith("__")}
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        number = error.errno if isinstance(error, OSError) else None
        trace = "".join(traceback.format_exception(error))
        return cls(take, kind.__name__, text, number, fields, notes, trace)

    def error(self) -> SnapshotError:
        """Return the error, with the other process's traceback as its cause."""
        kind: type[SnapshotError] = getattr(errors, self.kind)
        error = kind(self.text)
        for name, value in self.fields.items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        if isinstance(error, OSError):
            error.errno = self.number
        for note in self.notes:
            error.add_note(note)
        error.__cause__ = RemoteTrace(self.trace)
        return error


class RemoteTrace(Exception):
    """The cause of an error of the writer process: its text is the traceback there."""

    def __str__(self) -> str:
        return f"in the writer process:\n{super().__str__()}"


Received = Begin | Map | Unmap | Give | Cancel | Moved | Free | Happened | Finished | Failed
_encode = msgspec.msgpack.Encoder(enc_hook=str).encode


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list)


class MessageChannel:
    """One end of the socket. It belongs to the loop that opens it, and never blocks it."""

    def __init__(self, end: socket.socket, receive: Callable[[Received], object], ended: Callable[[], object]) -> None:
        end.setblocking(False)
        self._socket = end
        self._receive = receive
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in = bytearray()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self.descriptors: deque[int] = deque()
        """Received descriptors, for the messages that they belong to."""

    def open(self) -> bool:
        """Start receiving on the running loop, unless it has started. Return True if the peer is connected."""
        if self._loop is None and self._socket.fileno() >= 0:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._readable)
        return self._loop is not None

    def send(self, message: Received, descriptor: int | None = None) -> None:
        """Send a message as soon as the peer accepts it. Messages to a closed peer are dropped."""
        if self._loop is None:
            return
        data = _encode(message)
        waits = bool(self._out)
        self._out.append((memoryview(_LENGTH.pack(len(data)) + data), [] if descriptor is None else [descriptor]))
        if not waits:
            self._flush()
            if self._out and self._loop is not None:
                self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        try:
            while self._out:
                data, descriptors = self._out[0]
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
                if sent < len(data):
                    self._out[0] = (data[sent:], [])
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError:  # the peer has closed; its earlier messages are still to be read
            self._out.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _AT_ONCE, _DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self.descriptors.extend(descriptors)
        if not data:
            self.close()
            self._ended()
            return
        self._in += data
        at, have = 0, len(self._in)
        while have - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._in, at)[0]
            if end > have:
                break
            with memoryview(self._in) as view:
                message: Received = decode_msgpack(view[begin:end], Received, "a message of the writer process")
            at = end
            try:
                self._receive(message)
            except Exception:  # noqa: BLE001 - logged, and the end of the conversation
                log.exception("cannot decode a message of the writer process, or for it")
                self.close()
                self._ended()
                return
        del self._in[:at]

    def close(self) -> None:
        """Stop sending and receiving. Called on the loop that opened it."""
        self._out.clear()
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._loop = None
        self._socket.close()

    def forget(self) -> None:
        """Close it without a loop: before a loop had it, after that has ended, or in a forked child."""
        self._loop = None
        self._socket.close()

    @property
    def is_open(self) -> bool:
        """True if a loop has opened it."""
        return self._loop is not None
