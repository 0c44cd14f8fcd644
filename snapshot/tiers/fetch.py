"""Files of a snapshot that are fetched from another host or from the far storage: verified, then renamed into place.

A file is written aside first. A damaged file is never overwritten, since another step may share its bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.io.aio import gather_limited
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.loading.open import read_parts
from snapshot.manifest.document import Document, ManifestPart, PartEntry
from snapshot.plan.layout import FilePlan
from snapshot.progress import unmetered
from snapshot.save.compression import Packing
from snapshot.save.writer import Writer
from snapshot.tensors.digest import RunningDigest
from snapshot.transform.sources import (
    CheckedRange,
    CopiedFile,
    PlainDigest,
    ReadAhead,
    checked_files,
    copy_files_through,
)

PIECE = 4 << 20
"""Bytes that are read at once to verify a file: a multiple of a digest's block."""
AT_ONCE = 4
"""Files that are copied in parallel. A failure of one leaves those that are finished."""


def aside_of(location: str) -> str:
    """Return a name for a file until it is whole. No other process uses it."""
    folder, _, name = location.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(4)}.aside"


async def describe_files(session: Session, document: Document, locations: Sequence[str]) -> list[CopiedFile]:
    """Return files of a step with the digests that their bytes must have.

    Those of a rank with a part of the manifest need that part in the session's storage.
    """
    wanted = set(locations)
    parts = [each for each in document.parts if each.location in wanted]
    ranks = {rank_of(each) for each in locations}
    needed = [each for each in document.parts if rank_of(each.location) in ranks]
    held: list[ManifestPart] = await read_parts(session, needed) if wanted - {each.location for each in parts} else []
    data = {each: None for each in locations if each in document.files}
    files = checked_files(document, held, data, url=session.url, verify=True) if data else []
    return [*map(described_part, parts), *files]


def described_part(part: PartEntry) -> CopiedFile:
    """Return a part of a manifest as a file to copy."""
    return CopiedFile(part.location, part.size, None, (CheckedRange(part.location, 0, part.size, part.digest, True),))


def rank_of(location: str) -> str:
    """Return the rank in the name of a data file."""
    return location.partition("-")[2].partition("-")[0].partition(".")[0]


async def copy_verified(
    source: Session,
    target: Session,
    files: Sequence[CopiedFile],
    progress: Callable[[int], None] = unmetered,
    *,
    pack: Callable[[CopiedFile], Coroutine[Any, Any, Packing | None]] | None = None,
) -> None:
    """Copy files and compare all bytes with their digests. A file has its name only when it is whole.

    `pack` returns the compression of a file.
    """
    renames = target.storage.capabilities.renames

    async def one(file: CopiedFile) -> None:
        name = aside_of(file.location) if renames else file.location

        async def write(writer: Writer, plans: Sequence[FilePlan], ahead: ReadAhead | None) -> object:
            return await writer.write(plans, [name], ahead)

        packing = await pack(file) if pack is not None else None
        await copy_files_through(source, target, [file], progress, write, packing=packing)
        if renames:
            await target.storage.rename(name, file.location)

    await gather_limited(files, one, AT_ONCE)
    await target.storage.settle()


async def is_intact(storage: Storage, file: CopiedFile) -> bool:
    """Read a file, and return True if all of its bytes match their digests."""
    view = memoryview(bytearray(min(PIECE, max(1, file.size))))
    for each in file.ranges:
        digest = PlainDigest() if each.plain else RunningDigest()
        for begin in range(each.begin, each.end, len(view)):
            piece = view[: min(len(view), each.end - begin)]
            await storage.read_into(file.location, begin, [piece])
            digest.update(piece)
        if each.digest is not None and digest.finish()[0] != each.digest:
            return False
    return True


async def remove_asides(storage: Storage) -> None:
    """Remove files that were never finished. No other process may be writing to this storage."""
    with suppress(SnapshotError):
        left = [each for each in await storage.list("data/") if each.endswith(".aside")]
        await storage.delete(left)
