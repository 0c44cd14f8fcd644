"""The writer process from its parent: the protocol, and the staged parts that it writes."""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import itertools
import json
import os
import pickle
import pickletools
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from typing import Any

import msgspec

import snapshot
import snapshot_worker
from snapshot import errors
from snapshot.decoding import decode_msgpack
from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.io import registry
from snapshot.io.aio import shielded
from snapshot.io.arena import Segment
from snapshot.io.loop import cancel_all, in_own_thread
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.system import PerProcess, expect_linux
from snapshot.io.url import URL
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.save.compression import Packing
from snapshot.save.staging import PartSource, StagedPart
from snapshot.save.writer import Progress, WrittenFile
from snapshot.tensors.digest import FileTree
from snapshot.tensors.packed_files import PackedResult
from snapshot.text import counted

# The protocol between a process and its writer process: short, ordered messages over a socket, with descriptors.
#
# Tensor bytes are never sent: they are in shared segments, and messages contain their location.

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


# The writer process: digests and writes the staged parts of an asynchronous take, outside the training process's GIL.
#
# This module runs in the process that takes snapshots. It sends the location of each part in shared segments, and
# reuses the memory when the writer process releases it. A writer process is a fresh interpreter, started on first use
# and kept for later takes. It ends when its socket is closed.

PATIENCE = 60.0
"""Seconds that the writer process may spend cleaning up a cancelled take before it is killed."""
LAST_WORDS = 10.0
"""Seconds in which a killed process should exit."""

_BOOT = """
import importlib.util, json, os, sys
os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))
descriptor, sys.path[:], where = json.loads(sys.argv[1])
for name, origin in where.items():
    found = importlib.util.find_spec(name)
    if found is None or found.origin != origin:
        sys.path.insert(0, os.path.dirname(os.path.dirname(origin)))
from snapshot_worker.server import main
main(descriptor)
"""
"""The program of the fresh interpreter: nothing of the user's `__main__`, and the same library as here."""


class _Take:
    """A take that the writer process writes."""

    def __init__(self, number: int, progress: Progress) -> None:
        self.number = number
        self.progress = progress
        self.lent: dict[tuple[int, int], StagedPart] = {}
        """Parts that the writer process may be reading."""
        self.ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def end(self, result: Finished | Exception) -> None:
        """End a take, which has ended in the writer process. Its memory may be reused."""
        if not self.ended.done():
            if isinstance(result, Exception):
                self.ended.set_exception(result)
            else:
                self.ended.set_result(result)

    def take_back(self) -> None:
        """Release all parts that are lent."""
        lent, self.lent = self.lent, {}
        for staged in lent.values():
            staged.release()


class WriterProcess:
    """A process that writes for this one. Any thread may create it; everything else runs on the library's loop."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            packages = {each.__name__: each.__file__ for each in (snapshot, snapshot_worker)}
            where = [theirs.fileno(), _import_path(), packages]
            try:
                # It gets its own session: Ctrl-C reaches the whole foreground group, and must not reach a process that
                # cleans up.
                self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
                    [os.fsdecode(spawn.get_executable()), "-P", "-c", _BOOT, json.dumps(where)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._channel = MessageChannel(ours, self._received, self._closed)
        self._numbers = itertools.count(1)
        self._takes: dict[int, _Take] = {}
        self._shown: dict[int, weakref.ref[Segment]] = {}
        """The segments that it maps. A mapping here holds a descriptor, so `release_memory` must find no reference."""
        self._end: SnapshotError | None = None
        self._burial: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process runs, as far as is known."""
        return self._end is None and self._burial is None and self._process.poll() is None

    async def write(
        self,
        session: Session,
        files: Sequence[FilePlan],
        locations: Sequence[str],
        source: PartSource,
        *,
        parts: Sequence[Sequence[FilePart]],
        progress: Progress,
        packing: Packing | None = None,
        signed: bool = False,
    ) -> list[WrittenFile]:
        """Write all files from parts that are staged ahead, as `Writer.write` does. If one fails, delete them all."""
        if not self._channel.open() and self._burial is None:
            self._closed()
        take = _Take(next(self._numbers), progress)
        pumps: list[asyncio.Task[None]] = []
        try:
            if self._end is not None:
                raise SnapshotError(*self._end.args)
            lanes = [
                FileLane.of(file, location, cut, packing.kinds(file) if packing is not None else b"")
                for file, location, cut in zip(files, locations, parts, strict=True)
            ]
            self._channel.send(
                Begin(
                    take.number,
                    session.url.reveal(),
                    pickle.dumps(dict(session.options or {})),
                    session.durable,
                    session.budget.total,
                    lanes,
                    _registered_plugins(),
                    list(os.environb.items()),
                    list(map(os.fsencode, _import_path())),
                    _read_umask(),
                    packing.memory.limit if packing is not None else 0,
                    signed,
                )
            )
            self._takes[take.number] = take
            pumps = [
                asyncio.create_task(self._pump(take, number, file, cut, source))
                for number, (file, cut) in enumerate(zip(files, parts, strict=True))
            ]
            under_way: list[asyncio.Future[Any]] = [take.ended, *pumps]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
            if not take.ended.done():
                for pump in pumps:
                    if pump.done():
                        pump.result()
            finished = await asyncio.shield(take.ended)
            take.take_back()
        except BaseException as error:
            source.stop(error)
            await shielded(self._give_up(take, pumps))
            raise
        finally:
            self._takes.pop(take.number, None)
            source.release()
        return [
            WrittenFile(file, at, digests, tables, None, packed and PackedResult(*packed), tree and FileTree(*tree))
            for file, at, (digests, tables, packed, tree) in zip(files, locations, finished.files, strict=True)
        ]

    async def _pump(
        self, take: _Take, number: int, file: FilePlan, parts: Sequence[FilePart], source: PartSource
    ) -> None:
        """Send a file's parts in order, as they are staged."""
        for position, part in enumerate(parts):
            try:
                await source.ready(file, part)
                staged = await source.fetch(file, part, None)
            except (KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The error is from the staging thread: here it would end the loop, or look like a cancellation of this
                # task.
                raise SnapshotError(f"staging was interrupted: {error!r}") from error
            assert staged.held is not None
            slot = staged.held.slot
            assert slot.segment is not None
            take.lent[number, position] = staged
            self._show(slot.segment)
            nbytes = len(staged.buffers[0])
            self._channel.send(Give(take.number, number, position, slot.segment.number, slot.offset, nbytes))

    def _show(self, segment: Segment) -> None:
        """Map a segment in the writer process, and unmap closed segments."""
        for number in [number for number, each in self._shown.items() if (held := each()) is None or held.closed]:
            del self._shown[number]
            self._channel.send(Unmap(number))
        if segment.number not in self._shown:
            self._shown[segment.number] = weakref.ref(segment)
            self._channel.send(Map(segment.number, segment.size), segment.descriptor)

    async def _give_up(self, take: _Take, pumps: Sequence[asyncio.Task[None]]) -> None:
        """Make the writer process delete the files of a take and stop using its memory."""
        await cancel_all(pumps)
        if take.number in self._takes and not take.ended.done():
            self._channel.send(Cancel(take.number))
            await asyncio.wait([take.ended], timeout=PATIENCE)
            if not take.ended.done():
                log.warning("the writer process did not cancel a take in %s s, and is killed", PATIENCE)
                self._process.kill()
                await asyncio.wait([take.ended], timeout=LAST_WORDS)
        if take.ended.done():
            take.ended.exception()  # already raised, or a result of the raised error
            take.take_back()
        elif take.lent:
            log.warning("cannot end the writer process; its shared memory is not reused")

    # Messages

    def _received(self, message: Received) -> None:
        match message:
            case Moved() if message.take in self._takes:
                self._takes[message.take].progress(message.nbytes)
            case Free() if message.take in self._takes:
                self._takes[message.take].lent.pop((message.file, message.position)).release()
            case Happened():
                emit(message.name, message.verb, message.path, **message.fields)
            case Finished() if message.take in self._takes:
                self._takes[message.take].end(message)
            case Failed() if message.take in self._takes:
                self._takes[message.take].end(message.error())

    def _closed(self) -> None:
        self._burial = asyncio.ensure_future(self._bury())

    async def _bury(self) -> None:
        """Fail all takes of the process once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        status = await in_own_thread(self._process.wait)
        self._end = SnapshotError(
            f"the writer process ended with {_exit_text(status)}: the take was aborted, and the next one "
            "starts a new process"
        )
        for take in list(self._takes.values()):
            take.end(
                SnapshotError(*self._end.args)
            )  # a new error per take: an error keeps its traceback's frames alive

    # Exit

    def leave(self) -> None:
        """Replace the process: its pending takes end on the loop."""
        if not self._channel.is_open:
            self._channel.forget()

    def finish(self) -> None:
        """End the process at this process's exit, when nothing is pending."""
        self._channel.forget()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)

    def forget(self) -> None:
        """Forget the process in a forked child: it belongs to the parent."""
        self._channel.forget()
        self._process.returncode = 0  # the parent waits for it; suppress the warning here

    def __repr__(self) -> str:
        return f"WriterProcess({self.pid}, {counted(len(self._takes), 'take')}{'' if self.alive else ', ended'})"


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    return f"signal {name}" + (" (was there too little memory?)" if status == -signal.SIGKILL else "")


class _Place:
    """The writer process of this process, if it was started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current: WriterProcess | None = None

    def running(self) -> WriterProcess:
        with self._lock:
            if self.current is None or not self.current.alive:
                if self.current is not None:
                    self.current.leave()
                try:
                    self.current = WriterProcess()
                except OSError as error:
                    raise SnapshotError(f"cannot start the writer process: {error}") from error
            return self.current

    def forked(self) -> None:
        """Forget the process in a forked child, and close its socket, which would hide the parent's exit."""
        if self.current is not None:
            self.current.forget()


_place = PerProcess(_Place, _Place.forked)


def writer_process() -> WriterProcess:
    """Return this process's writer process; start it in the background if there is none."""
    return _place.get().running()


class Process:
    """For `worker="process"`: this process's writer process."""

    def check(self) -> None:
        """Raise on another system than Linux."""
        expect_linux("worker='process'")

    def start(self, url: URL, options: Mapping[str, Any] | None) -> WriterProcess:
        """Return the writer process for a take. Raise `ValueError` if it cannot write there."""
        expect_reachable(url, options)
        return writer_process()


PROCESS = Process()


def _at_exit() -> None:
    place = _place.made()
    if place is not None and place.current is not None:
        place.current.finish()


atexit.register(_at_exit)


# Limits


def expect_reachable(url: URL, options: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for a storage that another process cannot write to, or options that cannot be sent to it."""
    if "memory" in re.split(r"\+|::", url.scheme):
        raise ValueError(f"{url}: is in this process's memory, which a writer process cannot access; {_THREAD}")
    for scheme in _schemes_of(url):
        plugin = registry.registered().get(scheme)
        if plugin is not None and not _is_importable(plugin):
            raise ValueError(
                f"{url}: {plugin.__module__}.{plugin.__qualname__} was registered in this process, but a writer "
                f"process cannot import it; {_THREAD}"
            )
    try:
        url.reveal().encode()
        data = pickle.dumps(dict(options or {}))
    except UnicodeEncodeError as error:
        raise ValueError(f"{url}: cannot be sent to the writer process: {error}; {_THREAD}") from error
    except Exception as error:
        raise ValueError(f"{url}: cannot pickle storage_options for the writer process: {error}; {_THREAD}") from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(data)):
        raise ValueError(
            f"{url}: storage_options must not use objects of __main__, which the writer does not import; {_THREAD}"
        )


_THREAD = 'use worker="thread"'


def _schemes_of(url: URL) -> list[str]:
    """Return the schemes under which a URL's plugins may be registered."""
    names = url.scheme.split("+")
    inner = ["+".join(names[at:]) for at in range(len(names))]
    return [*inner, *(f"{name}+" for name in names)]


def _is_importable(plugin: type[Storage]) -> bool:
    module = sys.modules.get(plugin.__module__)
    if module is None or plugin.__module__ == "__main__" or "<locals>" in plugin.__qualname__:
        return False
    found: Any = module
    for name in plugin.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is plugin


def _import_path() -> list[str]:
    return [path or os.getcwd() for path in sys.path if isinstance(path, str)]


def _registered_plugins() -> list[tuple[str, str, str]]:
    return [
        (scheme, plugin.__module__, plugin.__qualname__)
        for scheme, plugin in registry.registered().items()
        if _is_importable(plugin)
    ]


def _read_umask() -> int:
    """Return this process's umask without changing it, which would affect all threads."""
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return -1
