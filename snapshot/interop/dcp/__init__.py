"""`torch.distributed.checkpoint` with our engine: a storage writer whose checkpoints are snapshots, and a reader."""

from __future__ import annotations

from snapshot.interop.dcp.snapshot_reader import SnapshotReader
from snapshot.interop.dcp.snapshot_writer import SnapshotWriter

__all__ = ["SnapshotReader", "SnapshotWriter"]
