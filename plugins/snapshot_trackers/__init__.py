"""Experiment trackers that name each snapshot by its URL and its digest, and read none of its bytes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapshot_trackers.trackers import MLflowTracker, TensorBoardTracker, WandbTracker

__all__ = ["MLflowTracker", "TensorBoardTracker", "WandbTracker"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("snapshot_trackers.trackers"), name)
