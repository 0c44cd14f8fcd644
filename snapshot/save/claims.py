"""Claims: the file that tells others that a save is running, and the saves that are pending in this process."""

from __future__ import annotations

from snapshot.per_process import PerProcess

# A forked child keeps the ids: its parent's saves are still running.
_pending: PerProcess[set[str]] = PerProcess(set, set)


def claim_path(save_id: str) -> str:
    """Return the path of a claim: it says that a save is running, or was interrupted."""
    return f".take-{save_id}"


def pending_saves() -> set[str]:
    """Return the ids of the saves that are pending in this process. Cleaning spares their files."""
    return _pending.get()
