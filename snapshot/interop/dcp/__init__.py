"""`torch.distributed.checkpoint` with this library's engine: a storage writer and a storage reader for snapshots."""

from __future__ import annotations

from snapshot.interop.dcp.reader import SnapshotReader
from snapshot.interop.dcp.writer import SnapshotWriter

__all__ = ["SnapshotReader", "SnapshotWriter"]
