"""Blocking calls in threads that can be abandoned, since a client may hang forever.

Such a thread never gets the caller's memory, since it may use it at any later time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from snapshot.plugins.network.retry import Attempt, TransientError

S = TypeVar("S")
T = TypeVar("T")
LAST_WORDS = 5.0
"""Maximum seconds to close a connection."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[Any], Any]
    attempt: Attempt | None
    future: Future[Any] = field(default_factory=Future)
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Lock that a thread takes to run the job, or the caller to withdraw it."""
    over: bool = False
    """True if the job has run. The future does not show it: a cancelled caller cancels the future."""

    def end(self, result: Any, error: BaseException | None = None) -> None:
        self.over = True
        with contextlib.suppress(InvalidStateError):  # the caller was cancelled
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class Lane(Generic[S]):
    """A file system and the threads that call it, used on the loop that created it.

    The threads are daemons and do not belong to an executor, since the interpreter would wait for those at its exit.
    """

    def __init__(self, make: Callable[[], S], close: Callable[[S], None], threads: int) -> None:
        self._make = make
        self._close = close
        self._threads = threads
        self._started = 0
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._system: S | None = None
        self._making = threading.Lock()
        self._jobs: dict[_Job, None] = {}
        self._closing: _Job | None = None
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()

    @property
    def usable(self) -> bool:
        """True if the lane accepts calls: not after `retire`, in a forked child, or on another loop."""
        return self._closing is None and self._process == os.getpid() and self._loop is asyncio.get_running_loop()

    async def call(self, work: Callable[[S], T], attempt: Attempt | None = None) -> T:
        """Call the file system in one of the threads. A cancellation during the call retires the lane."""
        if not self.usable:
            raise TransientError("the connection was abandoned", refused=True)
        job = _Job(work, attempt)
        self._jobs[job] = None
        if self._started < self._threads:
            self._started += 1
            threading.Thread(target=self._run, name="snapshot-fsspec", daemon=True).start()
        self._queue.put(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            if not job.turn.acquire(blocking=False) and not job.over:
                self.retire()
            raise
        finally:
            self._jobs.pop(job, None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.turn.acquire(blocking=False):
                self._do_job(job)
            del job  # otherwise its bytes stay alive until the next job

    def _do_job(self, job: _Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._restart_clocks, job)
        try:
            if job is self._closing:
                system, self._system = self._system, None
                result = self._close(system) if system is not None else None
            else:
                result = job.work(self._get_system())
        except asyncio.CancelledError as error:  # raised by the client itself
            job.end(None, ConnectionError(f"{type(error).__name__} in the client"))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            job.end(None, error)
        else:
            job.end(result)

    def _get_system(self) -> S:
        with self._making:
            if self._system is None:
                self._system = self._make()
            return self._system

    def _restart_clocks(self, job: _Job) -> None:
        """Restart the time-outs of a starting job, and of the jobs queued behind it."""
        for each in self._jobs:
            if each.attempt is not None and (each is job or not each.turn.locked()):
                each.attempt.progress()

    def retire(self) -> None:
        """Accept no more calls. Refuse the queued ones, let the running ones end, and then close the file system."""
        if self._closing is not None:
            return
        self._closing = closing = _Job(lambda _: None, None)
        for job in self._jobs:
            if job.turn.acquire(blocking=False):
                job.end(None, TransientError("the connection was abandoned", refused=True))
        self._queue.put(closing)
        for _ in range(self._started):
            self._queue.put(None)

    async def close(self) -> None:
        """Retire the lane, and wait some seconds until it is closed."""
        self.retire()
        if self._started and self._closing is not None and self._process == os.getpid():
            with contextlib.suppress(Exception):  # a connection that cannot be closed is abandoned
                await asyncio.wait_for(asyncio.wrap_future(self._closing.future), LAST_WORDS)


class Mount(Generic[S]):
    """The current lane of a file system, replaced after it was retired."""

    def __init__(self, make: Callable[[], S], close: Callable[[S], None], threads: int) -> None:
        self._how = make, close, threads
        self._lane: Lane[S] | None = None

    def lane(self) -> Lane[S]:
        """Return a usable lane."""
        if self._lane is None or not self._lane.usable:
            self._lane = Lane(*self._how)
        return self._lane

    async def close(self) -> None:
        """Close the file system, and end its threads."""
        lane, self._lane = self._lane, None
        if lane is not None:
            await lane.close()
