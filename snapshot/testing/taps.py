"""Taps on the operations of a storage: record, fail, damage or stall."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Operation:
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
    async def before(self, operation: Operation) -> Damage | None:
        """Act before an operation runs: wait, raise, or return the damage to its bytes."""


class Log(Tap):
    """Records operations in order, whether they succeed or not."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    async def before(self, operation: Operation) -> None:
        """Record the operation."""
        self.operations.append(operation)

    def of(self, name: str = "*", path: str = "*") -> list[Operation]:
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

    def chooses(self, operation: Operation) -> bool:
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

    async def before(self, operation: Operation) -> Damage | None:
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

    async def before(self, operation: Operation) -> None:
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


def _matches(operation: Operation, name: str, path: str) -> bool:
    return fnmatchcase(operation.name, name) and fnmatchcase(operation.path, path)
