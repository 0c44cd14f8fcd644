"""The steps under one root on storage: list, describe and pin them. Decisions about removal are elsewhere."""

from __future__ import annotations

import errno
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from snapshot.aio import gather_limited
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.formats.foreign import is_absence
from snapshot.load.open import expect_files, open_document
from snapshot.manager.policies import Taken
from snapshot.manager.step_metadata import noted_metrics
from snapshot.manifest.document import FORMAT, METADATA, BaseReference, FileEntry, PartEntry
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.storage import ANYTHING, FileStat, Storage
from snapshot.tensors.digest import digest_range
from snapshot.url import URL

T = TypeVar("T")
Item = TypeVar("Item")
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}
"""Error numbers of a storage for a single file that cannot be read, while others can."""
PINNED = ".pinned"
"""File in a step's folder that protects it from removal. It belongs to no snapshot, so clean-up leaves it."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class NotOurs(SnapshotError):
    """The file at a manifest's path was not written by this version of the library."""


class ManifestHead(msgspec.Struct):
    """All fields of a manifest but its entries, which are skipped, since there may be many."""

    format: str
    version: str
    save_id: str
    world_size: int
    created: str
    metadata: dict[str, Any]
    files: dict[str, FileEntry]
    parts: list[PartEntry]
    base: BaseReference | None = None

    @property
    def nbytes(self) -> int:
        """Size of the data files in bytes, counted as in `SnapshotMetadata.nbytes`."""
        return sum(each.size for each in self.files.values() if not each.in_base)

    def copies(self) -> dict[str, str]:
        """Return the physical file of each content that an incremental take recorded."""
        return {each.content: each.origin or name for name, each in self.files.items() if each.content is not None}

    def taken(self, step: int) -> Taken:
        """Return the snapshot as policies see it."""
        return Taken(step, datetime.fromisoformat(self.created).timestamp(), noted_metrics(self.metadata))


_heads = msgspec.json.Decoder(ManifestHead)
_OURS = re.compile(rb'\{"format":"%s","version":"[^"]{1,80}","save_id":"[0-9a-f]{12}",' % FORMAT.encode())
_DIGEST = re.compile(rb',"digest":"(xxh3:[0-9a-f]{32})"\}$')


def decode_head(data: bytes, where: object) -> ManifestHead:
    """Return the head of a manifest.

    Raise NotOurs if the data does not begin like a manifest, and CorruptSnapshotError if its checksum is wrong.
    """
    if not _OURS.match(data):
        raise NotOurs(f"{where}: not a manifest that this version of the library wrote")
    tail = _DIGEST.search(data, max(0, len(data) - 64))
    if tail is None or digest_range(memoryview(data)[: tail.start()]).encode() != tail[1]:
        raise CorruptSnapshotError(f"{where}: the manifest's checksum is wrong")
    try:
        head = _heads.decode(data)
        datetime.fromisoformat(head.created)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    return head


@dataclass(slots=True)
class StepFolders:
    """The step folders under a root."""

    committed: dict[int, FileStat] = field(default_factory=dict)
    """Folders with a manifest, ascending, with its size, time and token."""
    others: list[int] = field(default_factory=list)
    """Folders without a manifest: interrupted takes, other libraries, or anything."""
    later: dict[int, FileStat] = field(default_factory=dict)
    """Folders with a manifest that are not considered, but whose steps may rely on others."""
    unreadable: dict[int, StorageError] = field(default_factory=dict)
    """Folders whose manifest the storage failed to look up, and the error."""


class Root:
    """A root on storage, with a cache of the manifests that were read."""

    def __init__(self, url: URL, options: Mapping[str, Any] | None) -> None:
        self.url = url
        self.options = options
        self._heads: dict[int, tuple[str, ManifestHead | SnapshotError]] = {}
        """The manifest's token, and its head or the error of reading it."""
        self._whole: dict[int, str] = {}
        """Manifest tokens of the snapshots whose files were all found."""

    def step_url(self, step: int) -> URL:
        """Return the URL of a step."""
        return self.url.join(f"step-{step}")

    @asynccontextmanager
    async def opened(self, step: int | None = None) -> AsyncIterator[Session]:
        """Open the storage of the root, or of one step."""
        session = Session(self.url if step is None else self.step_url(step), self.options)
        try:
            yield session
        finally:
            await session.close()

    # Steps

    async def folders(self) -> StepFolders:
        """Return the step folders. Raise if the storage cannot list; failures of a single step are logged."""
        async with self.opened() as session:
            storage = session.storage
            if not storage.capabilities.list:
                raise SnapshotError(
                    f"{self.url}: cannot find the steps: this storage cannot list files; name a step: "
                    "manager.snapshot(step).restore(app_state)"
                )
            steps = steps_of(await list_folder(storage, "step-"))
            found = await gather_limited(steps, lambda step: _is_there(storage, f"step-{step}/{METADATA}"))
        folders = StepFolders()
        for step, stat in zip(steps, found, strict=True):
            if isinstance(stat, StorageError):
                log.warning("%s: passed over: cannot be read: %s", self.step_url(step), stat)
                folders.unreadable[step] = stat
            elif stat is None:
                folders.others.append(step)
            else:
                folders.committed[step] = stat
        return folders

    async def _head(self, step: int, stat: FileStat) -> ManifestHead | SnapshotError | None:
        """Return a step's manifest head, or the error of reading it, or None if the file is missing.

        The result is cached until the manifest's token changes.
        """
        known = self._heads.get(step)
        if known is not None and known[0] == stat.token:
            return known[1]
        async with self.opened(step) as session:
            try:
                data = await session.storage.get(METADATA, limit=session.settings.manifest_bytes)
                head: ManifestHead | SnapshotError = decode_head(data, session.url.join(METADATA))
            except StorageError as error:
                if is_absence(session.storage, error):
                    return None
                if error.errno not in UNREADABLE:
                    raise
                return error
            except (CorruptSnapshotError, NotOurs) as error:
                head = error
        self._heads[step] = stat.token, head
        return head

    def save_id(self, step: int) -> str:
        """Return the save id of a step whose manifest was read, or ''."""
        head = self._heads.get(step, ("", None))[1]
        return head.save_id if isinstance(head, ManifestHead) else ""

    async def copies(self, step: int) -> set[str]:
        """Return the physical files of a step's contents, as far as an incremental take recorded them."""
        async with self.opened(step) as session:
            stat = await _stat_if_there(session.storage, METADATA)
        head = None if stat is None else await self._head(step, stat)
        return set(head.copies().values()) if isinstance(head, ManifestHead) else set()

    async def heads(self, committed: Mapping[int, FileStat]) -> dict[int, ManifestHead | SnapshotError]:
        """Return the manifest heads of several steps, or the error for a damaged, foreign or unreadable one."""
        for gone in self._heads.keys() - committed.keys():
            self._heads.pop(gone, None)
        found = await gather_limited(committed, lambda step: self._head(step, committed[step]))
        return {step: head for step, head in zip(committed, found, strict=True) if head is not None}

    async def missing(self, step: int, stat: FileStat, head: ManifestHead) -> str:
        """Return a text that names a missing or short file of a step, or ''.

        A complete snapshot is not checked again until its manifest's token changes.
        """
        if self._whole.get(step) == stat.token:
            return ""
        sizes = {name: each.size for name, each in head.files.items() if not each.in_base}
        sizes |= {each.location: each.size for each in head.parts}
        async with self.opened(step) as session:

            async def fault(name: str) -> str:
                found = await _is_there(session.storage, name)
                if isinstance(found, StorageError):
                    return str(found)
                if found is None:
                    return f"{name} is missing"
                return "" if found.size == sizes[name] else f"{name} has {found.size:,} bytes of {sizes[name]:,}"

            faults = [each for each in await gather_limited(sizes, fault) if each]
        if not faults:
            self._whole[step] = stat.token
        return faults[0] if faults else ""

    async def token(self, step: int) -> str | None:
        """Return the version token of a step's manifest, or None if it has none."""
        async with self.opened(step) as session:
            stat = await _stat_if_there(session.storage, METADATA)
        return None if stat is None else stat.token

    async def fault(self, step: int) -> str | None:
        """Return why a step cannot be restored, as far as that shows without reading data; None if it does not."""
        async with self.opened(step) as session:
            try:
                document = await open_document(session)
                await expect_files(session, document, set(document.own_files))
            except (CorruptSnapshotError, SnapshotNotFoundError, StorageNotFoundError) as error:
                return str(error)
            except SnapshotError:
                raise
            except Exception as error:  # noqa: BLE001 - readers of other formats may raise anything
                return f"{self.step_url(step)}: not a readable snapshot ({type(error).__name__}: {error})"
        return None

    async def is_replaceable(self, step: int) -> bool:
        """Return True if this library wrote the damaged snapshot there.

        Its manifest begins like one, or is empty (as after a power loss) next to data files of this library.
        """
        async with self.opened(step) as session:
            try:
                head = await session.storage.get(METADATA, limit=session.settings.manifest_bytes)
                return bool(
                    _OURS.match(head) or (not head.strip(b"\0") and await cleanup.list_save_files(session.storage))
                )
            except StorageError:
                return False

    # Pins

    async def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, for all processes."""
        async with self.opened(step) as session:
            if await _stat_if_there(session.storage, METADATA) is None:
                raise SnapshotNotFoundError(f"{session.url}: there is no snapshot to pin")
            await session.storage.put(PINNED, b"", expect=ANYTHING)
            await session.storage.settle()
            if await _stat_if_there(session.storage, METADATA) is None:  # it was removed meanwhile
                await session.storage.delete([PINNED])
                raise SnapshotNotFoundError(f"{session.url}: was removed while it was being pinned")

    async def unpin(self, step: int) -> None:
        """Remove a step's pin; not an error if there is none."""
        async with self.opened(step) as session:
            await session.storage.delete([PINNED])

    async def forget_pin(self, step: int) -> None:
        """Delete the pin of a step that does not exist any more: it is not meant for a later snapshot there."""
        async with self.opened(step) as session:
            with suppress(StorageError):  # the next write there reports it
                if (
                    await _stat_if_there(session.storage, PINNED)
                    and await _stat_if_there(session.storage, METADATA) is None
                ):
                    await session.storage.delete([PINNED])

    async def pinned(self, steps: Iterable[int]) -> set[int]:
        """Return the subset of steps that are pinned."""
        steps = list(steps)
        async with self.opened() as session:
            found = await gather_limited(steps, lambda step: _stat_if_there(session.storage, f"step-{step}/{PINNED}"))
        return {step for step, stat in zip(steps, found, strict=True) if stat is not None}


def steps_of(list_folder: Iterable[str]) -> list[int]:
    """Return the step numbers of listed folders, ascending. Skip files, and names such as `step-007`."""
    found = (_STEP.fullmatch(path[:-1]) for path in list_folder if path.endswith("/"))
    return sorted(int(each[1]) for each in found if each)


async def list_folder(storage: Storage, prefix: str) -> list[str]:
    """Return one level of a folder; empty if the folder does not exist."""
    try:
        return await storage.list(prefix, recursive=False)
    except StorageNotFoundError:
        return []


async def _stat_if_there(storage: Storage, path: str) -> FileStat | None:
    try:
        return await storage.stat(path)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
        return None


async def _is_there(storage: Storage, path: str) -> FileStat | StorageError | None:
    """Do as `_stat_if_there`, but return the error of a file that cannot be read."""
    try:
        return await _stat_if_there(storage, path)
    except StorageError as error:
        if error.errno not in UNREADABLE:
            raise
        return error
