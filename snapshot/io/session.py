"""A session: the storage and memory of one operation, which are always closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from snapshot import events
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
)
from snapshot.events import emit, log
from snapshot.io.budget import MemoryBudget, Pool
from snapshot.io.loop import run, shared_clients
from snapshot.io.registry import open_storage, plugin_for
from snapshot.io.storage import Context, Storage
from snapshot.io.url import URL
from snapshot.options import MiB, Settings, expect_positive
from snapshot.signing.seal import Seal

T = TypeVar("T")


class Session:
    """The storage of one operation, and the memory that it may use."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any] | None,
        *,
        durable: bool = True,
        budget: int | None = None,
        default_budget: int = 0,
        pool: Callable[[int], Pool] | None = None,
        resume: bool = False,
        seal: Seal | None = None,
    ) -> None:
        self.url = url
        self.seal = seal
        self.options = options
        self.durable = durable
        self.settings = Settings.current()
        events.to(self.settings.trace)
        # Remote storages need more parallel requests, and each request holds a buffer.
        near = getattr(plugin_for(url).capabilities, "blocking", False)  # unknown if it depends on the URL
        usual = 64 * MiB if near else 256 * MiB
        limit = budget if budget is not None else self.settings.memory_budget_bytes or default_budget or usual
        expect_positive("memory_budget_bytes", limit)
        self.budget = MemoryBudget(limit, pool(limit) if pool is not None else None)
        self._context = Context(
            durable, self.budget, shared_clients(), self.settings.direct_io, self.settings.lane_count(), resume
        )
        self.storage: Storage = open_storage(url, options, self._context)

    @cached_property
    def packed_memory(self) -> MemoryBudget:
        """The part of the budget for the stored bytes of compressed files that are read."""
        return self.budget.set_aside(self.budget.total // 4)

    def open_beside(self, url: URL) -> Storage:
        """Open another storage for the same operation: the folder of a file."""
        return open_storage(url, self.options, self._context)

    def switch_storage(self, storage: Storage) -> None:
        """Switch to another storage: the files of another library's checkpoint may be beside the URL."""
        self.storage = storage

    async def read_twice(self, path: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read something, and retry if it is damaged: from other places that have it, or once more over a network."""
        again = not self.storage.capabilities.blocking
        while True:
            try:
                return await read()
            except CorruptSnapshotError as error:
                if not (self.storage.switch_source(path) or again):
                    raise
                again = False
                emit("retry", "read", str(self.storage.url.join(path)), attempt=1, error=str(error), pause=0.0)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        run(self.close())

    async def close(self) -> None:
        """Release the storage's resources. An error is logged: it does not undo the operation."""
        try:
            await self.storage.close()
        except SnapshotError as error:
            log.warning("%s: cannot close the storage: %s", self.url, error)
        events.save()
