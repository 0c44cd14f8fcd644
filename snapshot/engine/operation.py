"""One operation's storage and memory: what every verb opens first, and closes whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from snapshot.engine.budget import MemoryBudget
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.manifest.document import METADATA, Document, PartEntry, decode_document, decode_part
from snapshot.manifest.merge import merge
from snapshot.options import MiB, Settings
from snapshot.registry import open_storage
from snapshot.storage import URL, Context, Storage


class Operation:
    """A storage that is opened for one verb, with the memory that the verb may use."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any] | None,
        *,
        durable: bool = True,
        budget: int | None = None,
        default_budget: int = 64 * MiB,
    ) -> None:
        self.url = url
        self.settings = Settings.current()
        limit = budget if budget is not None else self.settings.memory_budget_bytes or default_budget
        if limit <= 0:
            raise ValueError(f"memory_budget_bytes is {limit}, and must be more than 0")
        self.budget = MemoryBudget(limit)
        context = Context(durable, self.budget, self.settings.direct_io, self.settings.lane_count())
        self.storage: Storage = open_storage(url, options, context)

    async def open(self, rank: int | None = None) -> Document:
        """The snapshot's manifest, with all of its parts, or with those that one rank needs first."""
        try:
            data = await self.storage.get(METADATA, limit=self.settings.manifest_bytes)
        except StorageNotFoundError as error:
            raise SnapshotNotFoundError(
                f"{self.url}: there is no snapshot here, or it was never finished ({METADATA} is missing)"
            ) from error
        where = self.storage.url.join(METADATA)
        if not data.lstrip()[:1] == b"{" or b'"format"' not in data[:256]:
            raise _foreign(data, where)
        document = decode_document(data, where)
        first = rank if rank is None or rank < document.world_size else 0
        await self.load(document, [part for part in document.parts if first is None or first in part.ranks])
        return document

    async def load(self, document: Document, parts: Sequence[PartEntry]) -> None:
        """Read parts of a manifest, and add what is in them. Each only once."""
        at_once = asyncio.Semaphore(16)

        async def read(part: PartEntry) -> bytes:
            async with at_once:
                return await self._part(part)

        for part, held in zip(parts, await asyncio.gather(*map(read, parts)), strict=True):
            merge(
                document.manifest, decode_part(held, part, self.storage.url.join(part.location)).manifest, part.location
            )
            document.parts.remove(part)

    async def _part(self, part: PartEntry) -> bytes:
        try:
            return await self.storage.get(part.location, limit=self.settings.manifest_bytes)
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{error}: a part of the manifest is missing") from error

    async def expect_files(self, document: Document, locations: set[str]) -> None:
        """Raise unless every file is there, and as long as it was."""
        faults = list((await self.missing_files(document, locations)).values())
        if faults:
            raise CorruptSnapshotError(f"{self.url}: {'; '.join(faults)}", faults=faults)

    async def missing_files(self, document: Document, locations: set[str]) -> dict[str, str]:
        """A line for each file that is not there, or not as long as it was."""
        faults = {}
        for location in sorted(locations):
            expected = document.files[location].size
            try:
                found = (await self.storage.stat(location)).size
            except StorageNotFoundError:
                faults[location] = f"{location} is missing"
                continue
            except StorageError as error:
                faults[location] = str(error)
                continue
            if found != expected:
                faults[location] = f"{location} has {found:,} bytes, and {expected:,} were written"
        return faults

    async def close(self) -> None:
        """Give the storage's resources back."""
        await self.storage.close()


def _foreign(data: bytes, where: URL) -> Exception:
    if b'"manifest"' in data[:4096] or b"manifest:" in data[:4096]:
        return UnsupportedFormatError(f"{where}: was written by another library (torchsnapshot?)")
    return CorruptSnapshotError(f"{where}: is no manifest ({len(data)} bytes)")
