"""The steps under one root on storage: list, describe and pin them. Decisions about removal are elsewhere."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.formats.foreign import ForeignDocument, is_absence
from snapshot.io.aio import gather_limited
from snapshot.io.session import Seal, Session
from snapshot.io.storage import ANYTHING, FileStat, Storage
from snapshot.io.url import URL
from snapshot.loading.open import expect_files, open_main, read_manifest
from snapshot.manager.policies import Taken
from snapshot.manager.step_metadata import noted_expiry, noted_metrics
from snapshot.manifest.document import (
    METADATA,
    OURS,
    ManifestHead,
    NotOurs,
    SnapshotMetadata,
    decode_head,
    decode_head_of_ends,
)
from snapshot.runs.facts import PINNED, STEP, read_facts
from snapshot.runs.timeline import RunLine, origin_of
from snapshot.save import transaction
from snapshot.save.findings import suspicions

T = TypeVar("T")
Item = TypeVar("Item")
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}
"""Error numbers of a storage for a single file that cannot be read, while others can."""
NEWEST, MORE = 4, 64
"""Folders that a search for the newest snapshot looks at first, and then at a time."""
BEGINNING, END = 128 << 10, 4 << 10
"""Bytes at the beginning and at the end of a long manifest that are read for its head."""
LONGEST_BEGINNING = 32 << 20
"""Maximum of these bytes at the beginning. A manifest with a longer head is read as a whole."""


def taken_of(step: int, head: ManifestHead) -> Taken:
    """Return a snapshot as policies see it."""
    created, metadata = datetime.fromisoformat(head.created).timestamp(), head.metadata
    return Taken(step, created, noted_metrics(metadata), bool(suspicions(metadata)), noted_expiry(metadata))


def why_suspect(found: Sequence[str]) -> str | None:
    """Return why a suspect step is passed over; None for one that is not suspect."""
    return f"{SUSPECT} ({'; '.join(found)}); good=False restores it" if found else None


SUSPECT = "is suspect"


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
        self._listed: list[int] = []
        """The numbers of the folders that `newest` has not returned yet, and the last that it has."""
        self._reading = asyncio.Lock()
        self._line: RunLine | None = None
        """The line of a run with near folders, as of the last list of the folders."""

    def step_url(self, step: int) -> URL:
        return self.url.join(f"step-{step}")

    def opened(self, step: int | None = None, seal: Seal | None = None) -> Session:
        """Open the storage of the root, or of one step. With a seal, its manifest and its files are verified."""
        return Session(self.url if step is None else self.step_url(step), self.options, seal=seal)

    # Steps

    async def folders(self) -> StepFolders:
        """Return the step folders. Raise if the storage cannot list; failures of a single step are logged."""
        self._line = None
        return await self.examine(await self.numbers())

    async def newest(self, before: int | None) -> StepFolders:
        """Return the newest step folders, or the next ones before a step. The result is empty after the oldest step."""
        if before is None:
            self._line, self._listed = None, await self.numbers()
        else:
            self._listed = [step for step in self._listed if step < before]
        return await self.examine(self._listed[-(NEWEST if before is None else MORE) :])

    async def line(self) -> RunLine:
        """Return the line of the run in this root. Without facts, all steps are on it."""
        async with self._reading:  # once for all steps that are asked about
            if self._line is None:
                async with self.opened() as session:
                    self._line = RunLine(await read_facts(session.storage))
            return self._line

    async def counts(self, step: int, stat: FileStat) -> bool:
        """Return True if a step may be restored, as far as the timeline of the run decides that."""
        line = await self.line()
        if not line.cuts:
            return True
        head = await self._head(step, stat)
        return not isinstance(head, ManifestHead) or line.counts(step, head.save_id, origin_of(head.metadata))

    async def on_line(self, committed: Mapping[int, FileStat]) -> list[int]:
        """Return the committed steps that count, ascending."""
        found = await gather_limited(committed, lambda step: self.counts(step, committed[step]))
        return [step for step, counts in zip(committed, found, strict=True) if counts]

    async def numbers(self) -> list[int]:
        """Return the numbers of all step folders, ascending. Raise if the storage cannot list."""
        async with self.opened() as session:
            if not session.storage.capabilities.list:
                raise SnapshotError(
                    f"{self.url}: cannot find the steps: this storage cannot list files; name a step: "
                    "manager.snapshot(step).restore(app_state)"
                )
            return steps_of(await list_folder(session.storage, "step-"))

    async def examine(self, steps: Sequence[int]) -> StepFolders:
        """Return the folders of these steps, which are ascending. Failures of a single step are logged."""
        async with self.opened() as session:
            storage = session.storage
            found = await gather_limited(steps, lambda step: _is_there(storage, f"step-{step}/{METADATA}"), MORE)
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
                head: ManifestHead | SnapshotError = await _read_head(session, stat)
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

    async def copies(self, step: int, seal: Seal | None = None) -> set[str]:
        """Return the physical files of a step's contents, as far as an incremental take recorded them.

        With a seal, a manifest that does not pass it is not decoded.
        """
        if seal is not None:
            with suppress(CorruptSnapshotError, SnapshotNotFoundError, StorageError):
                async with self.opened(step, seal) as session:
                    verified = decode_head(await read_manifest(session), session.url.join(METADATA))
                return set(verified.copies().values())
            return set()
        async with self.opened(step) as session:
            stat = await _stat_if_there(session.storage, METADATA)
        head = None if stat is None else await self._head(step, stat)
        return set(head.copies().values()) if isinstance(head, ManifestHead) else set()

    async def new_bytes(self, step: int) -> int:
        """Return the bytes that a step added to the storage: those of its files that no earlier step has."""
        async with self.opened(step) as session:
            stat = await session.storage.stat(METADATA)
        head = await self._head(step, stat)
        if not isinstance(head, ManifestHead):
            return 0
        shared = sum(each.stored_size for each in head.files.values() if each.origin is not None)
        return sum(head.sizes().values()) - shared + stat.size

    async def find_last_taken(self) -> int | None:
        """Return the step that was taken last, or None if there is none. Suspect steps are logged and passed over.

        A higher step may be older: it was abandoned if a run has continued from a step before it.
        """
        committed = (await self.folders()).committed
        heads = (await self.heads(committed)).items()
        known = {step: head for step, head in heads if isinstance(head, ManifestHead)}
        for step in sorted(known, key=lambda each: (known[each].created, committed[each].mtime, each), reverse=True):
            head = known[step]
            why = why_suspect(suspicions(head.metadata))
            if why is None:
                return step
            log.warning("%s: passed over: %s", self.step_url(step), why)
        return None

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
        sizes = head.sizes()
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

    async def is_snapshot(self) -> bool:
        """Return True if the root itself is a snapshot, such as a step that was passed by mistake."""
        async with self.opened() as session:
            return await _stat_if_there(session.storage, METADATA) is not None

    async def fault(self, step: int, seal: Seal | None = None, *, good: bool = False) -> str | None:
        """Return why a step cannot be restored, as far as its main manifest shows; None if it does not.

        With `good`, also why it should not be restored: it is suspect.

        The ranks look at the manifest's parts and at the files that they need, before any of them reads data.
        """
        async with self.opened(step, seal) as session:
            try:
                opened = await open_main(session)
                document = opened.document
                if isinstance(document, ForeignDocument):  # its reader may not look at all files that belong to it
                    await expect_files(opened, set(document.own_files))
            except (CorruptSnapshotError, SnapshotNotFoundError, StorageNotFoundError) as error:
                return str(error)
            except SnapshotError:
                raise
            except Exception as error:  # noqa: BLE001 - readers of other formats may raise anything
                return f"{self.step_url(step)}: not a readable snapshot ({type(error).__name__}: {error})"
        return why_suspect(suspicions(SnapshotMetadata.of(document).metadata)) if good else None

    async def is_replaceable(self, step: int) -> bool:
        """Return True if this library wrote the damaged snapshot there.

        Its manifest begins like one, or is empty (as after a power loss) next to data files of this library.
        """
        async with self.opened(step) as session:
            try:
                head = await session.storage.get(METADATA, limit=session.settings.manifest_bytes)
                return bool(
                    OURS.match(head) or (not head.strip(b"\0") and await transaction.list_save_files(session.storage))
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
        if not (steps := list(steps)):
            return set()
        async with self.opened() as session:
            found = await gather_limited(steps, lambda step: _stat_if_there(session.storage, f"step-{step}/{PINNED}"))
        return {step for step, stat in zip(steps, found, strict=True) if stat is not None}


def steps_of(list_folder: Iterable[str]) -> list[int]:
    """Return the step numbers of listed folders, ascending. Skip files, and names such as `step-007`."""
    found = (STEP.fullmatch(path[:-1]) for path in list_folder if path.endswith("/"))
    return sorted(int(each[1]) for each in found if each)


async def list_folder(storage: Storage, prefix: str) -> list[str]:
    """Return one level of a folder; empty if the folder does not exist."""
    try:
        return await storage.list(prefix, recursive=False)
    except StorageNotFoundError:
        return []


async def _read_head(session: Session, stat: FileStat) -> ManifestHead:
    """Read a manifest's head: of a long manifest by ranges, and of any other one with its digest."""
    where, beginning, limit = session.url.join(METADATA), BEGINNING, session.settings.manifest_bytes
    with suppress(StorageConflictError):  # another one is there now
        while beginning * 2 < stat.size <= limit and beginning <= LONGEST_BEGINNING:
            first, last = bytearray(beginning), bytearray(END)
            await session.storage.read_into(METADATA, 0, [first], token=stat.token)
            await session.storage.read_into(METADATA, stat.size - END, [last], token=stat.token)
            head = decode_head_of_ends(bytes(first), bytes(last), where)
            if head is not None:
                return head
            beginning *= 16
    return decode_head(await session.storage.get(METADATA, limit=limit), where)


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
