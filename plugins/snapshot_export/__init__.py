"""Exports of a manager's steps in other formats, made in the background by a process of low priority."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapshot_export.kept_export import KeptExport

__all__ = ["KeptExport"]
_HOMES = {"KeptExport": "snapshot_export.kept_export"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
