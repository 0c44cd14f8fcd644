"""Exact, verified, fast checkpoints of running PyTorch applications."""

from snapshot.difference import Diff
from snapshot.engine.arena import release_memory
from snapshot.errors import (
    CancelledError,
    CommitUnknown,
    CorruptSnapshotError,
    MissingExtraError,
    RankError,
    RestoreError,
    SnapshotBusyError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StorageError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.manager.manager import SnapshotManager
from snapshot.manager.policies import KeepBest, KeepEvery, KeepFor, KeepLatest
from snapshot.manager.signals import ignore_stop_signals
from snapshot.pending import PendingSnapshot
from snapshot.report import ConvertReport, CopyReport, Progress, RestoreReport, VerifyReport
from snapshot.saved import SavedObject
from snapshot.snapshot import Snapshot
from snapshot.state.model import ModelState
from snapshot.state.rng import RNGState
from snapshot.state.shards import Sharded
from snapshot.state.stateful import StateDict, Stateful

__all__ = [
    "Snapshot",
    "PendingSnapshot",
    "SnapshotManager",
    "KeepLatest",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "ignore_stop_signals",
    "Stateful",
    "StateDict",
    "RNGState",
    "Sharded",
    "SavedObject",
    "ModelState",
    "RestoreReport",
    "VerifyReport",
    "ConvertReport",
    "CopyReport",
    "Diff",
    "Progress",
    "SnapshotError",
    "SnapshotNotFoundError",
    "SnapshotExistsError",
    "CorruptSnapshotError",
    "UnsupportedFormatError",
    "UnsafeObjectError",
    "RestoreError",
    "CommitUnknown",
    "CancelledError",
    "SnapshotBusyError",
    "RankError",
    "StorageError",
    "MissingExtraError",
    "release_memory",
]
