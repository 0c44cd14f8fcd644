"""What is special about one kind of object store: how each request is made, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.plugins.network.transfer import RequestBody, ResponseSink
from snapshot.storage import URL, Expect, FileStat


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing: keys, folders (ending in `/`), and where the next one begins."""

    keys: Sequence[str]
    folders: Sequence[str] = ()
    following: Any = None


class Driver(ABC):
    """How one kind of store is asked: one request a method, without retries. Keys are whole, bucket excluded.

    Whatever it raises is translated by `fault`.
    """

    batch = 1
    """How many keys `delete` takes."""

    @abstractmethod
    async def close(self) -> None:
        """Give back the connections."""

    @abstractmethod
    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """The error that is raised for a client's: ours, a `TransientError` for what may pass."""

    @abstractmethod
    async def head(self, key: str) -> FileStat:
        """Size, time and token."""

    @abstractmethod
    async def read(self, key: str, sink: ResponseSink) -> None:
        """Ask for `sink.range` (in version `sink.token`, if there is one), and let the sink take the answer."""

    @abstractmethod
    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """A page of the keys that begin with a prefix."""

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Store a whole object; the new token."""
        raise NotImplementedError

    async def begin(self, key: str, size: int) -> str:
        """Begin an upload in parts; its name."""
        raise NotImplementedError

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Upload a part; what `complete` needs to know of it. `body.attempt.number` is above 1 if it is done again."""
        raise NotImplementedError

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Make the parts an object."""
        raise NotImplementedError

    async def abandon(self, key: str, upload: str) -> None:
        """Drop an upload and its parts; no error if it is gone."""
        raise NotImplementedError

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """Key, name and beginning of the uploads that are not finished."""
        return []

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most `batch` keys; no error for those that are gone."""
        raise NotImplementedError

    async def copy(self, source: str, key: str) -> None:
        """Copy an object within the store."""
        raise NotImplementedError
