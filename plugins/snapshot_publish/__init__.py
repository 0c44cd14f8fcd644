"""Published weights: versions for inference engines, with vLLM and verl."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapshot_publish.publisher import PendingPublish, Published, Publisher, PublishOptions
    from snapshot_publish.subscriber import Subscriber

__all__ = ["PendingPublish", "PublishOptions", "Published", "Publisher", "Subscriber"]
_HOMES = {
    "PendingPublish": "snapshot_publish.publisher",
    "PublishOptions": "snapshot_publish.publisher",
    "Published": "snapshot_publish.publisher",
    "Publisher": "snapshot_publish.publisher",
    "Subscriber": "snapshot_publish.subscriber",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
