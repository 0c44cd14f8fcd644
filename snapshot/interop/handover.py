"""Statefuls of adapters: a value to save, and a model without frozen parameters. The look for a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.errors import RestoreError, SnapshotError
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


class TrainableState:
    """The state of a model without its frozen parameters, which come from elsewhere."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return trained parameters, and buffers."""
        frozen = {name for name, each in self._model.named_parameters(remove_duplicate=False) if not each.requires_grad}
        return {name: value for name, value in self._model.state_dict().items() if name not in frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raise if a part of it is missing, or is unknown."""
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise RestoreError(f"the snapshot has no {', '.join(missing[:8])}, which the model trains", missing)
        unknown = self._model.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise RestoreError(f"the model has no {', '.join(unknown[:8])}", unknown)


def is_snapshot(path: Any) -> bool:
    """Return True if a folder has a snapshot of this library, and not another library's checkpoint."""
    snapshot = Snapshot(path)
    return snapshot.exists() and snapshot.metadata.format in OWN_FORMATS
