"""The head of a manifest: all of its fields but the entries, since there may be many."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.manifest.document import BaseReference, FileEntry, PartEntry
from snapshot.tensors.digest import digest_range


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
        return sum(each.stored_size for each in self.files.values() if not each.in_base)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file that the snapshot has: data, and parts of the manifest."""
        sizes = {name: each.stored_size for name, each in self.files.items() if not each.in_base}
        return sizes | {each.location: each.size for each in self.parts}

    def copies(self) -> dict[str, str]:
        """Return the physical file of each content that an incremental take recorded."""
        return {each.content: each.origin or name for name, each in self.files.items() if each.content is not None}


OURS = re.compile(rb'\{"format":"snapshot/[123]","version":"[^"]{1,80}","save_id":"[0-9a-f]{12}",')
_SAVE_ID = re.compile(rb'\{"format":"snapshot/\d{1,9}","version":"[^"]{1,80}","save_id":"([0-9a-f]{12})",')
_DIGEST = re.compile(rb',"digest":"(xxh3:[0-9a-f]{32})"\}$')


def find_save_id(data: bytes) -> str | None:
    """Return the save id in the first bytes of a manifest, which is not verified; None if it is not a manifest."""
    found = _SAVE_ID.match(data)
    return found[1].decode() if found else None


def decode_head(data: bytes, where: object) -> ManifestHead:
    """Return the head of a manifest.

    Raise NotOurs if the data does not begin like a manifest, and CorruptSnapshotError if its checksum is wrong.
    """
    if not OURS.match(data):
        raise NotOurs(f"{where}: not a manifest that this version of the library wrote")
    tail = _DIGEST.search(data, max(0, len(data) - 64))
    if tail is None or digest_range(memoryview(data)[: tail.start()]).encode() != tail[1]:
        raise CorruptSnapshotError(f"{where}: the manifest's checksum is wrong")
    head: ManifestHead = decode_json(data, ManifestHead, where)
    try:
        datetime.fromisoformat(head.created)
    except ValueError as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    return head
