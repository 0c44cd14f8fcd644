"""Exact, verified, fast checkpoints of running PyTorch applications."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from snapshot.errors import (
        CancelledError,
        CommitUnknown,
        CorruptSnapshotError,
        MissingExtraError,
        OtherWriterError,
        RankError,
        RestoreError,
        RunDeletedError,
        RunForkedError,
        SignatureError,
        SnapshotBusyError,
        SnapshotError,
        SnapshotExistsError,
        SnapshotNotFoundError,
        StorageError,
        SuspectStateError,
        UnsafeObjectError,
        UnsupportedFormatError,
    )
    from snapshot.io.arena import release_memory
    from snapshot.loading.choose import RestoreOptions
    from snapshot.manager.manager import SnapshotManager
    from snapshot.manager.policies import KeepBest, KeepEvery, KeepFor, KeepLatest
    from snapshot.manager.schedule import ignore_stop_signals
    from snapshot.manager.takes import Tolerate
    from snapshot.maps.tensor_map import TensorMap
    from snapshot.progress import Progress
    from snapshot.reports import ConvertReport, CopyReport, Diff, RestoreReport, TakeReport, VerifyReport
    from snapshot.save.take_request import TakeOptions
    from snapshot.saved import SavedObject
    from snapshot.snapshot import PendingSnapshot, Snapshot
    from snapshot.state.model_state import ModelState
    from snapshot.state.rng import RNGState
    from snapshot.state.sharded import Sharded
    from snapshot.state.stateful import Reshardable, StateDict, Stateful
    from snapshot.transform.target import Target
    from snapshot.weights import load

__all__ = [
    "Snapshot",
    "PendingSnapshot",
    "Target",
    "SnapshotManager",
    "TakeOptions",
    "RestoreOptions",
    "Tolerate",
    "KeepLatest",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "ignore_stop_signals",
    "Stateful",
    "Reshardable",
    "StateDict",
    "RNGState",
    "Sharded",
    "TensorMap",
    "SavedObject",
    "ModelState",
    "RestoreReport",
    "TakeReport",
    "VerifyReport",
    "ConvertReport",
    "CopyReport",
    "Diff",
    "Progress",
    "SnapshotError",
    "SnapshotNotFoundError",
    "SnapshotExistsError",
    "CorruptSnapshotError",
    "SignatureError",
    "UnsupportedFormatError",
    "UnsafeObjectError",
    "RestoreError",
    "CommitUnknown",
    "CancelledError",
    "SnapshotBusyError",
    "RunForkedError",
    "RunDeletedError",
    "OtherWriterError",
    "RankError",
    "StorageError",
    "SuspectStateError",
    "MissingExtraError",
    "release_memory",
    "load",
]

_MODULES = {
    "snapshot.io.arena": ("release_memory",),
    "snapshot.errors": (
        "CancelledError",
        "CommitUnknown",
        "CorruptSnapshotError",
        "MissingExtraError",
        "OtherWriterError",
        "RankError",
        "RestoreError",
        "RunDeletedError",
        "RunForkedError",
        "SignatureError",
        "SnapshotBusyError",
        "SnapshotError",
        "SnapshotExistsError",
        "SnapshotNotFoundError",
        "StorageError",
        "SuspectStateError",
        "UnsafeObjectError",
        "UnsupportedFormatError",
    ),
    "snapshot.loading.choose": ("RestoreOptions",),
    "snapshot.manager.manager": ("SnapshotManager",),
    "snapshot.manager.takes": ("Tolerate",),
    "snapshot.manager.policies": (
        "KeepBest",
        "KeepEvery",
        "KeepFor",
        "KeepLatest",
    ),
    "snapshot.manager.schedule": ("ignore_stop_signals",),
    "snapshot.reports": (
        "ConvertReport",
        "CopyReport",
        "Diff",
        "RestoreReport",
        "TakeReport",
        "VerifyReport",
    ),
    "snapshot.maps.tensor_map": ("TensorMap",),
    "snapshot.progress": ("Progress",),
    "snapshot.save.take_request": ("TakeOptions",),
    "snapshot.saved": ("SavedObject",),
    "snapshot.snapshot": ("PendingSnapshot", "Snapshot"),
    "snapshot.state.model_state": ("ModelState",),
    "snapshot.state.rng": ("RNGState",),
    "snapshot.state.sharded": ("Sharded",),
    "snapshot.state.stateful": (
        "Reshardable",
        "StateDict",
        "Stateful",
    ),
    "snapshot.transform.target": ("Target",),
    "snapshot.weights": ("load",),
}
"""The module that each public name is imported from on first use, so that the command's help does not import torch."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        return import_module("snapshot.text").VERSION
    if name not in _HOMES:
        from snapshot.extensions import NAMES

        where = f"; import it from {NAMES[name]}" if name in NAMES else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
    from snapshot.io.system import gc_paused

    with gc_paused():  # torch's objects are many: one collection takes longer than all imports, and finds nothing
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
