"""What a snapshot says of itself as a whole, for users."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import DEEPEST, Document, copy_manifest, measure_nesting
from snapshot.manifest.entry import Entry


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """When, by which version, and with which metadata of the user's a snapshot was taken."""

    format: str
    version: str
    """The library's version."""
    save_id: str
    """Fresh for every take; the names of its data files begin with it."""
    world_size: int
    created: datetime
    structure: str
    """A digest of all names, shapes and dtypes: equal for snapshots of the same structure."""
    metadata: dict[str, Any]
    """What was given as `metadata` to `take`."""
    entries: int
    """Tensors, values and empty containers, of all ranks; a container that holds something is not counted."""
    nbytes: int
    """Bytes of the data files."""
    files: dict[str, int]
    """The data files, and how many bytes each has."""
    _document: Document = field(repr=False, compare=False)

    @property
    def manifest(self) -> dict[str, Entry]:
        """What `Snapshot.get_manifest()` returns: an entry for each object. A copy."""
        return copy_manifest(self._document.manifest)

    @classmethod
    def of(cls, document: Document) -> SnapshotMetadata:
        """From the manifest's document."""
        if measure_nesting(document.metadata) > DEEPEST:
            raise CorruptSnapshotError(f"the manifest's metadata nests more than {DEEPEST} deep")
        try:
            created = datetime.fromisoformat(document.created)
            metadata = msgspec.json.decode(document.metadata, type=dict[str, Any])
        except (ValueError, msgspec.DecodeError) as error:
            raise CorruptSnapshotError(f"the manifest's date or metadata cannot be read: {error}") from error
        return cls(
            document.format,
            document.version,
            document.save_id,
            document.world_size,
            created,
            document.structure,
            metadata,
            count_entries(document.manifest),
            sum(file.size for file in document.files.values()),
            {location: file.size for location, file in document.files.items()},
            document,
        )
