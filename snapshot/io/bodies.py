"""The bytes of one request: sinks for a response, and bodies that are sent without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from snapshot.errors import (
    CorruptSnapshotError,
    StorageConflictError,
    StorageError,
)
from snapshot.io.retry import RequestAttempts, TransientError
from snapshot.io.storage import Buffer
from snapshot.io.url import URL

PIECE = 256 << 10
"""Bytes of a body that are sent at once. Between two pieces the loop runs other tasks, and progress is recorded."""


def past_end_error(url: URL) -> CorruptSnapshotError:
    """Return the error for a range past the end of a file (status 416)."""
    return CorruptSnapshotError(f"{url}: ends before the requested bytes")


class ResponseSink:
    """Destination of a response. After a broken response the next one continues, in the same version of the file."""

    def __init__(self, url: URL, begin: int, end: int | None, token: str | None) -> None:
        self.url = url
        self.position = begin
        """Offset of the next byte in the file."""
        self.end = end
        self.token = token
        """Version of the file: the requested one, or that of the first response."""
        self.attempt: RequestAttempts | None = None
        self.size: int | None = None
        """The expected size of the file."""
        self._reached = begin

    @property
    def full(self) -> bool:
        """True if all bytes have arrived."""
        return self.end is not None and self.position >= self.end

    @property
    def range(self) -> str | None:
        """Value of the `Range` header of the next request, if it needs one."""
        if self.end is None:
            return f"bytes={self.position}-" if self.position else None
        return f"bytes={self.position}-{self.end - 1}"

    def starts(self, at: int, total: int | None, token: str | None) -> None:
        """Check that a response begins at the next byte, in a file of `total` bytes and in the same version."""
        if at != self.position:
            raise StorageError(
                f"{self.url}: requested offset {self.position}, got offset {at}; the server must support range requests"
            )
        if self.token is not None and token is not None and token != self.token:
            raise StorageConflictError(f"{self.url}: replaced during the read")
        if total is not None and self.size is not None and total != self.size:
            raise CorruptSnapshotError(f"{self.url} must have {self.size:,} bytes, got {total:,}")
        if total is not None and self.end is not None and total < self.end:
            raise CorruptSnapshotError(f"{self.url}: ends at byte {total}, but bytes {at}-{self.end} were requested")
        self.token = self.token or token

    def take(self, chunk: Buffer) -> None:
        """Store the next bytes."""
        raise NotImplementedError

    def moved(self, nbytes: int) -> None:
        """Record that bytes have arrived."""
        self.position += nbytes
        if self.attempt is None:
            return
        if self.position > self._reached:
            self._reached = self.position
            self.attempt.gain()
        else:
            self.attempt.progress()

    def ended(self) -> None:
        """Raise TransientError if the response ended before the range."""
        if self.end is None:
            self.end = self.position
        elif not self.full:
            raise TransientError(f"{self.url}: the response ended at byte {self.position} of {self.end}")


class BufferSink(ResponseSink):
    """Sink that fills buffers in order."""

    def __init__(self, url: URL, begin: int, buffers: Sequence[Buffer], token: str | None) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._index = self._used = 0
        super().__init__(url, begin, begin + sum(view.nbytes for view in self._views), token)

    def take(self, chunk: Buffer) -> None:
        """Copy a chunk into the buffers, and drop bytes beyond the last one."""
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


class BytesSink(ResponseSink):
    """Sink for a small file of unknown length."""

    def __init__(self, url: URL, limit: int | None) -> None:
        super().__init__(url, 0, None, None)
        self._limit = limit
        self.data = bytearray()

    def _allow(self, total: int) -> None:
        if self._limit is not None and total > self._limit:
            raise StorageError(f"{self.url}: has {total:,} bytes, more than the {self._limit:,} allowed")

    def starts(self, at: int, total: int | None, token: str | None) -> None:
        """Raise StorageError before reading a file that is too long. Start over if the server ignores the range."""
        if at == 0 and self.position:
            self.data.clear()
            self.position = 0
        super().starts(at, total, token)
        self._allow(total or 0)
        if total is not None:
            self.end = total

    def take(self, chunk: Buffer) -> None:
        """Append a chunk; raise StorageError if the file is longer than the response declared."""
        self._allow(len(self.data) + len(chunk))
        self.data += chunk
        self.moved(len(chunk))


class RequestBody:
    """Buffers as the body of a request, sent without a copy, and sent again in a retry.

    Clients may use it as a file with `read` and `seek`.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._ends = list(accumulate(view.nbytes for view in self.views))
        self.nbytes = self._ends[-1] if self._ends else 0
        self._position = 0
        self.attempt: RequestAttempts | None = None

    def __len__(self) -> int:
        return self.nbytes

    def pieces(self) -> list[memoryview]:
        """Return the whole body in pieces of at most `PIECE` bytes."""
        return [view[at : at + PIECE] for view in self.views for at in range(0, view.nbytes, PIECE)]

    def after(self, nbytes: int) -> RequestBody:
        """Return the rest of the body after its first `nbytes` bytes."""
        views, skipped = [], nbytes
        for view in self.views:
            views.append(view[skipped:] if skipped < view.nbytes else view[:0])
            skipped = max(skipped - view.nbytes, 0)
        rest = RequestBody(views)
        rest.attempt = self.attempt
        return rest

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, as from a file."""
        end = self.nbytes if size is None or size < 0 else min(self._position + size, self.nbytes)
        found = []
        for view, stop in zip(self.views, self._ends, strict=True):
            start = stop - view.nbytes
            if stop > self._position and start < end:
                found.append(view[max(self._position - start, 0) : end - start])
        self._position = end
        return b"".join(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position, as in a file."""
        self._position = offset + (0, self._position, self.nbytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        """Return True: the body can be sent again."""
        return True

    def progress(self) -> None:
        """Record that a part of the body was sent."""
        if self.attempt is not None:
            self.attempt.progress()
