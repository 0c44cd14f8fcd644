"""The writer process: digests and writes the staged parts of an asynchronous take, outside the training process's GIL.

This module runs in the process that takes snapshots. It sends the location of each part in shared segments, and reuses
the memory when the writer process releases it. A writer process is a fresh interpreter, started on first use and kept
for later takes. It ends when its socket is closed.
"""

from __future__ import annotations

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
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from snapshot import registry
from snapshot.aio import shielded
from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.per_process import PerProcess
from snapshot.plan.layout import FilePart, FilePlan
from snapshot.runtime.loop import cancel_all, in_own_thread
from snapshot.runtime.segment import Segment
from snapshot.runtime.session import Session
from snapshot.save.packing import PackedResult, Packing
from snapshot.save.staging import StagedPart
from snapshot.save.writer import Progress, StagedParts, WrittenFile
from snapshot.signing.tree import FileTree
from snapshot.storage import Storage
from snapshot.text import counted
from snapshot.url import URL
from snapshot.worker.protocol import (
    Begin,
    Cancel,
    Failed,
    FileLane,
    Finished,
    Free,
    Give,
    Happened,
    Map,
    MessageChannel,
    Moved,
    Received,
    Unmap,
)

PATIENCE = 60.0
"""Seconds that the writer process may spend cleaning up a cancelled take before it is killed."""
LAST_WORDS = 10.0
"""Seconds in which a killed process should exit."""

_BOOT = """
import importlib.util, json, os, sys
os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))
descriptor, sys.path[:], where = json.loads(sys.argv[1])
found = importlib.util.find_spec("snapshot")
if found is None or found.origin != where:
    sys.path.insert(0, os.path.dirname(os.path.dirname(where)))
from snapshot.worker.server import main
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
            where = [theirs.fileno(), _import_path(), str(Path(__file__).parents[1] / "__init__.py")]
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
        self._shown: dict[int, Segment] = {}
        self._end: SnapshotError | None = None
        self._burial: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
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
        parts: Sequence[Sequence[FilePart]],
        *,
        staging: StagedParts,
        progress: Progress,
        packing: Packing | None = None,
        signed: bool = False,
    ) -> list[WrittenFile]:
        """Write all files from staged parts, as `Writer.write` does. If one fails, delete all of them."""
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
                asyncio.create_task(self._pump(take, number, len(cut), staging)) for number, cut in enumerate(parts)
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
            staging.stop(error)
            await shielded(self._give_up(take, pumps))
            raise
        finally:
            self._takes.pop(take.number, None)
            staging.release()
        return [
            WrittenFile(file, at, digests, tables, None, packed and PackedResult(*packed), tree and FileTree(*tree))
            for file, at, (digests, tables, packed, tree) in zip(files, locations, finished.files, strict=True)
        ]

    async def _pump(self, take: _Take, file: int, count: int, staging: StagedParts) -> None:
        """Send a file's parts in order, as they are staged."""
        for position in range(count):
            try:
                staged = await staging.get(file, position)
            except (KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The error is from the staging thread: here it would end the loop, or look like a cancellation of this
                # task.
                raise SnapshotError(f"staging was interrupted: {error!r}") from error
            slot = staged.slot
            assert slot is not None
            assert slot.segment is not None
            take.lent[file, position] = staged
            self._show(slot.segment)
            nbytes = len(staged.buffers[0])
            self._channel.send(Give(take.number, file, position, slot.segment.number, slot.offset, nbytes))

    def _show(self, segment: Segment) -> None:
        """Map a segment in the writer process, and unmap closed segments."""
        for number in [number for number, each in self._shown.items() if each.closed]:
            del self._shown[number]
            self._channel.send(Unmap(number))
        if segment.number not in self._shown:
            self._shown[segment.number] = segment
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
