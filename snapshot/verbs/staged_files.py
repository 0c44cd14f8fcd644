"""Atomic publication of exported files: data files are renamed into place, and the index is written last."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from snapshot.aio import shielded
from snapshot.errors import SnapshotError, SnapshotExistsError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.plan.layout import FilePlan
from snapshot.save.cleanup import DAY
from snapshot.save.writer import StagedParts, Writer
from snapshot.storage import Storage

ASIDE = ".convert-"
"""The name prefix of unfinished files, on storages that can rename."""


class StagedFiles:
    """The files of one conversion."""

    def __init__(
        self, storage: Storage, names: Sequence[str], markers: Sequence[str], others: Sequence[str], more: str
    ) -> None:
        """`more`: a pattern for further files that a replaced checkpoint of the same kind may have."""
        self._storage = storage
        self._more = re.compile(more)
        self.names = list(names)
        self._markers = markers
        self._others = others
        self._standing: list[str] = []

    async def expect(self, *, overwrite: bool) -> None:
        """Raise if a checkpoint exists that must not be replaced, or that would hide the new one."""
        for name in self._others:
            if await self._exists(name):
                raise SnapshotExistsError(
                    f"{self._storage.url.join(name)}: belongs to a checkpoint of another format, which would be read "
                    "instead; convert to another folder"
                )
        self._standing = [name for name in dict.fromkeys((*self.names, *self._markers)) if await self._exists(name)]
        if self._standing and not overwrite:
            raise SnapshotExistsError(
                f"{self._storage.url.join(self._standing[0])}: exists already; convert to another path, or pass "
                "overwrite=True"
            )

    async def write(
        self,
        writer: Writer,
        files: Sequence[FilePlan],
        last: Callable[[], list[tuple[str, bytes]]],
        staging: StagedParts | None = None,
    ) -> None:
        """Write all files.

        If the storage can rename, the old checkpoint stays whole until all new files are. Otherwise its index is
        deleted before its first file is replaced. So a mixture of both never exists.
        """
        storage, renames = self._storage, self._storage.capabilities.renames
        identity = secrets.token_hex(6)
        aside = [f"{ASIDE}{identity}-{number}" if renames else name for number, name in enumerate(self.names)]
        markers = [name for name in self._markers if name in self._standing]
        try:
            if markers and not renames:
                await storage.delete(markers)
            await writer.write(files, aside, staging)
            await storage.settle()
            if renames:
                if markers:
                    await storage.delete(markers)
                for made, name in zip(aside, self.names, strict=True):
                    await storage.rename(made, name)
                await storage.settle()
            small = last()
            for name, data in small:
                await storage.put(name, data)
            if small:
                await storage.settle()
        except BaseException:
            if renames:
                await shielded(self._gone(aside))
            raise
        await self._clean({*self.names, *(name for name, _ in small)})

    async def _clean(self, kept: set[str]) -> None:
        """Delete further files of the replaced checkpoint, and day-old files of killed conversions."""
        storage = self._storage
        if not (storage.capabilities.list and storage.capabilities.delete):
            return
        try:
            found = await storage.list(recursive=False) if self._markers else await storage.list(ASIDE, recursive=False)
            replaced = not set(self._markers).isdisjoint(self._standing)
            gone = [name for name in found if replaced and self._more.fullmatch(name) and name not in kept]
            for name in found:
                if name.startswith(ASIDE) and (await storage.stat(name)).mtime < time.time() - DAY:
                    gone.append(name)
            if gone:
                await storage.delete(gone)
        except SnapshotError as error:  # the conversion is complete: leftovers only cost space
            log.warning("%s: cannot delete leftover files: %s", storage.url, error)

    async def _exists(self, name: str) -> bool:
        try:
            await self._storage.stat(name)
        except StorageNotFoundError:
            return False
        return True

    async def _gone(self, names: Sequence[str]) -> None:
        with suppress(StorageError):
            await self._storage.delete(names)
