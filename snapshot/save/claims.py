"""Claims: files that tell other processes that a save is running, and the pending saves of this process."""

from __future__ import annotations

from snapshot.per_process import PerProcess

# A forked child keeps the ids: its parent's saves are still running.
_pending: PerProcess[set[str]] = PerProcess(set, set)


def claim_path(save_id: str) -> str:
    """Return the path of a save's claim, which exists while the save runs or after it was interrupted."""
    return f".take-{save_id}"


def pending_saves() -> set[str]:
    """Return the ids of this process's pending saves. Clean-up keeps their files."""
    return _pending.get()
