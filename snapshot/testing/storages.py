"""Storages that record, fail, corrupt or stall: any storage, with taps on its operations."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from snapshot.io.registry import open_storage, register, unregister
from snapshot.io.storage import (
    ABSENT,
    ANYTHING,
    Buffer,
    Capabilities,
    Context,
    Expect,
    FileStat,
    FileWriter,
    Limits,
    Storage,
    map_exceptions,
)
from snapshot.io.url import URL
from snapshot.testing.conformance import aligned

# Taps on the operations of a storage: record, fail, damage or stall.


@dataclass(frozen=True, slots=True)
class StorageCall:
    """One call of a storage or a writer, before it runs."""

    name: str
    """`create`, and its writer's `write`, `finish` and `abort`; `read_into`, `put`, `get`, `stat`, `list`, `delete`,
    `commit`, `share`, `sweep`, `close`."""
    path: str
    """Path of the file; the prefix for `list` and `sweep`, the target for `commit` and `share`."""
    offset: int = 0
    nbytes: int = 0
    """Number of bytes; for `create` the declared size."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage to the bytes of an operation."""

    flip: int | None = None
    """Index of the bit to flip, from the first byte, modulo the length."""
    zero: int = 0
    """Number of bytes at the end set to zero, as if they never reached the disk."""
    truncate: int = 0
    """Number of bytes cut off the end."""

    def of(self, data: bytes) -> bytes:
        """Return the damaged bytes."""
        spoilt = bytearray(data)
        if self.flip is not None and spoilt:
            spoilt[self.flip // 8 % len(spoilt)] ^= 1 << self.flip % 8
        if self.zero:
            begin = max(0, len(spoilt) - self.zero)
            spoilt[begin:] = bytes(len(spoilt) - begin)
        return bytes(spoilt[: max(0, len(spoilt) - self.truncate)])


class Tap(ABC):
    """Receiver of every operation of its storages. It may be on several storages, and is called from any loop."""

    @abstractmethod
    async def before(self, operation: StorageCall) -> Damage | None:
        """Act before an operation runs: wait, raise, or return the damage to its bytes."""


class Log(Tap):
    """Records operations in order, whether they succeed or not."""

    def __init__(self) -> None:
        self.operations: list[StorageCall] = []

    async def before(self, operation: StorageCall) -> None:
        """Record the operation."""
        self.operations.append(operation)

    def of(self, name: str = "*", path: str = "*") -> list[StorageCall]:
        """Return the operations whose name and path match these globs."""
        return [each for each in list(self.operations) if _matches(each, name, path)]

    def nbytes(self, name: str, path: str = "*") -> int:
        """Return the number of bytes of those operations."""
        return sum(each.nbytes for each in self.of(name, path))

    def clear(self) -> None:
        """Forget all operations."""
        self.operations.clear()

    def __repr__(self) -> str:
        return f"Log({len(self.operations)} operations)"


class _Chosen(Tap):
    """Counts the matching operations, and chooses some of them."""

    def __init__(self, on: str = "*", path: str = "*", nth: int = 1, times: int | None = 1) -> None:
        self.on = on
        self.path = path
        self.nth = nth
        self.times = times
        self.met = 0
        """Number of matching operations so far."""
        self._counting = threading.Lock()

    @property
    def hits(self) -> int:
        """Number of chosen operations so far."""
        after = max(0, self.met - self.nth + 1)
        return after if self.times is None else min(after, self.times)

    def chooses(self, operation: StorageCall) -> bool:
        """Count an operation, and return True if it is chosen."""
        if not _matches(operation, self.on, self.path):
            return False
        with self._counting:
            before = self.hits
            self.met += 1
            return self.hits > before

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, path={self.path!r}, nth={self.nth}, {self.hits} hits)"


class Fault(_Chosen):
    """Makes the `nth` matching operation fail, and those after it: `times` in all, or all of them (None).

    `on` and `path` are globs (`*` crosses `/`). Either `error` is raised, or bytes are damaged: see `Damage`. Damage to
    a write, a put or a commit is stored, `finish` damages the whole file, and a read returns damaged bytes.
    """

    def __init__(
        self,
        on: str = "*",
        path: str = "*",
        nth: int = 1,
        times: int | None = 1,
        *,
        error: BaseException | None = None,
        flip: int | None = None,
        zero: int = 0,
        truncate: int = 0,
    ) -> None:
        super().__init__(on, path, nth, times)
        self.error = error
        self.damage = Damage(flip, zero, truncate)
        if (error is None) == (self.damage == Damage()):
            raise ValueError("a fault must have either an error or damage")
        if truncate and on not in ("finish", "put", "get", "commit"):
            raise ValueError(f"truncate needs on='finish', 'put', 'get' or 'commit', got {on!r}")

    async def before(self, operation: StorageCall) -> Damage | None:
        """Raise or damage, if the operation is chosen."""
        if not self.chooses(operation):
            return None
        if self.error is not None:
            raise self.error
        return self.damage


class Stall(_Chosen):
    """Makes the chosen operations wait until `release()` is called, or for `seconds`.

    A test calls `wait_reached()`, checks the state, and releases. After that nothing waits.
    """

    def __init__(
        self, on: str = "*", path: str = "*", nth: int = 1, times: int | None = 1, *, seconds: float | None = None
    ) -> None:
        super().__init__(on, path, nth, times)
        self.seconds = seconds
        self.reached = threading.Event()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._released = False
        self._lock = threading.Lock()

    async def before(self, operation: StorageCall) -> None:
        """Wait, if the operation is chosen."""
        if not self.chooses(operation):
            return
        here = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._released:
                return
            self._waiting.add(here)
        self.reached.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    await here[1].wait()
        finally:
            with self._lock:
                self._waiting.discard(here)

    def wait_reached(self, timeout: float = 30.0) -> None:
        """Wait until an operation waits here; raise TimeoutError if none does in time."""
        if not self.reached.wait(timeout):
            raise TimeoutError(f"{self} was not reached in {timeout} seconds")

    @property
    def waiting(self) -> int:
        """Number of operations that wait now."""
        return len(self._waiting)

    def release(self) -> None:
        """Resume all operations that wait here, and let later ones pass."""
        with self._lock:
            self._released = True
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)


def _matches(operation: StorageCall, name: str, path: str) -> bool:
    return fnmatchcase(operation.name, name) and fnmatchcase(operation.path, path)


# Storages that record, fail, corrupt or stall
#
# with recording() as log, faulty(on="write", path="data/*", nth=2, error=OSError(28, "No space left on device")):
# Snapshot.take("recording+faulty+file:///tmp/run", app_state)
#
# A name before a `+` in a URL's scheme is a tap; the rest of the URL is opened as usual. `TappedStorage(storage,
# tap)` taps an existing storage.


class TappedStorage(Storage):
    """Wrapper of another storage that passes every operation to taps before it runs.

    An exception raised by a tap is translated as in a plugin: an `OSError` becomes a StorageError.
    """

    def __init__(self, inner: Storage, *taps: Tap) -> None:
        super().__init__(inner.url, inner.options, inner.context)
        self.inner = inner
        self.taps = taps

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Capabilities of the inner storage, except that a tap may wait for a loop, as for a server."""
        return replace(self.inner.capabilities, blocking=False, local=False)

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """Limits of the inner storage."""
        return self.inner.limits

    async def tap(self, name: str, path: str, offset: int = 0, nbytes: int = 0) -> list[Damage]:
        """Pass an operation to the taps, and return the damage to its bytes."""
        operation = StorageCall(name, path, offset, nbytes)
        with map_exceptions(self.url.join(path)):
            return [damage for tap in self.taps if (damage := await tap.before(operation))]

    async def create(self, path: str, size: int) -> FileWriter:
        """Return a writer that is tapped, too."""
        await self.tap("create", path, 0, size)
        return _TappedWriter(self, path, await self.inner.create(path, size))

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read from the inner storage, and damage the result in place."""
        damages = await self.tap("read_into", path, offset, _nbytes(buffers))
        await self.inner.read_into(path, offset, buffers, token=token)
        if damages:
            spoilt, begin = _spoil(b"".join(buffers), damages), 0
            for view in (memoryview(buffer) for buffer in buffers):
                if view.nbytes:
                    view.cast("B")[:] = spoilt[begin : begin + view.nbytes]
                begin += view.nbytes

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        damages = await self.tap("put", path, 0, len(data))
        return await self.inner.put(path, _spoil(data, damages), expect=expect)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        damages = await self.tap("get", path)
        return _spoil(await self.inner.get(path, limit=limit), damages)

    async def stat(self, path: str) -> FileStat:
        await self.tap("stat", path)
        return await self.inner.stat(path)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        await self.tap("list", prefix)
        return await self.inner.list(prefix, recursive=recursive)

    async def delete(self, paths: Sequence[str]) -> None:
        """Report one operation for each path, all of them before the first file is deleted."""
        for path in paths:
            await self.tap("delete", path)
        await self.inner.delete(paths)

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        damages = await self.tap("commit", path, 0, len(data))
        return await self.inner.commit(claim, path, _spoil(data, damages), expect=expect)

    async def settle(self) -> None:
        await self.tap("settle", "")
        await self.inner.settle()

    async def drop_caches(self, paths: Sequence[str]) -> None:
        await self.inner.drop_caches(paths)

    def share_reads(self) -> None:
        self.inner.share_reads()

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        await self.tap("share", path)
        await self.inner.share(source, path, token=token)

    async def rename(self, source: str, path: str) -> None:
        await self.tap("rename", path)
        await self.inner.rename(source, path)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        await self.tap("sweep", prefix)
        return await self.inner.sweep(prefix, older_than)

    async def close(self) -> None:
        """Close the inner storage even if a tap fails here, so that a test of that leaks nothing."""
        try:
            await self.tap("close", "")
        finally:
            await self.inner.close()


class _TappedWriter(FileWriter):
    def __init__(self, storage: TappedStorage, path: str, inner: FileWriter) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        damages = await self._storage.tap("write", self._path, offset, _nbytes(buffers))
        if damages:
            buffers = [aligned(_spoil(b"".join(buffers), damages), self._storage.limits.alignment)]
        await self._inner.write(offset, buffers)

    async def finish(self) -> None:
        """Finish the file. To damage the whole file, rewrite it through the inner storage."""
        damages = await self._storage.tap("finish", self._path)
        await self._inner.finish()
        if damages:
            inner = self._storage.inner
            await inner.put(self._path, _spoil(await inner.get(self._path), damages))

    async def abort(self) -> None:
        """Abort the inner writer even if a tap fails here."""
        try:
            await self._storage.tap("abort", self._path)
        finally:
            await self._inner.abort()


def _nbytes(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _spoil(data: bytes, damages: Sequence[Damage]) -> bytes:
    for damage in damages:
        data = damage.of(data)
    return data


@contextmanager
def tapped(scheme: str, *taps: Tap) -> Iterator[None]:
    """Open `scheme+any://...` as `any://...` with these taps, within the context."""

    class Tapped(TappedStorage):
        """Storage that is opened by its URL, like a plugin."""

        def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
            inner = URL.parse(url.reveal().partition("+")[2])
            super().__init__(open_storage(inner, options, context), *taps)

    register(f"{scheme}+", Tapped)
    try:
        yield
    finally:
        unregister(f"{scheme}+")


@contextmanager
def recording(scheme: str = "recording") -> Iterator[Log]:
    """Log the operations of all storages opened as `recording+...`."""
    log = Log()
    with tapped(scheme, log):
        yield log


@contextmanager
def faulty(scheme: str = "faulty", *, must_happen: bool = True, **fault: Any) -> Iterator[Fault]:
    """Inject `Fault(**fault)` into all storages opened as `faulty+...`.

    A fault that never happens fails the test, unless `must_happen` is false: such a test would prove nothing.
    """
    tap = Fault(**fault)
    with tapped(scheme, tap):
        yield tap
    if must_happen and not tap.hits:
        raise AssertionError(f"{tap} never happened: {tap.met} operations matched")


@contextmanager
def stalling(scheme: str = "stalling", **stall: Any) -> Iterator[Stall]:
    """Inject `Stall(**stall)` into all storages opened as `stalling+...`; release it at the end, so no test hangs."""
    tap = Stall(**stall)
    with tapped(scheme, tap):
        try:
            yield tap
        finally:
            tap.release()
