"""Coroutines and threads: blocking work in the pool, coroutines without a loop, clean-up that is never interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")
_here = threading.local()


def inline() -> bool:
    """Return True if this thread drives a coroutine without a loop."""
    return getattr(_here, "inline", False)


def run_inline(work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a coroutine in this thread without a loop: for calls to `blocking` storages."""
    _here.inline = True
    coroutine = work(*arguments)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        _here.inline = False
        coroutine.close()
    raise RuntimeError(f"{work} must not wait for an event loop, since its storage is declared blocking")


def pop_first(queue: deque[T]) -> T | None:
    """Remove and return the first item of a queue that several threads empty; None if it is empty.

    They cannot share an iterator: without the GIL, two threads may get the same item.
    """
    try:
        return queue.popleft()
    except IndexError:
        return None


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function in the loop's thread pool.

    A cancellation waits for the function. When this call returns or raises, no thread uses the arguments any more.
    Otherwise a thread could still write to a released buffer or a reused descriptor.
    """
    if inline():
        return function(*arguments)
    future = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(BaseException):
                await asyncio.shield(future)
        raise


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if it is cancelled meanwhile: partial clean-up is worse than a delay."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(BaseException):
            await asyncio.shield(task)
    return task.result()


async def gather_limited(items: Iterable[A], work: Callable[[A], Awaitable[T]], limit: int = 16) -> list[T]:
    """Process items concurrently, at most `limit` at a time. Return the results in order.

    After an error, the others are cancelled. When it is raised, none of them runs any more.
    """
    free = asyncio.Semaphore(limit)

    async def one(item: A) -> T:
        async with free:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await shielded(_await_all(tasks))
        raise


async def _await_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
