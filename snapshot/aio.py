"""Coroutines and threads: blocking work in the pool, coroutines without a loop, cleaning that cannot be cut off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")
_here = threading.local()


def inline() -> bool:
    """Whether this thread drives a coroutine without a loop."""
    return getattr(_here, "inline", False)


def run_inline(work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a coroutine to its end in this thread, without a loop: for calls of storages that are `blocking`."""
    _here.inline = True
    coroutine = work(*arguments)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        _here.inline = False
        coroutine.close()
    raise RuntimeError(f"{work} waits for a loop, and its storage says that it is blocking")


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that blocks in the loop's pool of threads.

    A cancellation waits for it: when this returns or raises, no thread uses the arguments any more. Otherwise a
    buffer that was given back, or a descriptor whose number was given anew, would still be written to.
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
    """Do work to its end, however often it is cancelled meanwhile: cleaning up half is worse than being late."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(BaseException):
            await asyncio.shield(task)
    return task.result()


async def gather_limited(items: Iterable[A], work: Callable[[A], Awaitable[T]], limit: int = 16) -> list[T]:
    """Do work for each item, for at most `limit` of them at once. Return the results in order."""
    free = asyncio.Semaphore(limit)

    async def one(item: A) -> T:
        async with free:
            return await work(item)

    return await asyncio.gather(*map(one, items))
