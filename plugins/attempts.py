"""Requests over a network, made again when what went wrong may pass: the one layer of all that retries.

Clients' own retries are off, so that one deadline counts, and every fault is seen as an event. What makes progress is
never hurried: `timeout` counts from the last byte that moved.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageConflictError, StorageError
from snapshot.events import emit
from snapshot.storage import URL, Buffer

T = TypeVar("T")
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 20.0
PIECE = 256 << 10
"""Bodies are sent in pieces this long: between two of them the loop does other things, and progress shows."""


class PassingError(StorageError):
    """Raised inside a plugin for a fault that may pass: the request is made again, until its deadline.

    `after` is how long the server asked to be left alone; `refused` says that the request has had no effect for sure.
    """

    def __init__(self, message: str, *, after: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.after = after
        self.refused = refused


def ends_early(url: URL) -> CorruptSnapshotError:
    """What a server means that has nothing of a range (status 416)."""
    return CorruptSnapshotError(f"{url}: ends before the bytes that are asked for")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests are waited for."""

    timeout: float = 60.0
    """Seconds without a byte moved, after which an attempt is given up."""
    deadline: float = 300.0
    """Seconds after which a request that keeps failing, and gains nothing, is given up."""

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} is not a number of seconds above 0")


class Attempt:
    """What one attempt of a request knows of those before it, and how it shows that it makes progress."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._clock: asyncio.Timeout | None = None
        self.number = 1
        self.uncertain = False
        """Whether an earlier attempt may have taken effect, though no answer said so."""
        self.began = time.monotonic()
        """Since when nothing was gained."""

    def progress(self) -> None:
        """A byte has moved: the time that an attempt may take begins anew."""
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time() + self._patience.timeout)

    def gain(self) -> None:
        """The same of what need not be asked for again: the request's time begins anew, too."""
        self.began = time.monotonic()
        self.progress()


async def patiently(
    name: str, url: URL, patience: Patience, request: Callable[[Attempt], Awaitable[T]], within: float | None = None
) -> T:
    """Make a request until it succeeds, fails for good, or its deadline is over; `within` is a shorter deadline."""
    deadline = min(patience.deadline, within or patience.deadline)
    attempt = Attempt(patience)
    while True:
        left = deadline - (time.monotonic() - attempt.began)
        limit = max(min(patience.timeout, left), 0.05)
        try:
            async with asyncio.timeout(limit) as attempt._clock:
                return await request(attempt)
        except TimeoutError as error:
            if isinstance(error, SnapshotError):
                raise
            failed = PassingError(f"{url}: no answer to {name} in {limit:.3g} seconds")
            failed.__cause__ = error
        except PassingError as error:
            failed = error
        except StorageConflictError:
            raise  # it is known who was first
        except StorageError as error:
            error.uncertain |= attempt.uncertain
            raise
        attempt.uncertain |= not failed.refused
        pause = random.uniform(0.5, 1)  # noqa: S311 - of how long to wait, nobody makes a secret
        pause *= min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt.number, 20))
        pause = max(pause, failed.after or 0)
        spent = time.monotonic() - attempt.began
        if spent + pause >= deadline:
            times = f"{attempt.number} attempts" if attempt.number > 1 else "1 attempt"
            raised = StorageError(f"{failed} (given up after {times} in {spent:.1f} seconds)")
            raised.uncertain = attempt.uncertain
            raise raised from failed.__cause__
        emit("retry", name, str(url), attempt=attempt.number, error=str(failed), pause=round(pause, 3))
        attempt.number += 1
        await asyncio.sleep(pause)


class Sink:
    """Where the bytes of an answer go. One that breaks off goes on where it ended, in the same version of the file."""

    def __init__(self, url: URL, begin: int, end: int | None, token: str | None) -> None:
        self.url = url
        self.position = begin
        """The byte of the file that is wanted next."""
        self.end = end
        self.token = token
        """The version of the file that is read: the one that was asked for, or the first that answered."""
        self.attempt: Attempt | None = None
        self._reached = begin

    @property
    def full(self) -> bool:
        """Whether nothing more is wanted."""
        return self.end is not None and self.position >= self.end

    @property
    def range(self) -> str | None:
        """The header `Range` of the next request, if it needs one."""
        if self.end is None:
            return f"bytes={self.position}-" if self.position else None
        return f"bytes={self.position}-{self.end - 1}"

    def starts(self, at: int, total: int | None, token: str | None) -> None:
        """An answer begins, with byte `at` of a file of `total` bytes."""
        if at != self.position:
            raise StorageError(
                f"{self.url}: asked for bytes {self.position} on and got those from {at} on; this server ignores ranges"
            )
        if self.token is not None and token is not None and token != self.token:
            raise StorageConflictError(f"{self.url}: was replaced while it was read")
        if total is not None and self.end is not None and total < self.end:
            raise CorruptSnapshotError(f"{self.url}: ends at byte {total}, before bytes {at}-{self.end} do")
        self.token = self.token or token

    def take(self, chunk: Buffer) -> None:
        """Put the next bytes where they belong."""
        raise NotImplementedError

    def moved(self, nbytes: int) -> None:
        """So many bytes have arrived."""
        self.position += nbytes
        if self.attempt is None:
            return
        if self.position > self._reached:
            self._reached = self.position
            self.attempt.gain()
        else:
            self.attempt.progress()

    def ended(self) -> None:
        """The answer is over."""
        if self.end is None:
            self.end = self.position
        elif not self.full:
            raise PassingError(f"{self.url}: the answer broke off at byte {self.position}, before {self.end}")


class Scatter(Sink):
    """Fills buffers, one after the other."""

    def __init__(self, url: URL, begin: int, buffers: Sequence[Buffer], token: str | None) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._index = self._used = 0
        super().__init__(url, begin, begin + sum(view.nbytes for view in self._views), token)

    def take(self, chunk: Buffer) -> None:
        """Copy a chunk to where it belongs; what is beyond the last buffer is dropped."""
        source, taken = memoryview(chunk), 0
        while taken < source.nbytes and self._index < len(self._views):
            view = self._views[self._index]
            length = min(view.nbytes - self._used, source.nbytes - taken)
            view[self._used : self._used + length] = source[taken : taken + length]
            taken += length
            self._used += length
            if self._used == view.nbytes:
                self._index, self._used = self._index + 1, 0
        self.moved(taken)


class Whole(Sink):
    """Collects a small file, whose length is not known before."""

    def __init__(self, url: URL, limit: int | None) -> None:
        super().__init__(url, 0, None, None)
        self._limit = limit
        self.data = bytearray()

    def _allow(self, total: int) -> None:
        if self._limit is not None and total > self._limit:
            raise StorageError(f"{self.url}: has {total:,} bytes, more than the {self._limit:,} allowed")

    def starts(self, at: int, total: int | None, token: str | None) -> None:
        """Refuse what is too long before it is read. A server that ignores ranges begins anew: so do we."""
        if at == 0 and self.position:
            self.data.clear()
            self.position = 0
        super().starts(at, total, token)
        self._allow(total or 0)
        if total is not None:
            self.end = total

    def take(self, chunk: Buffer) -> None:
        """Append; also what claims to be short may not be long."""
        self._allow(len(self.data) + len(chunk))
        self.data += chunk
        self.moved(len(chunk))


class Body:
    """Buffers as the body of a request: sent from where they lie, again from the beginning if need be.

    To clients that want a file it is one: it can be read, and sought in.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._ends = list(accumulate(view.nbytes for view in self.views))
        self.nbytes = self._ends[-1] if self._ends else 0
        self._position = 0
        self.attempt: Attempt | None = None

    def __len__(self) -> int:
        return self.nbytes

    def pieces(self) -> list[memoryview]:
        """All of it, in pieces of a length that can be sent at once."""
        return [view[at : at + PIECE] for view in self.views for at in range(0, view.nbytes, PIECE)]

    def after(self, nbytes: int) -> Body:
        """What is left behind so many bytes."""
        views, skipped = [], nbytes
        for view in self.views:
            views.append(view[skipped:] if skipped < view.nbytes else view[:0])
            skipped = max(skipped - view.nbytes, 0)
        rest = Body(views)
        rest.attempt = self.attempt
        return rest

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as a file would give them."""
        end = self.nbytes if size is None or size < 0 else min(self._position + size, self.nbytes)
        found = []
        for view, stop in zip(self.views, self._ends, strict=True):
            start = stop - view.nbytes
            if stop > self._position and start < end:
                found.append(view[max(self._position - start, 0) : end - start])
        self._position = end
        return b"".join(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go somewhere else."""
        self._position = offset + (0, self._position, self.nbytes)[whence]
        return self._position

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._position

    def seekable(self) -> bool:
        """Whether it can be sent again."""
        return True

    def progress(self) -> None:
        """Some of it was sent."""
        if self.attempt is not None:
            self.attempt.progress()
