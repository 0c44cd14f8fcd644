"""Merged weights: averages, weighted sums, and LoRA adapters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapshot_merge.lora import merge_lora
    from snapshot_merge.merging import merge
    from snapshot_merge.options import MergeOptions, PEFTOptions

__all__ = ["MergeOptions", "PEFTOptions", "merge", "merge_lora"]
_HOMES = {
    "MergeOptions": "snapshot_merge.options",
    "PEFTOptions": "snapshot_merge.options",
    "merge": "snapshot_merge.merging",
    "merge_lora": "snapshot_merge.lora",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
