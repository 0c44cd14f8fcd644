"""The private event loop: one thread for all of a process's I/O, with a small pool for system calls and digests.

Made on first use, and made anew in a forked child. The public API is synchronous: it hands coroutines over and
waits, so it works in notebooks, in threads, and inside a running event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from snapshot.errors import system_limits
from snapshot.events import log
from snapshot.options import Settings
from snapshot.per_process import PerProcess
from snapshot.runtime.client_cache import SharedClients
from snapshot.runtime.latch import Latch

T = TypeVar("T")
LIBRARY = ("snapshot-io", "snapshot-loop")
"""How the names of the library's own threads begin."""


class _Loop:
    def __init__(self) -> None:
        with system_limits("the library's I/O loop cannot be made"):
            self.loop = asyncio.new_event_loop()
        count = Settings.current().thread_count()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="snapshot-io")
        self.clients = SharedClients()
        self.thread = threading.Thread(target=self._run, name="snapshot-loop", daemon=True)
        try:
            with system_limits("the threads of the library's I/O loop cannot be started"):
                _start_threads(self.pool, count)
                self.thread.start()
        except BaseException:
            self.pool.shutdown(wait=False)
            self.loop.close()
            raise
        self.loop.set_default_executor(self.pool)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start all threads of a pool now: one that could not be started later would fail work that is queued already."""
    ready = threading.Event()
    try:
        for _ in range(count):
            pool.submit(ready.wait)
    finally:
        ready.set()


_loop = PerProcess(_Loop)  # threads do not survive a fork: a child makes its own


def shared_clients() -> SharedClients:
    """Return the clients that storages share, as long as this loop runs."""
    return _loop.get().clients


class LoopFuture(Future[T]):
    """Work on the loop, to be waited for in any thread but the loop's own.

    Unlike the futures of `run_coroutine_threadsafe`, one that is cancelled is done only when its cleaning is.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._over = Latch()
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._started = False

    def begin(self) -> None:
        """Start it. Apart from making it, so that an interruption in between finds something to cancel."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._do())
        self._task.add_done_callback(self._end)

    async def _do(self) -> T:
        self._started = True
        return await self._work

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())
        self._tell()

    def _tell(self) -> None:
        """Call the callbacks of work that is over. Whoever waits takes none of the locks of `Future`, which an
        interruption may leave taken."""
        self._over.open()
        while self._callbacks:
            try:
                function = self._callbacks.pop(0)
            except IndexError:  # another thread calls it
                return
            try:
                function(self)
            except Exception:  # noqa: BLE001 - a callback's fault is its own
                log.exception("a done callback failed")

    def done(self) -> bool:
        """Whether it is over."""
        return self._over.is_open()

    def cancelled(self) -> bool:
        """Whether it was cancelled, and is over."""
        return self.done() and self._state == "CANCELLED_AND_NOTIFIED"

    def result(self, timeout: float | None = None) -> T:
        """Return what it returned or raised, when it is over."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what it raised, when it is over; `CancelledError` if it was cancelled."""
        if not self._over.wait(timeout):
            raise TimeoutError
        if self.cancelled():
            raise concurrent.futures.CancelledError
        error: BaseException | None = self._exception
        return error

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until it is over, however it ends; whether it is."""
        return self._over.wait(timeout)

    def add_done_callback(self, function: Callable[[Future[T]], object]) -> None:
        """Call a function with this when it is over; at once if it is."""
        self._callbacks.append(function)
        if self.done():
            self._tell()

    def cancel(self) -> bool:
        """Ask the work to end; whether it did not end before."""
        if self.done():
            return False
        self._loop.call_soon_threadsafe(self._cancel)
        return True

    def _cancel(self) -> None:
        if self._task is not None and not self._started:  # it would end without its cleaning
            self._loop.call_soon(self._cancel)
        elif self._task is not None:
            self._task.cancel()
        elif not self.done():  # it was never begun
            self._work.close()
            super().cancel()
            self.set_running_or_notify_cancel()
            self._tell()


def work_on(work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
    """Work for the loop, that is not begun."""
    return LoopFuture(work, _loop.get().loop)


def start(work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
    """Begin work on the loop."""
    future = work_on(work)
    future.begin()
    return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do work on the loop and wait for it. If the wait is interrupted, the work is cancelled and its cleaning waited
    for."""
    try:
        refuse_on_loop()
    except RuntimeError:
        work.close()
        raise
    future = LoopFuture(work, _loop.get().loop)
    try:
        future.begin()
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            future.settled(60)
        raise


def refuse_on_loop() -> None:
    """Raise where a wait for the loop would be a wait for itself."""
    if threading.current_thread() is _loop.get().thread:
        raise RuntimeError("a snapshot's blocking call was made on the library's own I/O loop (from a callback?)")


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Do blocking work that may wait for long, for other ranks: the pool's few threads are not for that."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            future.set_exception(error)

    with system_limits("a thread cannot be started"):
        threading.Thread(target=call, name="snapshot-io-wait", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(future))


_unfinished: PerProcess[set[LoopFuture[Any]]] = PerProcess(set)
"""Background work that the interpreter's exit waits for."""


def finish_before_exit(future: LoopFuture[Any]) -> None:
    """Let the interpreter's exit wait for background work, instead of losing it."""
    unfinished = _unfinished.get()
    unfinished.add(future)
    future.add_done_callback(unfinished.discard)


def _wait_at_exit() -> None:
    for work in list(_unfinished.get()):
        work.settled()
    made = _loop.made()
    if made is not None:
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(made.clients.close(), made.loop)], timeout=5)


# The pool refuses new work from `threading`'s own exit on, which comes before `atexit`: so wait there, where it can
# be done.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)
