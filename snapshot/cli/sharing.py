"""Sizes of snapshots that share physical bytes, by their manifests.

Inodes tell nothing here: a clone of a file has its own inode, and object stores have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from snapshot.checkpoint import Checkpoint
from snapshot.cli.locate import snapshots_below, work_concurrently
from snapshot.errors import SnapshotError
from snapshot.loading.stored_ranges import stored_in, stored_of
from snapshot.manifest.document import OWN_FORMATS
from snapshot.manifest.entry import Entry
from snapshot.metadata import SnapshotMetadata
from snapshot.text import size_text
from snapshot.url import URL


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the data files of one snapshot."""

    nbytes: int
    """Bytes of its files, as if it shared none."""
    own: int
    """Bytes that no other snapshot of the folder has."""

    @property
    def shared(self) -> int:
        """Bytes that another snapshot of the folder has, too."""
        return self.nbytes - self.own


class SharedFiles:
    """The physical files of the snapshots of a folder."""

    def __init__(self, snapshots: Mapping[str, SnapshotMetadata]) -> None:
        self._files: dict[str, dict[str, int]] = {}
        saves = set[str]()
        for name, metadata in snapshots.items():
            ours = metadata.format in OWN_FORMATS and metadata.save_id not in saves  # or another tool copied it
            saves.add(metadata.save_id)
            self._files[name] = _physical_files(metadata, "" if ours else f"{name}/")
        self._saves = {name: metadata.save_id for name, metadata in snapshots.items()}
        references = {name: metadata._document.base for name, metadata in snapshots.items()}
        self._bases = {name: base.save_id for name, base in references.items() if base is not None}
        self._holders = Counter(file for held in self._files.values() for file in held)

    def sizes(self, name: str) -> Sizes:
        """Return the sizes of a snapshot."""
        held = self._files[name]
        own = sum(size for file, size in held.items() if self._holders[file] == 1)
        return Sizes(sum(held.values()), own)

    def apparent(self) -> int:
        """Return the bytes of all snapshots together, as if they shared none."""
        return sum(sum(held.values()) for held in self._files.values())

    def physical(self) -> int:
        """Return the bytes of all snapshots together, each physical file once."""
        return sum({file: size for held in self._files.values() for file, size in held.items()}.values())

    def dependents(self, name: str) -> list[str]:
        """Return the snapshots that left out tensors that this one has."""
        mine = self._saves.get(name)
        if any(save_id == mine for each, save_id in self._saves.items() if each != name and each in self._files):
            return []  # it has a copy
        return [each for each, save_id in self._bases.items() if save_id == mine]

    def remove(self, name: str) -> Sizes:
        """Forget a snapshot, as if it were removed. Return its sizes before: its own bytes are freed."""
        sizes = self.sizes(name)
        self._holders.subtract(self._files.pop(name).keys())
        self._bases.pop(name, None)
        return sizes


def _physical_files(metadata: SnapshotMetadata, prefix: str) -> dict[str, int]:
    """Return the size of each physical file of a snapshot, by the name of the first file that had its bytes."""
    files = metadata._document.own_files
    return {f"{prefix}{file.origin or location}": file.stored_size for location, file in files.items()}


def read_below(url: URL, options: Mapping[str, Any] | None) -> dict[str, SnapshotMetadata]:
    """Return the metadata of all snapshots directly below a URL, without those that cannot be read."""

    def look(name: str) -> SnapshotMetadata | None:
        try:
            return Checkpoint(url.join(name).reveal(), storage_options=options).metadata
        except SnapshotError:
            return None

    names = snapshots_below(url, options)
    return {name: held for name, held in zip(names, work_concurrently(look, names), strict=True) if held is not None}


def shared_bytes(metadata: SnapshotMetadata) -> int:
    """Return the bytes of the files that share their bytes with an earlier snapshot."""
    return sum(file.stored_size for file in metadata._document.own_files.values() if file.origin is not None)


def sharing(metadata: SnapshotMetadata) -> dict[str, tuple[str, int]]:
    """Return, for each shared file, the file that it shares its bytes with, and the takes since they were written."""
    files = metadata._document.own_files
    return {location: (file.origin, file.age) for location, file in files.items() if file.origin is not None}


def base_url(metadata: SnapshotMetadata) -> str:
    """Return the place of the base that has what was left out; empty if nothing was."""
    base = metadata._document.base
    return "" if base is None else base.url


def bytes_in_base(metadata: SnapshotMetadata) -> int:
    """Return the bytes that were left out of a snapshot, since its base has them."""
    document = metadata._document
    held = document.files.keys() - document.own_files.keys()
    ranges = {(each.location, *each.byte_range) for each in stored_in(document.manifest) if each.location in held}
    return sum(end - begin for _, begin, end in ranges)


def is_in_base(metadata: SnapshotMetadata, entry: Entry) -> bool:
    """Return True if only the base has the bytes of an entry, or a part of them."""
    document = metadata._document
    held = document.files.keys() - document.own_files.keys()
    return any(each.location in held for each in stored_of(entry))


def describe_sharing(metadata: SnapshotMetadata) -> Iterable[str]:
    """Yield what a snapshot shares with earlier ones, and what it leaves to its base."""
    if shared := shared_bytes(metadata):
        yield f"{size_text(shared)} shared with earlier snapshots"
    if left := bytes_in_base(metadata):
        yield f"{size_text(left)} left to the base {base_url(metadata)}"
