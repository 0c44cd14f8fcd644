"""Opening a checkpoint: its manifest, the manifest's parts, and checks of its files."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from functools import partial

from snapshot.aio import gather_limited
from snapshot.errors import (
    CorruptSnapshotError,
    SignatureError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.formats import torchsnapshot
from snapshot.formats.detect import find_checkpoint
from snapshot.formats.foreign import LINKLESS, ForeignDocument, ReadOnlyStorage, is_absence
from snapshot.formats.unread import UnknownFormatError, refuse_folder
from snapshot.loading.unpacking import UnpackingStorage
from snapshot.manifest.document import (
    METADATA,
    NEWEST_FORMAT,
    Document,
    FileEntry,
    ForeignFile,
    ManifestPart,
    PartEntry,
    decode_document,
    decode_part,
)
from snapshot.manifest.entries import needs_third_format
from snapshot.manifest.head import find_save_id
from snapshot.manifest.merge import merge
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.session import Session
from snapshot.signing.signed_storage import LeafStorage

AT_ONCE = 16
"""The maximum number of concurrent requests."""
AGAIN = 10
"""Attempts for a signed snapshot that other takes keep replacing."""


async def open_document(session: Session, rank: int | None = None) -> Document:
    """Return the manifest with all of its parts, or with the parts that one rank needs first."""
    document = await open_main(session)
    first = rank if rank is None or rank < document.world_size else 0
    await load_parts(session, document, [part for part in document.parts if first is None or first in part.ranks])
    return document


async def open_main(session: Session) -> Document:
    """Return the manifest without its parts in separate files."""
    if isinstance(session.storage, ReadOnlyStorage):  # opened as another library's checkpoint; it may have changed
        await session.storage.close()
        session.switch_storage(session.open_beside(session.url))
    read_stored(session)
    if isinstance(session.storage, LeafStorage):
        session.switch_storage(session.storage.inner)
    try:
        document = await session.read_twice(METADATA, partial(_decode_manifest, session))
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        if session.seal is not None:  # other formats have no signatures, so their readers are not even called
            raise SnapshotNotFoundError(
                f"{session.url}: no snapshot of this library found ({METADATA} is missing), and with a key, no other "
                "format is read"
            ) from error
        with gc_paused():
            found = await find_checkpoint(
                session.url, session.storage, session.open_beside, session.settings.manifest_bytes
            )
        if found is None and not isinstance(error, StorageNotFoundError):
            raise
        if found is None:
            raise await refuse_folder(session.storage) from error
        document = found
    await read_from(session, document)
    return document


async def checkpoint_exists(session: Session) -> bool:
    """Return True if a checkpoint exists here that can be opened."""
    try:
        await session.storage.stat(METADATA)
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        if session.seal is not None:
            return False
        try:
            found = await find_checkpoint(
                session.url, session.storage, session.open_beside, session.settings.manifest_bytes
            )
        except (CorruptSnapshotError, UnsupportedFormatError, UnsafeObjectError):
            return False  # it cannot be opened
        if found is None and not isinstance(error, StorageNotFoundError):
            raise
        return found is not None
    return True


async def is_foreign(session: Session) -> bool:
    """Return True if another library's checkpoint is here, without a manifest."""
    try:
        return (
            await find_checkpoint(session.url, session.storage, session.open_beside, session.settings.manifest_bytes)
            is not None
        )
    except (CorruptSnapshotError, UnknownFormatError):
        return False
    except (UnsupportedFormatError, UnsafeObjectError):
        return True


async def read_manifest(session: Session) -> bytes:
    """Return the bytes of the manifest, which are not decoded. The session's seal has verified them."""
    limit, seal = session.settings.manifest_bytes, session.seal
    data = await session.storage.get(METADATA, limit=limit)
    if seal is None:
        return data
    if session.storage.host:
        raise ValueError(f"{session.url}: key must be None for near steps, which are not signed; use the uploaded step")
    for left in reversed(range(AGAIN)):
        try:
            save_id = find_save_id(data)
            if save_id is None:
                raise SignatureError(f"{session.url}: is not a snapshot of this library, so it has no signature")
            await seal.check_manifest(session.storage, save_id, data, limit)
            break
        except SignatureError:
            now = await session.storage.get(METADATA, limit=limit)
            if now == data or not left:
                raise
            data = now  # another take has replaced the snapshot, and its signature
    return data


async def _decode_manifest(session: Session) -> Document:
    data = await read_manifest(session)
    if data.lstrip()[:1] != b"{" or b'"format"' not in data[:256]:
        found = await torchsnapshot.describe_snapshot(session.storage, data)
        found.place = session.url
        return found
    return decode_document(data, session.storage.url.join(METADATA))


async def read_from(session: Session, document: Document) -> None:
    """Switch the session to a storage of the document's files: another library's, or one that decompresses them."""
    if isinstance(document, ForeignDocument) and not isinstance(session.storage, ReadOnlyStorage):
        inner = session.storage
        if document.place != session.url:
            inner = session.open_beside(document.place)
            await session.storage.close()
        session.switch_storage(ReadOnlyStorage(inner, document.inline, links=document.format not in LINKLESS))

    read_stored(session)
    if session.seal is not None and not isinstance(session.storage, LeafStorage):
        sizes = {location: file.stored_size for location, file in document.own_files.items()}
        sizes |= {part.location: part.size for part in document.parts}
        session.switch_storage(session.seal.wrap(session.storage, document.save_id, sizes) or session.storage)
    read_unpacked(session, document.own_files)


def read_unpacked(session: Session, files: Mapping[str, FileEntry]) -> None:
    """Let the session read compressed files as if they were not."""
    if any(file.packed is not None for file in files.values()):
        session.switch_storage(UnpackingStorage(session.storage, files, session.packed_memory))


def read_stored(session: Session) -> None:
    """Let the session read the bytes of compressed files as they are stored."""
    if isinstance(session.storage, UnpackingStorage):
        session.switch_storage(session.storage.inner)


async def load_parts(session: Session, document: Document, parts: Sequence[PartEntry]) -> None:
    """Read parts of a manifest and add their entries, each part only once."""
    for part, held in zip(parts, await read_parts(session, parts), strict=True):
        if document.format != NEWEST_FORMAT and needs_third_format(held.manifest.values()):
            raise CorruptSnapshotError(
                f"{session.url}: {part.location}: format must be {NEWEST_FORMAT} for its entries"
            )
        merge(document.manifest, held.manifest, part.location)
        document.parts.remove(part)


async def read_parts(session: Session, parts: Sequence[PartEntry]) -> list[ManifestPart]:
    """Return the contents of manifest parts."""

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
    """Raise unless every file exists and has its expected size."""
    if document.base is not None and any(document.files[each].in_base for each in locations):
        raise SnapshotError(
            f"{session.url}: has only what differs from {document.base.url} (save id {document.base.save_id}); to "
            "restore all of it, pass restore(..., base=...); objects that did not change are in that snapshot"
        )
    faults = list(dict.fromkeys((await missing_files(session, document, locations)).values()))
    if faults:
        raise CorruptSnapshotError(f"{session.url}: {'; '.join(faults)}", faults=faults)


async def missing_files(session: Session, document: Document, locations: set[str], *more: int) -> dict[str, str]:
    """Return a line for each file that is missing, is not a regular file, or has an unexpected size.

    `more`: further errno values that count as such a fault. Any other storage error is raised.
    """
    damage = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, *more}

    async def fault(location: str) -> str | None:
        file = document.files[location]
        expected = file.stored_size
        try:
            found = (await session.storage.stat(location)).size
        except StorageNotFoundError:
            return f"{location} is missing"
        except CorruptSnapshotError as error:  # its signed hashes cannot be read
            return str(error)
        except StorageError as error:
            if error.errno not in damage:
                raise
            return str(error)
        if found > expected and isinstance(file, ForeignFile) and not file.exact:
            return None
        return None if found == expected else f"{location} must have {expected:,} bytes, got {found:,}"

    ordered = sorted(locations)
    found = await gather_limited(ordered, fault, AT_ONCE)
    return {location: line for location, line in zip(ordered, found, strict=True) if line}
