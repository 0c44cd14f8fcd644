"""The private event loop: one thread for all I/O of a process, with a small pool for system calls and digests.

It is created on first use, and again in a forked child. The public API is synchronous: it submits coroutines and waits.
So it works in notebooks, in threads, and inside a running event loop.

It also works while the interpreter exits: in `atexit` handlers, and in threads that outlive the main thread. The
threads of the pool are daemons, unlike those of `concurrent.futures`, which end before that. If no thread can be
started any more, as in Python 3.12, the calling thread does the work.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import math
import threading
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from snapshot.errors import SnapshotError, system_limits
from snapshot.events import log
from snapshot.io.aio import Latch
from snapshot.io.registry import SharedClients
from snapshot.io.system import PerProcess
from snapshot.settings import Settings
from snapshot.text import counted

T = TypeVar("T")
LIBRARY = ("snapshot-io", "snapshot-loop")
"""The name prefix of the library's threads."""


_Task = tuple[Future[Any], Callable[[], Any]]


class _Pool(ThreadPoolExecutor):
    """Daemon threads for blocking calls. asyncio accepts only this class as a default executor.

    All threads are started at once: one that fails to start later would fail work that is already queued. With a
    count of 0, the calling thread does the work.
    """

    def __init__(self, count: int) -> None:
        super().__init__(max(1, count), thread_name_prefix="snapshot-io")
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        for number in range(count):
            worker = threading.Thread(target=self._serve, name=f"snapshot-io_{number}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        task = future, partial(function, *args, **kwargs)
        if self._workers:
            self._tasks.put(task)
        else:
            _perform(*task)
        return future

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            _perform(*task)
            del task  # a result must not be kept until the next task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers if wait else ():
            worker.join()


def _perform(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
        future.set_exception(error)
        del future  # its traceback refers to this frame
    else:
        future.set_result(result)


class _Loop:
    def __init__(self) -> None:
        with system_limits("cannot create the library's I/O loop"):
            self.loop = asyncio.new_event_loop()
        self.clients = SharedClients()
        self.thread: threading.Thread | None = threading.Thread(target=self._run, name="snapshot-loop", daemon=True)
        self.turn = threading.RLock()
        """Without a thread of its own, held by the thread that runs the loop."""
        pool: _Pool | None = None
        try:
            with system_limits("cannot start the threads of the library's I/O loop"):
                try:
                    pool = _Pool(Settings.current().thread_count())
                    self.thread.start()
                except RuntimeError:
                    if not is_exiting():
                        raise
                    pool, self.thread = _Pool(0), None
        except BaseException:
            if pool is not None:
                pool.shutdown(wait=False)
            self.loop.close()
            raise
        self.pool = pool
        self.loop.set_default_executor(pool)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run_until(self, work: LoopFuture[Any], timeout: float | None) -> None:
        """Run the loop in the calling thread until some work is over, if the loop has no thread."""
        if self.thread is not None:
            return
        end = math.inf if timeout is None else time.monotonic() + timeout
        if not self.turn.acquire(timeout=-1 if timeout is None else timeout):
            return
        outer = events._get_running_loop()  # noqa: SLF001 - the caller may be in a coroutine of the application
        try:
            events._set_running_loop(None)  # noqa: SLF001
            work.add_done_callback(lambda _: self.loop.stop())
            while (
                not work.done() and (left := end - time.monotonic()) > 0
            ):  # other work, which was given up, may stop it
                timer = self.loop.call_later(left, self.loop.stop) if left < math.inf else None
                self.loop.run_forever()
                if timer is not None:
                    timer.cancel()
        finally:
            events._set_running_loop(outer)  # noqa: SLF001
            self.turn.release()


_loop = PerProcess(_Loop)  # threads do not survive a fork: a child creates its own


def shared_clients() -> SharedClients:
    """Return the storage clients of this loop."""
    return _loop.get().clients


class LoopFuture(Future[T]):
    """Work on the loop, which any other thread can wait for.

    Unlike the futures of `run_coroutine_threadsafe`, a cancelled one is done only after its clean-up.
    """

    def __init__(self, work: Coroutine[Any, Any, T], made: _Loop) -> None:
        super().__init__()
        self._over = Latch()
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._made = made
        self._loop = made.loop
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._started = False

    def begin(self) -> None:
        """Start the work. It is created first, so that an interruption in between has something to cancel."""
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
        """Call the callbacks of finished work.

        Waiting threads take none of `Future`'s locks, which an interruption may leave held.
        """
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
        """Return True if the work is over."""
        return self._over.is_open()

    def cancelled(self) -> bool:
        """Return True if the work was cancelled and is over."""
        return self.done() and self._state == "CANCELLED_AND_NOTIFIED"

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work, and return or raise its result."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the work, and return its exception, or `CancelledError` if it was cancelled."""
        if not self.settled(timeout):
            raise TimeoutError
        if self.cancelled():
            raise concurrent.futures.CancelledError
        error: BaseException | None = self._exception
        return error

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until the work is over, however it ends. Return False after a timeout."""
        self._made.run_until(self, timeout)
        return self._over.wait(timeout)

    def add_done_callback(self, function: Callable[[Future[T]], object]) -> None:
        """Call a function with this future when the work is over, or at once if it is."""
        self._callbacks.append(function)
        if self.done():
            self._tell()

    def cancel(self) -> bool:
        """Request the end of the work. Return False if it has already ended."""
        if self.done():
            return False
        self._loop.call_soon_threadsafe(self._cancel)
        return True

    def _cancel(self) -> None:
        if self._task is not None and not self._started:  # it would end without its clean-up
            self._loop.call_soon(self._cancel)
        elif self._task is not None:
            self._task.cancel()
        elif not self.done():  # it was never started
            self._work.close()
            super().cancel()
            self.set_running_or_notify_cancel()
            self._tell()


def work_on(work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
    """Return work for the loop that has not been started."""
    return LoopFuture(work, _loop.get())


def start(work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
    """Start work on the loop."""
    future = work_on(work)
    future.begin()
    return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run work on the loop and wait for it. If the wait is interrupted, cancel the work and wait for its clean-up."""
    try:
        refuse_on_loop()
    except (RuntimeError, SnapshotError):
        work.close()
        raise
    future = LoopFuture(work, _loop.get())
    ends = ends_at_exit()
    try:
        if ends:
            _abandoned.get().add(future)
            expect_time()  # the exit may have begun meanwhile, and does not look again
        future.begin()
        return future.result()
    except BaseException as error:
        if not future.done():
            future.cancel()
            future.settled(60)
        if ends and isinstance(error, concurrent.futures.CancelledError):
            expect_time()
        raise
    finally:
        _abandoned.get().discard(future)


def refuse_on_loop() -> None:
    """Raise if this thread runs the loop, which would wait for itself, or if the exit of the interpreter ends it."""
    expect_time()
    made = _loop.made()
    if made is not None and threading.current_thread() is made.thread:
        raise RuntimeError("must not block on the library's own I/O loop, such as in a callback")


def works_here() -> bool:
    """Return True if the loop has no thread, so that nothing is done before the caller waits for it."""
    return _loop.get().thread is None


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work that may wait long for other ranks in a thread outside the small pool."""
    return await asyncio.shield(asyncio.wrap_future(start_in_thread(partial(work, *args), "snapshot-io-wait")))


def start_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start blocking work in a thread outside the small pool. It can be abandoned: nothing waits for it at the exit.

    If no thread can be started any more, since the interpreter exits, do the work here.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            future.set_exception(error)

    with system_limits("cannot start a thread"):
        try:
            threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError:
            if not is_exiting():
                raise
            call()
    return future


def can_start_threads() -> bool:
    """Return False if the interpreter exits, and starts no more threads and processes, as in Python 3.12."""
    if is_exiting():
        try:
            threading.Thread(target=int, name="snapshot-probe", daemon=True).start()
        except RuntimeError:
            return False
    return True


def end_threads() -> None:
    """End the idle threads of the loop. The next work starts new ones.

    No other thread may use the library meanwhile: its work would never be done. Raises RuntimeError if work is running.
    """
    made = _loop.made()
    if made is None or made.thread is None:
        return
    if threading.current_thread() is made.thread:
        raise RuntimeError("must not end the library's threads on its own I/O loop, such as in a callback")
    future = asyncio.run_coroutine_threadsafe(_close_idle(made), made.loop)
    if running := future.result():
        raise RuntimeError(f"the library's threads are still at work ({counted(running, 'task')}); wait for it first")
    _loop.reset()
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join()
    made.pool.shutdown()
    made.loop.close()


async def _close_idle(made: _Loop) -> int:
    """Close the clients if no task is running. Return the number of running tasks."""
    running = len(asyncio.all_tasks()) - 1
    if not running:
        await made.clients.close()
    return running


_unfinished: PerProcess[set[LoopFuture[Any]]] = PerProcess(set)
"""Background work that the interpreter waits for at exit."""


def finish_before_exit(future: LoopFuture[Any]) -> None:
    """Make the interpreter's exit wait for background work, instead of losing it. Wait here if it exits already."""
    if is_exiting():
        future.settled()
        return
    unfinished = _unfinished.get()
    unfinished.add(future)
    future.add_done_callback(unfinished.discard)


# The exit of the interpreter. When the main thread has ended, `threading` calls its exit functions, and waits for all
# threads that are not daemons. Then `atexit` calls its own. Daemons end at any later moment, in the midst of an
# operation. In C++, such as a copy of torch, that aborts the process. So work of daemons is cancelled first, and they
# leave the library.

_abandoned: PerProcess[set[LoopFuture[Any]]] = PerProcess(set)
"""The work that daemon threads of the application wait for."""


def is_exiting() -> bool:
    """Return True if the interpreter exits: the main thread has ended, or calls functions of `atexit`."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def ends_at_exit() -> bool:
    """Return True in a thread that ends while it works if the interpreter exits: a daemon of the application."""
    thread = threading.current_thread()
    if thread is threading.main_thread():  # also of a child that a daemon has forked
        return False
    return thread.daemon and not thread.name.startswith("snapshot-")


def expect_time() -> None:
    """Raise if the interpreter exits and does not wait for this thread."""
    if is_exiting() and ends_at_exit():
        raise SnapshotError(
            "cannot work in a daemon thread while the interpreter exits: it does not wait for such threads; save in "
            "another thread, or join this one before the program ends"
        )


LEAVES = 10.0
"""Seconds that the exit waits for daemons to leave the library. They may wait for other ranks."""
_at_work: PerProcess[set[Latch]] = PerProcess(set)
"""The latches that daemon threads of the application open when they leave the library."""


@contextmanager
def at_work() -> Iterator[None]:
    """Do the work of a call. The exit of the interpreter waits until a daemon has left it, which it does soon then.

    Raises as `refuse_on_loop`.
    """
    refuse_on_loop()
    if not ends_at_exit():
        yield
        return
    left, working = Latch(), _at_work.get()
    try:
        working.add(left)
        expect_time()  # the exit may have begun meanwhile, and does not look again
        yield
    finally:
        working.discard(left)
        left.open()


def before_exit(function: Callable[[], object]) -> None:
    """Call a function when the main thread has ended, before functions that were registered earlier."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the interpreter exits already
        register(function)


def _wait_at_exit() -> None:
    for work in list(_unfinished.get()):
        work.settled()
    abandoned = list(_abandoned.get())
    for work in abandoned:
        work.cancel()
    for work in abandoned:
        work.settled(60)
    end = time.monotonic() + LEAVES
    for left in list(_at_work.get()):
        left.wait(max(0.0, end - time.monotonic()))
    _close_clients()


def _close_clients() -> None:
    made = _loop.made()
    if made is None:
        return
    future = LoopFuture(made.clients.close(), made)
    future.begin()
    future.settled(5)


atexit.register(_close_clients)  # of saves while the interpreter exits
before_exit(_wait_at_exit)
