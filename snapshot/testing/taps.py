"""What taps see of a storage's operations, and what they do about them: note, fail, damage, wait."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a storage or a writer, before it is done."""

    name: str
    """`create`, and its writer's `write`, `finish` and `abort`; `read_into`, `put`, `get`, `stat`, `list`, `delete`,
    `commit`, `copy`, `sweep`, `close`."""
    path: str
    """Of the file; the prefix for `list` and `sweep`, the target for `commit` and `copy`."""
    offset: int = 0
    nbytes: int = 0
    """How many bytes it is about: of a `create`, the size that was declared."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What happens to the bytes of an operation."""

    flip: int | None = None
    """This bit is turned over, counted from the first byte on, and around the end."""
    zero: int = 0
    """So many bytes at the end are zeros: they never reached the disk."""
    truncate: int = 0
    """So many bytes at the end are gone."""

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
    """Meets every operation of the storages that it is on; may be on several, and called from any loop."""

    @abstractmethod
    async def before(self, operation: Operation) -> Damage | None:
        """Act before an operation is done: wait, raise, or say how the bytes are to be damaged."""


class Log(Tap):
    """Notes what was asked for, in its order, whether it succeeded or not."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    async def before(self, operation: Operation) -> None:
        """Note it."""
        self.operations.append(operation)

    def of(self, name: str = "*", path: str = "*") -> list[Operation]:
        """Return the operations whose name and path match these globs."""
        return [each for each in list(self.operations) if _matches(each, name, path)]

    def nbytes(self, name: str, path: str = "*") -> int:
        """How many bytes those operations were about."""
        return sum(each.nbytes for each in self.of(name, path))

    def clear(self) -> None:
        """Forget all of it."""
        self.operations.clear()

    def __repr__(self) -> str:
        return f"Log({len(self.operations)} operations)"


class _Chosen(Tap):
    """Counts the operations that match, and chooses some of them."""

    def __init__(self, on: str = "*", path: str = "*", nth: int = 1, times: int | None = 1) -> None:
        self.on = on
        self.path = path
        self.nth = nth
        self.times = times
        self.met = 0
        """How many operations matched so far."""
        self._counting = threading.Lock()

    @property
    def hits(self) -> int:
        """How many of them were chosen."""
        after = max(0, self.met - self.nth + 1)
        return after if self.times is None else min(after, self.times)

    def chooses(self, operation: Operation) -> bool:
        """Count an operation, and say whether it is one of the chosen."""
        if not _matches(operation, self.on, self.path):
            return False
        with self._counting:
            before = self.hits
            self.met += 1
            return self.hits > before

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, path={self.path!r}, nth={self.nth}, {self.hits} hits)"


class Fault(_Chosen):
    """Lets the `nth` matching operation fail, and those after it: `times` in all, or all of them (None).

    `on` and `path` are globs (`*` crosses `/`). Either `error` is raised, or the bytes are damaged: see `Damage`. What
    a write, a put or a commit damages is stored so, `finish` damages the whole file, and a read what it hands out.
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
            raise ValueError("a fault is either an error or a damage")
        if truncate and on not in ("finish", "put", "get", "commit"):
            raise ValueError(f"{on!r} has no end that can be cut off: truncate on finish, put, get or commit")

    async def before(self, operation: Operation) -> Damage | None:
        """Raise or damage, if it is its turn."""
        if not self.chooses(operation):
            return None
        if self.error is not None:
            raise self.error
        return self.damage


class Stall(_Chosen):
    """Lets the chosen operations wait until `release()` is called, or (with `seconds`) for so long.

    A test waits for `wait_reached()`, looks at what there is to see, and releases. Once released, nothing waits.
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
        """Wait, if it is its turn."""
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
        """Wait until an operation waits here; a `TimeoutError` if none comes."""
        if not self.reached.wait(timeout):
            raise TimeoutError(f"{self} was not reached in {timeout} seconds")

    @property
    def waiting(self) -> int:
        """How many operations wait right now."""
        return len(self._waiting)

    def release(self) -> None:
        """Let all go on that wait here, and all that come later."""
        with self._lock:
            self._released = True
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)


def _matches(operation: Operation, name: str, path: str) -> bool:
    return fnmatchcase(operation.name, name) and fnmatchcase(operation.path, path)
