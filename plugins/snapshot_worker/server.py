"""The writer process's side: writes from shared memory on request, until the parent exits.

It uses the writer of every other take; only its parts come from elsewhere. When its parent exits, it deletes incomplete
files and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import mmap
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial, reduce

import torch

from snapshot.events import Event, add_handler
from snapshot.io import registry
from snapshot.io.aio import shielded
from snapshot.io.budget import MemoryBudget, Pool
from snapshot.io.loop import cancel_all, run
from snapshot.io.session import Session
from snapshot.io.system import lower_priority
from snapshot.io.url import URL
from snapshot.plan.layout import FilePart, FilePlan, cut_file
from snapshot.save.compression import Packing
from snapshot.save.staging import Key, StagedAhead, StagedPart, key_of
from snapshot.save.writer import Writer, WrittenFile
from snapshot_worker.client import (
    Begin,
    Cancel,
    Failed,
    FileResult,
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

NICE = 10
PATIENCE = 60.0
"""Seconds for clean-up after the parent has exited."""
_LOWEST_BEST_EFFORT = 2 << 13 | 7


class Lent(StagedPart):
    """A part in the parent's memory."""

    __slots__ = ("_give_back",)

    def __init__(self, view: memoryview, give_back: Free, channel: MessageChannel) -> None:
        super().__init__([view], None, None)
        self._give_back: tuple[MessageChannel, Free] | None = (channel, give_back)

    def release(self) -> None:
        """Release the memory to the parent."""
        back, self._give_back = self._give_back, None
        super().release()
        if back is not None:
            back[0].send(back[1])


class RemoteParts(StagedAhead):
    """The parts of one take, which the parent stages, as they arrive."""

    def __init__(self, files: Sequence[FilePlan], part_bytes: Sequence[int]) -> None:
        """`part_bytes`: the size of each file's parts, as the parent splits it."""
        self._files = files
        self._parts = {id(file): cut_file(file, nbytes) for file, nbytes in zip(files, part_bytes, strict=True)}
        self._arrivals: dict[Key, asyncio.Future[StagedPart]] = {}
        self._error: BaseException | None = None

    def cut(self, file: FilePlan, nbytes: int) -> list[FilePart]:
        return self._parts[id(file)]

    def _arrival(self, file: FilePlan, part: FilePart) -> asyncio.Future[StagedPart]:
        key = key_of(file, part)
        if key not in self._arrivals:
            self._arrivals[key] = asyncio.get_running_loop().create_future()
        return self._arrivals[key]

    def arrived(self, number: int, position: int, part: StagedPart) -> None:
        """Deliver a part, by the number of its file and its position in it."""
        if self._error is None:
            file = self._files[number]
            waited = self._arrival(file, self._parts[id(file)][position])
            if not waited.done():  # otherwise the waiting task was cancelled
                waited.set_result(part)

    async def ready(self, file: FilePlan, part: FilePart) -> None:
        if self._error is not None:
            raise self._error
        await self._arrival(file, part)

    def take(self, file: FilePlan, part: FilePart) -> StagedPart:
        return self._arrivals.pop(key_of(file, part)).result()

    def stop(self, error: BaseException) -> None:
        """Stop: waiting tasks are cancelled, and later parts are ignored."""
        self._error = self._error or error
        for waited in self._arrivals.values():
            waited.cancel()  # does nothing if the part has arrived

    def release(self) -> None:
        """Forget the parts: unwritten ones belong to the parent."""
        self._arrivals.clear()


class WriterServer:
    """Serves all concurrent takes of one parent."""

    def __init__(self, end: socket.socket) -> None:
        self._ended = asyncio.Event()
        self._channel = MessageChannel(end, self._received, self._ended.set)
        self._segments: dict[int, mmap.mmap] = {}
        self._takes: dict[int, tuple[asyncio.Task[list[WrittenFile]], RemoteParts]] = {}

    async def serve(self) -> None:
        """Serve until the parent exits; then cancel all takes."""
        loop = asyncio.get_running_loop()

        def happened(event: Event) -> None:
            message = Happened(event.name, event.verb, event.path, event.fields)
            loop.call_soon_threadsafe(self._channel.send, message)

        add_handler(happened)
        self._channel.open()
        await self._ended.wait()
        async with asyncio.timeout(PATIENCE):
            await cancel_all([task for task, _ in self._takes.values()])

    def _received(self, message: Received) -> None:
        match message:
            case Begin():
                try:
                    files = [lane.file() for lane in message.lanes]
                    arrivals = RemoteParts(files, [lane.part_bytes for lane in message.lanes])
                except Exception as error:  # noqa: BLE001 - it is that of one take
                    self._channel.send(Failed.of(message.take, error))
                    return
                task = asyncio.create_task(self._write(message, files, arrivals))
                self._takes[message.take] = (task, arrivals)
                task.add_done_callback(partial(self._answer, message.take))
            case Map():
                descriptor = self._channel.descriptors.popleft()
                self._segments[message.segment] = mmap.mmap(descriptor, message.size)
                os.close(descriptor)
            case Unmap():
                self._segments.pop(message.segment, None)
            case Give() if message.take in self._takes:
                view = memoryview(self._segments[message.segment])[message.offset : message.offset + message.nbytes]
                part = Lent(view, Free(message.take, message.file, message.position), self._channel)
                self._takes[message.take][1].arrived(message.file, message.position, part)
            case Cancel() if message.take in self._takes:
                task, arrivals = self._takes[message.take]
                arrivals.stop(asyncio.CancelledError())  # also stops a task that could not be cancelled just now
                task.cancel()

    def _answer(self, take: int, task: asyncio.Task[list[WrittenFile]]) -> None:
        del self._takes[take]
        error = asyncio.CancelledError("the take was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self._channel.send(Finished(take, [_result(each) for each in task.result()]))
        else:
            self._channel.send(Failed.of(take, error))

    async def _write(self, begin: Begin, files: Sequence[FilePlan], arrivals: RemoteParts) -> list[WrittenFile]:
        _imitate_parent(begin)
        options = pickle.loads(begin.options)  # noqa: S301 - the parent's own
        session = Session(URL.parse(begin.url), options, durable=begin.durable, budget=begin.budget)
        try:

            def progress(nbytes: int) -> None:
                self._channel.send(Moved(begin.take, nbytes))

            packing = None
            if begin.packing:
                layouts = {id(file): (lane.begin, lane.ranges()) for file, lane in zip(files, begin.lanes, strict=True)}
                memory = MemoryBudget(begin.packing, Pool(begin.packing, reserve=False))
                packing = Packing(memory, lambda file: layouts[id(file)])
            writer = Writer(session.storage, arrivals, session.budget, progress, packing=packing, signed=begin.signed)
            written = await writer.write(files, [lane.location for lane in begin.lanes])
            await session.storage.settle()
            return written
        finally:
            await shielded(session.close())


def _result(written: WrittenFile) -> FileResult:
    packed = written.packed
    stored = None if packed is None else (packed.size, packed.table, packed.digest)
    tree = None if written.tree is None else (written.tree.size, written.tree.leaves)
    return written.digests, written.tables, stored, tree


def _imitate_parent(begin: Begin) -> None:
    """Use the parent's current environment and plugins."""
    theirs = dict(begin.environment)
    for name in os.environb.keys() - theirs.keys():
        del os.environb[name]
    for name, value in theirs.items():
        if os.environb.get(name) != value:
            os.environb[name] = value
    if begin.umask >= 0:
        os.umask(begin.umask)
    sys.path[:] = map(os.fsdecode, begin.path)
    for scheme in list(registry.registered()):
        registry.unregister(scheme)
    for scheme, module, qualified in begin.plugins:
        registry.register(scheme, reduce(getattr, qualified.split("."), importlib.import_module(module)))  # type: ignore[arg-type]


def main(descriptor: int) -> None:
    """Run a writer process until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(NICE, _LOWEST_BEST_EFFORT)
    torch.set_num_threads(1)

    async def serve() -> None:
        await WriterServer(socket.socket(fileno=descriptor)).serve()

    with contextlib.suppress(TimeoutError):
        run(serve())
        return
    os._exit(1)  # a task hangs, and no process waits for it
