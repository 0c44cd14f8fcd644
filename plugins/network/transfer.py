"""The bytes of one request: sinks that a response is received into, and bodies that are sent from where they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError
from snapshot.plugins.network.retry import Attempt, TransientError
from snapshot.storage import URL, Buffer

PIECE = 256 << 10
"""Bodies are sent in pieces this long: between two of them the loop does other things, and progress shows."""


def past_end_error(url: URL) -> CorruptSnapshotError:
    """What a server means that has nothing of a range (status 416)."""
    return CorruptSnapshotError(f"{url}: ends before the bytes that are asked for")


class ResponseSink:
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
            raise TransientError(f"{self.url}: the answer broke off at byte {self.position}, before {self.end}")


class BufferSink(ResponseSink):
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


class BytesSink(ResponseSink):
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


class RequestBody:
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

    def after(self, nbytes: int) -> RequestBody:
        """What is left behind so many bytes."""
        views, skipped = [], nbytes
        for view in self.views:
            views.append(view[skipped:] if skipped < view.nbytes else view[:0])
            skipped = max(skipped - view.nbytes, 0)
        rest = RequestBody(views)
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
