"""The statistics of tensors that a take stored beside its manifest."""

from __future__ import annotations

from snapshot.errors import CorruptSnapshotError, StorageNotFoundError
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.loading.open import Opened
from snapshot.manifest.document import STATISTICS, Document, ForeignFile
from snapshot.tensors.digest import digest_range
from snapshot_health.statistics import ByPath, TensorStatistics, combine_statistics, decode_statistics

AT_ONCE = 16
"""Files that are read at once."""


def read_statistics(opened: Opened) -> dict[str, TensorStatistics]:
    """Return the statistics of tensors, by their paths in the manifest. No tensor is read.

    The parts that ranks have of one tensor count together.
    """
    document = opened.document
    own = (location for location, file in document.files.items() if not isinstance(file, ForeignFile))
    locations = sorted(location for location in own if location.endswith(STATISTICS))
    parts: dict[str, list[TensorStatistics]] = {}

    async def read(location: str) -> tuple[int, ByPath]:
        return int(location.split("-")[1]), await _read_file(opened, location)

    for rank, held in run(gather_limited(locations, read, AT_ONCE)):
        for path, found in held.items():
            parts.setdefault(_find_name(document, rank, path), []).extend(found)
    return {path: combine_statistics(found) for path, found in parts.items() if path in document.manifest}


def _find_name(document: Document, rank: int, path: str) -> str:
    """Return the name of a tensor in the manifest. Shared ones are under the first rank that has them."""
    own = document.manifest.get(f"{rank}/{path}")
    if own is not None and own.is_tensor and not own.is_shared:
        return f"{rank}/{path}"
    names = (f"{each}/{path}" for each in range(document.world_size))
    return next((name for name in names if name in document.manifest), f"{rank}/{path}")


async def _read_file(opened: Opened, location: str) -> ByPath:
    file, where = opened.document.files[location], opened.storage.url.join(location)
    try:
        data = await opened.storage.get(location, limit=opened.settings.manifest_bytes)
    except StorageNotFoundError as error:
        raise CorruptSnapshotError(f"{error}: the statistics are missing") from error
    if len(data) != file.size or digest_range(data) != file.header_digest:
        raise CorruptSnapshotError(f"{where}: the statistics do not match their digest")
    return decode_statistics(data, f"{where}: not statistics")
