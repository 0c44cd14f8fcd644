"""Opening what is at a URL: its manifest, the parts of that, and the files that it names."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial

from snapshot.aio import gather_limited
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.formats import torchsnapshot
from snapshot.formats.detect import find_checkpoint
from snapshot.formats.foreign import LINKLESS, ForeignDocument, ReadOnlyStorage, is_absence
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
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.session import Session

AT_ONCE = 16
"""Requests that are made concurrently."""


async def open_document(session: Session, rank: int | None = None) -> Document:
    """Return the snapshot's manifest, with all of its parts, or with those that one rank needs first."""
    document = await open_main(session)
    first = rank if rank is None or rank < document.world_size else 0
    await load_parts(session, document, [part for part in document.parts if first is None or first in part.ranks])
    return document


async def open_main(session: Session) -> Document:
    """Return the snapshot's manifest without those of its parts that stand in files of their own."""
    if isinstance(session.storage, ReadOnlyStorage):  # what stood here was somebody else's: now it may be another's
        await session.storage.close()
        session.switch_storage(session.open_beside(session.url))
    try:
        document = await session.read_twice(METADATA, partial(_read_manifest, session))
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        with gc_paused():
            found = await find_checkpoint(
                session.url, session.storage, session.open_beside, session.settings.manifest_bytes
            )
        if found is None and not isinstance(error, StorageNotFoundError):
            raise
        if found is None:
            raise SnapshotNotFoundError(
                f"{session.url}: there is no snapshot here, or it was never finished ({METADATA} is missing), nor a "
                "checkpoint of another library that can be read"
            ) from error
        document = found
    await read_from(session, document)
    return document


async def checkpoint_exists(session: Session) -> bool:
    """Whether something stands here that can be opened."""
    try:
        await session.storage.stat(METADATA)
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        try:
            found = await find_checkpoint(
                session.url, session.storage, session.open_beside, session.settings.manifest_bytes
            )
        except (CorruptSnapshotError, UnsupportedFormatError, UnsafeObjectError):
            return False  # what is there cannot be opened
        if found is None and not isinstance(error, StorageNotFoundError):
            raise
        return found is not None
    return True


async def is_foreign(session: Session) -> bool:
    """Whether what stands here is of another library, and has no manifest."""
    try:
        return (
            await find_checkpoint(session.url, session.storage, session.open_beside, session.settings.manifest_bytes)
            is not None
        )
    except (UnsupportedFormatError, UnsafeObjectError):
        return True
    except CorruptSnapshotError:
        return False


async def _read_manifest(session: Session) -> Document:
    data = await session.storage.get(METADATA, limit=session.settings.manifest_bytes)
    where = session.storage.url.join(METADATA)
    if data.lstrip()[:1] != b"{" or b'"format"' not in data[:256]:
        found = await torchsnapshot.describe_snapshot(session.storage, data)
        found.place = session.url
        return found
    return decode_document(data, where)


async def read_from(session: Session, document: Document) -> None:
    """Read what a document describes: of somebody else's, from where its files are."""
    if isinstance(document, ForeignDocument) and not isinstance(session.storage, ReadOnlyStorage):
        inner = session.storage
        if document.place != session.url:
            inner = session.open_beside(document.place)
            await session.storage.close()
        session.switch_storage(ReadOnlyStorage(inner, document.inline, links=document.format not in LINKLESS))


async def load_parts(session: Session, document: Document, parts: Sequence[PartEntry]) -> None:
    """Read parts of a manifest, and add what is in them. Each only once."""
    for part, held in zip(parts, await read_parts(session, parts), strict=True):
        merge(document.manifest, held.manifest, part.location)
        document.parts.remove(part)


async def read_parts(session: Session, parts: Sequence[PartEntry]) -> list[ManifestPart]:
    """Return what parts of a manifest hold."""

    async def read(part: PartEntry) -> ManifestPart:
        return await session.read_twice(part.location, lambda: _read_part(session, part))

    return await gather_limited(parts, read, AT_ONCE)


async def _read_part(session: Session, part: PartEntry) -> ManifestPart:
    try:
        data = await session.storage.get(part.location, limit=session.settings.manifest_bytes)
        return decode_part(data, part, session.storage.url.join(part.location))
    except StorageNotFoundError as error:
        raise CorruptSnapshotError(f"{error}: a part of the manifest is missing") from error


async def expect_files(session: Session, document: Document, locations: set[str]) -> None:
    """Raise unless every file is there, and as long as it was."""
    faults = list((await missing_files(session, document, locations)).values())
    if faults:
        raise CorruptSnapshotError(f"{session.url}: {'; '.join(faults)}", faults=faults)


async def missing_files(session: Session, document: Document, locations: set[str], *more: int) -> dict[str, str]:
    """Return a line for each file that is not there, is no file, or is not as long as it was; or (`more`) of which the
    storage says so. Anything else that a storage says is no word about the snapshot, and raised."""
    damage = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, *more}

    async def fault(location: str) -> str | None:
        file = document.files[location]
        expected = file.size
        try:
            found = (await session.storage.stat(location)).size
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
    found = await gather_limited(ordered, fault, AT_ONCE)
    return {location: line for location, line in zip(ordered, found, strict=True) if line}
