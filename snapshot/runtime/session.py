"""A session: the storage and the memory of one verb, closed whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from snapshot import trace
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
)
from snapshot.events import emit, log
from snapshot.options import MiB, Settings, expect_positive
from snapshot.registry import open_storage, plugin_for
from snapshot.runtime.budget import MemoryBudget, Pool
from snapshot.runtime.loop import shared_clients
from snapshot.storage import Context, Storage
from snapshot.url import URL

T = TypeVar("T")


class Session:
    """The storage of one verb, and the memory that the verb may use."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any] | None,
        *,
        durable: bool = True,
        budget: int | None = None,
        default_budget: int = 0,
        pool: Callable[[int], Pool] | None = None,
    ) -> None:
        self.url = url
        self.options = options
        self.durable = durable
        self.settings = Settings.current()
        trace.to(self.settings.trace)
        # What is far away is worth more requests side by side, and each holds what must be copied.
        near = getattr(
            plugin_for(url).capabilities, "blocking", False
        )  # of those that depend on the URL, it is not known
        usual = 64 * MiB if near else 256 * MiB
        limit = budget if budget is not None else self.settings.memory_budget_bytes or default_budget or usual
        expect_positive("memory_budget_bytes", limit)
        self.budget = MemoryBudget(limit, pool(limit) if pool is not None else None)
        self._context = Context(
            durable, self.budget, shared_clients(), self.settings.direct_io, self.settings.lane_count()
        )
        self.storage: Storage = open_storage(url, options, self._context)

    def open_beside(self, url: URL) -> Storage:
        """Open another storage for the same verb: the folder that a file is in."""
        return open_storage(url, self.options, self._context)

    def switch_storage(self, storage: Storage) -> None:
        """Go on with another storage: of a checkpoint of another library, the files may be beside the URL."""
        self.storage = storage

    async def read_twice(self, path: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read something. If it is damaged, which may have happened on its way over a network, read it once more."""
        try:
            return await read()
        except CorruptSnapshotError as error:
            if self.storage.capabilities.blocking:
                raise
            emit("retry", "read", str(self.storage.url.join(path)), attempt=1, error=str(error), pause=0.0)
            return await read()

    async def close(self) -> None:
        """Give the storage's resources back. What fails in that undoes nothing that was done: it is for the log."""
        try:
            await self.storage.close()
        except SnapshotError as error:
            log.warning("%s: could not be closed: %s", self.url, error)
        trace.save()
