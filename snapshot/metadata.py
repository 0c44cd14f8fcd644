"""Properties of a whole snapshot, for users."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import DEEPEST, Document, copy_manifest, measure_nesting
from snapshot.manifest.entry import Entry


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """Time, library version and user metadata of a snapshot."""

    format: str
    version: str
    """The library's version."""
    save_id: str
    """A new id for every take. The names of its data files begin with it."""
    world_size: int
    created: datetime
    structure: str
    """A digest of all names, shapes and dtypes: equal for snapshots of the same structure."""
    metadata: dict[str, Any]
    """The `metadata` argument of `take`."""
    entries: int
    """The number of tensors, values and empty containers of all ranks. Other containers are not counted."""
    nbytes: int
    """Total size of the data files."""
    files: dict[str, int]
    """Size of each data file, by name."""
    _document: Document = field(repr=False, compare=False)

    @property
    def compressed(self) -> bool:
        """True if a file is stored compressed."""
        return any(file.packed is not None for file in self._document.own_files.values())

    @property
    def manifest(self) -> dict[str, Entry]:
        """A copy of the manifest, as `Snapshot.get_manifest()` returns it."""
        return copy_manifest(self._document.manifest)

    @classmethod
    def of(cls, document: Document) -> SnapshotMetadata:
        """Create the metadata from a manifest's document."""
        if measure_nesting(document.metadata) > DEEPEST:
            raise CorruptSnapshotError(f"the manifest's metadata must nest at most {DEEPEST} levels")
        metadata = decode_json(document.metadata, dict[str, Any], "cannot read the manifest's metadata")
        try:
            created = datetime.fromisoformat(document.created)
        except ValueError as error:
            raise CorruptSnapshotError(f"cannot read the manifest's date: {error}") from error
        return cls(
            document.format,
            document.version,
            document.save_id,
            document.world_size,
            created,
            document.structure,
            metadata,
            count_entries(document.manifest),
            sum(file.stored_size for file in document.own_files.values()),
            {location: file.stored_size for location, file in document.own_files.items()},
            document,
        )
