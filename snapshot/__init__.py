"""Exact, verified, fast checkpoints of running PyTorch applications."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from snapshot.errors import (
        CommitUnknown,
        CorruptSnapshotError,
        RankError,
        RestoreError,
        SnapshotError,
        SnapshotExistsError,
        SnapshotNotFoundError,
        StorageError,
    )
    from snapshot.loading.restore_options import RestoreOptions
    from snapshot.manager.manager import SnapshotManager
    from snapshot.manager.policies import KeepBest, KeepEvery, KeepFor, KeepLatest
    from snapshot.manager.takes import Tolerate
    from snapshot.manager.thinning import KeepSpread, KeepWithin
    from snapshot.maps.tensor_map import TensorMap
    from snapshot.save.take_options import TakeOptions
    from snapshot.snapshot import PendingSnapshot, Snapshot
    from snapshot.state.model_state import ModelState
    from snapshot.state.rng import RNGState
    from snapshot.state.sharded import Sharded
    from snapshot.state.stateful import StateDict, Stateful
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
    "KeepWithin",
    "KeepSpread",
    "Stateful",
    "StateDict",
    "RNGState",
    "Sharded",
    "TensorMap",
    "ModelState",
    "SnapshotError",
    "SnapshotNotFoundError",
    "SnapshotExistsError",
    "CorruptSnapshotError",
    "RestoreError",
    "CommitUnknown",
    "RankError",
    "StorageError",
    "load",
]

_MODULES = {
    "snapshot.errors": (
        "CommitUnknown",
        "CorruptSnapshotError",
        "RankError",
        "RestoreError",
        "SnapshotError",
        "SnapshotExistsError",
        "SnapshotNotFoundError",
        "StorageError",
    ),
    "snapshot.loading.restore_options": ("RestoreOptions",),
    "snapshot.manager.manager": ("SnapshotManager",),
    "snapshot.manager.takes": ("Tolerate",),
    "snapshot.manager.thinning": ("KeepSpread", "KeepWithin"),
    "snapshot.manager.policies": (
        "KeepBest",
        "KeepEvery",
        "KeepFor",
        "KeepLatest",
    ),
    "snapshot.maps.tensor_map": ("TensorMap",),
    "snapshot.save.take_options": ("TakeOptions",),
    "snapshot.snapshot": ("PendingSnapshot", "Snapshot"),
    "snapshot.state.model_state": ("ModelState",),
    "snapshot.state.rng": ("RNGState",),
    "snapshot.state.sharded": ("Sharded",),
    "snapshot.state.stateful": (
        "StateDict",
        "Stateful",
    ),
    "snapshot.transform.target": ("Target",),
    "snapshot.weights": ("load",),
}
"""The module that each public name is imported from on first use, so that the command's help does not import torch."""
_IMPORTERS = ("importlib._bootstrap", "_frozen_importlib")
"""The module that runs `from snapshot import NAME`. It hides the text of an AttributeError, and lets others through."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        return import_module("snapshot.text").VERSION
    if name not in _HOMES:
        from snapshot.extensions import NAMES

        where = f"; import it from {NAMES[name]}" if name in NAMES else ""
        caller = sys._getframe(1).f_globals  # noqa: SLF001 - CPython documents it
        if where and caller.get("__name__") in _IMPORTERS:
            raise ImportError(f"cannot import name {name!r} from {__name__!r}{where}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
    from snapshot.io.system import gc_paused

    with gc_paused():  # torch's objects are many: one collection takes longer than all imports, and finds nothing
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
