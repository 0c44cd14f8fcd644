"""One operation's storage and memory: what every verb opens first, and closes whatever happens."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from snapshot import trace
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.formats import torchsnapshot
from snapshot.formats.detect import find
from snapshot.formats.foreign import LINKLESS, ForeignDocument, ReadOnly, says_absent
from snapshot.manifest.document import (
    METADATA,
    Document,
    ForeignFile,
    ManifestPart,
    PartEntry,
    decode_document,
    decode_part,
)
from snapshot.manifest.merge import merge
from snapshot.options import MiB, Settings
from snapshot.registry import open_storage, plugin_for
from snapshot.runtime.budget import MemoryBudget, Pool
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import clients
from snapshot.storage import Context, Storage
from snapshot.url import URL

T = TypeVar("T")


class Session:
    """A storage that is opened for one verb, with the memory that the verb may use."""

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
        if limit <= 0:
            raise ValueError(f"memory_budget_bytes is {limit}, and must be more than 0")
        self.budget = MemoryBudget(limit, pool(limit) if pool is not None else None)
        self._context = Context(durable, self.budget, clients(), self.settings.direct_io, self.settings.lane_count())
        self.storage: Storage = open_storage(url, options, self._context)

    async def open(self, rank: int | None = None) -> Document:
        """The snapshot's manifest, with all of its parts, or with those that one rank needs first."""
        document = await self.open_main()
        first = rank if rank is None or rank < document.world_size else 0
        await self.load(document, [part for part in document.parts if first is None or first in part.ranks])
        return document

    async def open_main(self) -> Document:
        """The snapshot's manifest without those of its parts that stand in files of their own."""
        if isinstance(self.storage, ReadOnly):  # what stood here was somebody else's: now it may be another's
            await self.storage.close()
            self.storage = self._beside(self.url)
        try:
            document = await self.twice(METADATA, self._manifest)
        except StorageError as error:
            if not says_absent(self.storage, error):
                raise
            with gc_paused():
                found = await find(self.url, self.storage, self._beside, self.settings.manifest_bytes)
            if found is None and not isinstance(error, StorageNotFoundError):
                raise
            if found is None:
                raise SnapshotNotFoundError(
                    f"{self.url}: there is no snapshot here, or it was never finished ({METADATA} is missing), nor a "
                    "checkpoint of another library that can be read"
                ) from error
            document = found
        await self.use(document)
        return document

    async def exists(self) -> bool:
        """Whether something stands here that can be opened."""
        try:
            await self.storage.stat(METADATA)
        except StorageError as error:
            if not says_absent(self.storage, error):
                raise
            try:
                found = await find(self.url, self.storage, self._beside, self.settings.manifest_bytes)
            except (CorruptSnapshotError, UnsupportedFormatError, UnsafeObjectError):
                return False  # what is there cannot be opened
            if found is None and not isinstance(error, StorageNotFoundError):
                raise
            return found is not None
        return True

    async def is_foreign(self) -> bool:
        """Whether what stands here is of another library, and has no manifest."""
        try:
            return await find(self.url, self.storage, self._beside, self.settings.manifest_bytes) is not None
        except (UnsupportedFormatError, UnsafeObjectError):
            return True
        except CorruptSnapshotError:
            return False

    async def _manifest(self) -> Document:
        data = await self.storage.get(METADATA, limit=self.settings.manifest_bytes)
        where = self.storage.url.join(METADATA)
        if data.lstrip()[:1] != b"{" or b'"format"' not in data[:256]:
            found = await torchsnapshot.describe(self.storage, data)
            found.place = self.url
            return found
        return decode_document(data, where)

    def _beside(self, url: URL) -> Storage:
        """Another storage for the same operation: the folder that a file lies in."""
        return open_storage(url, self.options, self._context)

    async def use(self, document: Document) -> None:
        """Read what a document describes: of somebody else's, from where its files are."""
        if isinstance(document, ForeignDocument) and not isinstance(self.storage, ReadOnly):
            inner = self.storage
            if document.place != self.url:
                inner = self._beside(document.place)
                await self.storage.close()
            self.storage = ReadOnly(inner, document.inline, links=document.format not in LINKLESS)

    async def twice(self, path: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read something; and once more if it is damaged, and may have been so on the way only."""
        try:
            return await read()
        except CorruptSnapshotError as error:
            if self.storage.capabilities.blocking:
                raise
            emit("retry", "read", str(self.storage.url.join(path)), attempt=1, error=str(error), pause=0.0)
            return await read()

    async def load(self, document: Document, parts: Sequence[PartEntry]) -> None:
        """Read parts of a manifest, and add what is in them. Each only once."""
        for part, held in zip(parts, await self.read_parts(parts), strict=True):
            merge(document.manifest, held.manifest, part.location)
            document.parts.remove(part)

    async def read_parts(self, parts: Sequence[PartEntry]) -> list[ManifestPart]:
        """What parts of a manifest hold."""
        at_once = asyncio.Semaphore(16)

        async def read(part: PartEntry) -> ManifestPart:
            async with at_once:
                return await self.twice(part.location, lambda: self._part(part))

        return await asyncio.gather(*map(read, parts))

    async def _part(self, part: PartEntry) -> ManifestPart:
        try:
            data = await self.storage.get(part.location, limit=self.settings.manifest_bytes)
            return decode_part(data, part, self.storage.url.join(part.location))
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{error}: a part of the manifest is missing") from error

    async def expect_files(self, document: Document, locations: set[str]) -> None:
        """Raise unless every file is there, and as long as it was."""
        faults = list((await self.missing_files(document, locations)).values())
        if faults:
            raise CorruptSnapshotError(f"{self.url}: {'; '.join(faults)}", faults=faults)

    async def missing_files(self, document: Document, locations: set[str], *more: int) -> dict[str, str]:
        """A line for each file that is not there, is no file, or is not as long as it was; or (`more`) of which the
        storage says so. Anything else that a storage says is no word about the snapshot, and raised."""
        damage = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, *more}
        at_once = asyncio.Semaphore(16)

        async def fault(location: str) -> str | None:
            file = document.files[location]
            expected = file.size
            try:
                async with at_once:
                    found = (await self.storage.stat(location)).size
            except StorageNotFoundError:
                return f"{location} is missing"
            except StorageError as error:
                if error.errno not in damage:
                    raise
                return str(error)
            if found > expected and isinstance(file, ForeignFile) and not file.exact:
                return None
            return None if found == expected else f"{location} has {found:,} bytes, and {expected:,} were written"

        ordered = sorted(locations)
        found = await asyncio.gather(*map(fault, ordered))
        return {location: line for location, line in zip(ordered, found, strict=True) if line}

    async def close(self) -> None:
        """Give the storage's resources back. What fails in that undoes nothing that was done: it is for the log."""
        try:
            await self.storage.close()
        except SnapshotError as error:
            log.warning("%s: could not be closed: %s", self.url, error)
        trace.save()
