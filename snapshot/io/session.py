"""A session: the storage and memory of one operation, which are always closed."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from snapshot import events
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
)
from snapshot.events import emit, log
from snapshot.io.budget import MemoryBudget, Pool
from snapshot.io.host_share import HostShare
from snapshot.io.loop import run, shared_clients
from snapshot.io.registry import open_storage, plugin_for
from snapshot.io.storage import Context, Storage
from snapshot.io.system import fcntl
from snapshot.io.url import URL
from snapshot.settings import MiB, Settings, expect_positive

T = TypeVar("T")
Key = Any
"""A path of a PEM file, or the object of a private or public key of `cryptography`: of Ed25519, or of ECDSA."""


class Seal(Protocol):
    """A check of every file that a session reads.

    One that only knows whole files refuses both calls, and has `verify_whole`, which `Snapshot.verify` calls instead.
    """

    signer: str
    """The public key that all bytes are verified with; empty if there is none."""
    optional: bool
    """True if what has no signature is read, too."""

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Handle the bytes of a manifest, before they are decoded. `limit`: the maximum bytes of a signature."""
        ...

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> Storage | None:
        """Return a storage that checks the files of a snapshot, which have these sizes."""
        ...


def signer_of(seal: Seal | None) -> str:
    """Return the public key that a seal verifies with; empty if there is none."""
    return "" if seal is None else seal.signer


class MemoryDefaults(NamedTuple):
    """How much memory an operation has if the user gives no budget, and with whom it shares its budget."""

    limit: int = 0
    """The budget; 0 for the usual one of the storage."""
    pool: Callable[[int], Pool] | None = None
    """Returns the memory that several operations share, for a budget."""


NO_DEFAULTS = MemoryDefaults()


def _uses_accelerator() -> bool:
    """Return True if this process has used an accelerator, which takes torch. A command that lists needs none."""
    if "torch" not in sys.modules:
        return False
    from snapshot.io.accelerators import uses_accelerator

    return uses_accelerator()


class Session:
    """The storage of one operation, and the memory that it may use."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any] | None,
        *,
        durable: bool = True,
        budget: int | None = None,
        memory: MemoryDefaults = NO_DEFAULTS,
        resume: bool = False,
        seal: Seal | None = None,
        wrap: Callable[[Storage], Storage] = lambda opened: opened,
    ) -> None:
        """Open the storage of a URL. `wrap` returns a layer around it, through which all is read and written."""
        self.url = url
        self.seal = seal
        self.options = options
        self.durable = durable
        self.settings = Settings.current()
        events.to(self.settings.trace)
        # Remote storages need more parallel requests, and each request holds a buffer. So does each copy of a GPU.
        near = getattr(plugin_for(url).capabilities, "local", False)  # unknown if it depends on the URL
        usual = 64 * MiB if near and not _uses_accelerator() else 256 * MiB
        limit = budget if budget is not None else self.settings.memory_budget_bytes or memory.limit or usual
        expect_positive("memory_budget_bytes", limit)
        self.budget = MemoryBudget(limit, memory.pool(limit) if memory.pool is not None else None)
        self._context = Context(
            durable,
            self.budget,
            shared_clients(),
            self.settings.direct_io,
            self.settings.lane_count(),
            resume,
            self.settings.file_io,
        )
        self.storage = wrap(open_storage(url, options, self._context))
        """The storage of the URL. The files of a checkpoint are read through layers above it: see `Opened`."""
        self._kept: list[Storage | Session] = []
        self._packed_memory: MemoryBudget | None = None
        self._setting_aside = threading.Lock()
        self._share: HostShare | None = None
        """The reads that ranks of a host hand on."""

    def hand_on_reads(self, name: str) -> None:
        """Let ranks of a host hand on their reads of a remote storage. `name`: a random name of the operation.

        With a key, each rank reads and verifies everything itself.
        """
        if name and self.seal is None and fcntl is not None and not self.storage.capabilities.local:
            self._share = HostShare(name, self.settings.timeout)

    @property
    def packed_memory(self) -> MemoryBudget:
        """The part of the budget for the stored bytes of compressed files that are read. Any thread may ask first."""
        with self._setting_aside:
            if self._packed_memory is None:
                self._packed_memory = self.budget.set_aside(self.budget.total // 4)
            return self._packed_memory

    def open_beside(self, url: URL) -> Storage:
        """Open another storage for the same operation, such as the folder of a file. It is closed with the session."""
        made = open_storage(url, self.options, self._context)
        self.keep(made)
        return made

    def keep(self, opened: Storage | Session) -> None:
        """Close a storage, or another session, when this session is closed."""
        self._kept.append(opened)

    async def read_twice(self, path: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read something, and retry if it is damaged: from other places that have it, or once more over a network."""
        again = not self.storage.capabilities.local
        while True:
            try:
                return await read()
            except CorruptSnapshotError as error:
                if not (self.storage.switch_source(path) or again):
                    raise
                again = False
                emit("retry", "read", str(self.storage.url.join(path)), attempt=1, error=str(error), pause=0.0)

    async def read_once_on_host(self, path: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the bytes of a file that other ranks of this host read, too. Those of another rank are not verified.

        If they prove to be damaged, the next call for the same file reads it.
        """
        return await (read() if self._share is None else self._share.get(path, read))

    def choose_first(self, count: int) -> int:
        """Return the number of the file to begin with, of some that other ranks of this host read, too."""
        return secrets.randbelow(count) if self._share is not None and count else 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        run(self.close())

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the storage's resources. An error is logged: it does not undo the operation."""
        for each in (*self._kept, self.storage):
            try:
                await each.close()
            except SnapshotError as error:
                log.warning("%s: cannot close the storage: %s", self.url, error)
        self.budget.close()
        if self._share is not None:
            self._share.close()
        events.save()
