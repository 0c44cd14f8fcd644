"""The checksums in others' archives, compared before anything is done with what they are of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snapshot.engine.loop import run
from snapshot.engine.operation import Operation
from snapshot.errors import CorruptSnapshotError
from snapshot.formats import checksums
from snapshot.manifest.check import Files
from snapshot.report import listed


def expect_sums(operation: Operation, stored: Iterable[Any], files: Files) -> None:
    """Raise where stored ranges, or others in the same archives, are not what their archives say that they are."""
    archives = checksums.archives(stored, files)
    if not archives:
        return
    faults, _ = run(checksums.faults(operation.storage, operation.budget, archives.values(), lambda _: None))
    if faults:
        raise CorruptSnapshotError(f"{operation.url}: {len(faults)} damaged:{listed(faults)}", faults=faults)
