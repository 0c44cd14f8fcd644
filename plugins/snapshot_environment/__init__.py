"""What a state was computed with: recorded by each take, and compared at a restore and by `snapshot diff`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapshot_environment.facts import note

__all__ = ["note"]
_HOMES = {"note": "snapshot_environment.facts"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
