"""Parts of adapters whose framework loads a state itself: a value to save, and the look for a snapshot."""

from __future__ import annotations

from typing import Any

from snapshot.errors import SnapshotError
from snapshot.manifest.document import OWN_FORMATS
from snapshot.snapshot import Snapshot


class Given:
    """Stateful wrapper of a value to save. A restore into it raises `SnapshotError` with the advice."""

    def __init__(self, value: Any, advice: str) -> None:
        self._value = value
        self._advice = advice

    def state_dict(self) -> Any:
        """Return the value."""
        return self._value

    def load_state_dict(self, state: Any) -> None:
        """Raise: the framework loads the state."""
        raise SnapshotError(self._advice)


def is_snapshot(path: Any) -> bool:
    """Return True if a folder has a snapshot of this library, and not another library's checkpoint."""
    snapshot = Snapshot(path)
    return snapshot.exists() and snapshot.metadata.format in OWN_FORMATS
