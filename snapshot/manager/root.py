"""The steps under one root, as they stand on storage: found, described, pinned. Nothing here decides what may go."""

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
from snapshot.manifest.document import FORMAT, METADATA, FileEntry, PartEntry
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.storage import ANYTHING, FileStat, Storage
from snapshot.tensors.digest import digest_range
from snapshot.url import URL

T = TypeVar("T")
Item = TypeVar("Item")
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}
"""What a storage says of a single file that cannot be read, while others can."""
PINNED = ".pinned"
"""The file in a step's folder that keeps it from being removed. It is none of a snapshot's, so cleaning leaves it."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class NotOurs(SnapshotError):
    """What stands in the place of a manifest is none that this version wrote."""


class ManifestHead(msgspec.Struct):
    """Of a manifest all but its entries, which are skipped, and may be many."""

    format: str
    version: str
    save_id: str
    world_size: int
    created: str
    metadata: dict[str, Any]
    files: dict[str, FileEntry]
    parts: list[PartEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of the data files, as `SnapshotMetadata.nbytes` counts them."""
        return sum(each.size for each in self.files.values())

    def taken(self, step: int) -> Taken:
        """As a policy sees it."""
        return Taken(step, datetime.fromisoformat(self.created).timestamp(), noted_metrics(self.metadata))


_heads = msgspec.json.Decoder(ManifestHead)
_OURS = re.compile(rb'\{"format":"%s","version":"[^"]{1,80}","save_id":"[0-9a-f]{12}",' % FORMAT.encode())
_DIGEST = re.compile(rb',"digest":"(xxh3:[0-9a-f]{32})"\}$')


def decode_head(data: bytes, where: object) -> ManifestHead:
    """Return what a manifest of ours says of itself. `NotOurs` if it does not begin as one does, and
    `CorruptSnapshotError` if it is not as it was written."""
    if not _OURS.match(data):
        raise NotOurs(f"{where}: is no manifest that this version of the library wrote")
    tail = _DIGEST.search(data, max(0, len(data) - 64))
    if tail is None or digest_range(memoryview(data)[: tail.start()]).encode() != tail[1]:
        raise CorruptSnapshotError(f"{where}: the manifest is not as it was written")
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
    """Those with a manifest, ascending; and the manifest's size, time and token."""
    others: list[int] = field(default_factory=list)
    """Those without one: interrupted, of another library, or anything."""
    unreadable: dict[int, StorageError] = field(default_factory=dict)
    """Those of which the storage does not say whether they have one, and what it says."""


class Root:
    """A root on storage, and what was read there: each manifest once."""

    def __init__(self, url: URL, options: Mapping[str, Any] | None) -> None:
        self.url = url
        self.options = options
        self._heads: dict[int, tuple[str, ManifestHead | SnapshotError]] = {}
        """The manifest's token, and what it says, or why it says nothing."""
        self._whole: dict[int, str] = {}
        """The tokens of those that were found to have all of their files."""

    def step_url(self, step: int) -> URL:
        """Where a step lies."""
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
        """Return what there is. Raises where the storage cannot say; of a single step it is logged."""
        async with self.opened() as session:
            storage = session.storage
            if not storage.capabilities.list:
                raise SnapshotError(
                    f"{self.url}: this storage cannot list what is there, so its steps are not known; name one: "
                    "manager.snapshot(step).restore(app_state)"
                )
            steps = steps_of(await list_folder(storage, "step-"))
            found = await gather_limited(steps, lambda step: _is_there(storage, f"step-{step}/{METADATA}"))
        folders = StepFolders()
        for step, stat in zip(steps, found, strict=True):
            if isinstance(stat, StorageError):
                log.warning("%s: is passed over, since it cannot be looked at: %s", self.step_url(step), stat)
                folders.unreadable[step] = stat
            elif stat is None:
                folders.others.append(step)
            else:
                folders.committed[step] = stat
        return folders

    async def _head(self, step: int, stat: FileStat) -> ManifestHead | SnapshotError | None:
        """Return what a step's manifest says of itself, or why that is not known; it is read once, unless another took
        its place. None if it is gone."""
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

    async def heads(self, committed: Mapping[int, FileStat]) -> dict[int, ManifestHead | SnapshotError]:
        """Return what several manifests say; of one that is damaged, somebody else's, or unreadable, the error that
        says so."""
        for gone in self._heads.keys() - committed.keys():
            self._heads.pop(gone, None)
        found = await gather_limited(committed, lambda step: self._head(step, committed[step]))
        return {step: head for step, head in zip(committed, found, strict=True) if head is not None}

    async def missing(self, step: int, stat: FileStat, head: ManifestHead) -> str:
        """Which of a step's files is not there, or not as long as it was; nothing if all are. What was whole once is
        not looked at again, unless another took its place."""
        if self._whole.get(step) == stat.token:
            return ""
        sizes = {name: each.size for name, each in head.files.items()}
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
        """Return the token of a step's manifest; None if there is none."""
        async with self.opened(step) as session:
            stat = await _stat_if_there(session.storage, METADATA)
        return None if stat is None else stat.token

    async def fault(self, step: int) -> str | None:
        """Why a step cannot be restored, as far as that is seen without reading data: None if nothing is seen."""
        async with self.opened(step) as session:
            try:
                document = await open_document(session)
                await expect_files(session, document, set(document.files))
            except (CorruptSnapshotError, SnapshotNotFoundError, StorageNotFoundError) as error:
                return str(error)
            except SnapshotError:
                raise
            except Exception as error:  # noqa: BLE001 - what reads other formats may stumble over anything
                return f"{self.step_url(step)}: is no snapshot that can be read ({type(error).__name__}: {error})"
        return None

    async def is_replaceable(self, step: int) -> bool:
        """Whether what is damaged there is of this library: its manifest begins as one of ours; or it is empty, as
        after a loss of power, beside data of ours."""
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
        """Keep a step, for all who look, until it is unpinned."""
        async with self.opened(step) as session:
            if await _stat_if_there(session.storage, METADATA) is None:
                raise SnapshotNotFoundError(f"{session.url}: there is no snapshot to pin")
            await session.storage.put(PINNED, b"", expect=ANYTHING)
            await session.storage.settle()
            if await _stat_if_there(session.storage, METADATA) is None:  # it was removed meanwhile
                await session.storage.delete([PINNED])
                raise SnapshotNotFoundError(f"{session.url}: was removed while it was being pinned")

    async def unpin(self, step: int) -> None:
        """Keep it no longer; no error if it was not pinned."""
        async with self.opened(step) as session:
            await session.storage.delete([PINNED])

    async def forget_pin(self, step: int) -> None:
        """Take away a pin of what is not there any more: it is not meant for what comes in its place."""
        async with self.opened(step) as session:
            with suppress(StorageError):  # who writes there next is told
                if (
                    await _stat_if_there(session.storage, PINNED)
                    and await _stat_if_there(session.storage, METADATA) is None
                ):
                    await session.storage.delete([PINNED])

    async def pinned(self, steps: Iterable[int]) -> set[int]:
        """Which of some steps are pinned."""
        steps = list(steps)
        async with self.opened() as session:
            found = await gather_limited(steps, lambda step: _stat_if_there(session.storage, f"step-{step}/{PINNED}"))
        return {step for step, stat in zip(steps, found, strict=True) if stat is not None}


def steps_of(list_folder: Iterable[str]) -> list[int]:
    """Return the steps whose folders are among what was listed, ascending. `step-007` is none of ours, nor is a
    file."""
    found = (_STEP.fullmatch(path[:-1]) for path in list_folder if path.endswith("/"))
    return sorted(int(each[1]) for each in found if each)


async def list_folder(storage: Storage, prefix: str) -> list[str]:
    """One level; nothing where there is no such folder."""
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
    """As `_stat_if_there`; and of what cannot be read, the error that says so."""
    try:
        return await _stat_if_there(storage, path)
    except StorageError as error:
        if error.errno not in UNREADABLE:
            raise
        return error
