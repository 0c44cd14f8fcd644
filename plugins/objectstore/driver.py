"""Requests to one kind of object store: the interface of a new store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.plugins.network.retry import Attempt
from snapshot.plugins.network.transfer import RequestBody, ResponseSink
from snapshot.storage import URL, Expect, FileStat


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: keys, folders (ending in `/`), and the marker of the next page."""

    keys: Sequence[str]
    folders: Sequence[str] = ()
    following: Any = None


class Driver(ABC):
    """Requests to one kind of store: one request per method, without retries. Keys are complete, without the bucket.

    `fault` translates all errors of the methods.
    """

    batch = 1
    """Maximum keys of one `delete`."""
    largest_copy = 1 << 60
    """Maximum bytes of one `copy`, and of one `copy_part` of a longer object."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Return this library's error for a client's error: a TransientError if the request may be retried."""

    @abstractmethod
    async def head(self, key: str) -> FileStat:
        """Return size, time and token of an object."""

    @abstractmethod
    async def read(self, key: str, sink: ResponseSink) -> None:
        """Request `sink.range`, in version `sink.token` if there is one, and pass the response to the sink."""

    @abstractmethod
    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Return one page of the keys that begin with a prefix."""

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Store a whole object; return the new token."""
        raise NotImplementedError

    async def begin(self, key: str, size: int) -> str:
        """Begin a multipart upload; return its name."""
        raise NotImplementedError

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Upload a part; return its tag for `complete`. `body.attempt.number` is above 1 in a retry."""
        raise NotImplementedError

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Join the parts into an object."""
        raise NotImplementedError

    async def abandon(self, key: str, upload: str) -> None:
        """Abort an upload and drop its parts; no error if it does not exist."""
        raise NotImplementedError

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """Return key, name and start time of the unfinished uploads."""
        return []

    async def parts(self, key: str, upload: str) -> Mapping[int, str]:
        """Return the tags of an unfinished upload's parts, by their numbers."""
        return {}

    def is_part(self, tag: str, body: RequestBody) -> bool:
        """Return True if a tag proves that a stored part has the bytes of a body."""
        return False

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most `batch` keys; no error for those that do not exist."""
        raise NotImplementedError

    async def copy(self, source: str, token: str, key: str, attempt: Attempt) -> None:
        """Copy version `token` of an object of at most `largest_copy` bytes within the store.

        The key has no object yet, except perhaps that of an earlier attempt: see `attempt.uncertain`.
        """
        raise NotImplementedError

    async def copy_part(
        self, key: str, upload: str, number: int, source: str, token: str, *, begin: int, end: int
    ) -> str:
        """Copy a range of version `token` of a longer object as a part of an upload; return its tag for `complete`."""
        raise NotImplementedError
