"""What a manager lets make something of committed steps, in the background: its argument `exports`, and its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from snapshot.manager.retention import Cleaner
from snapshot.manager.root import Root


class StepExporter(Protocol):
    """What runs for a manager."""

    def committed(self, step: int) -> object:
        """Rank 0 has committed or restored a step. Called on the loop, so nothing here may block."""

    def needs(self, step: int) -> bool:
        """Return True while a step must not be removed. Called on the loop, too."""
        ...

    def removed(self, steps: Sequence[int]) -> object:
        """Remove what was made of steps that were removed. Called in the thread that does it."""

    def close(self, *, patient: bool) -> object:
        """End. `patient`: wait for running work."""


class StepExport(Protocol):
    """An export, as a user describes it."""

    @property
    def name(self) -> str: ...

    def open(self, root: Root, released: Callable[[], object]) -> StepExporter:
        """Return what runs. It calls `released` when it needs a step no more."""
        ...


def checked_exports(exports: Any, near: Any) -> tuple[StepExport, ...]:
    """Return the exports; raise TypeError or ValueError if invalid."""
    if not isinstance(exports, (list, tuple)) or not all(hasattr(each, "open") for each in exports):
        raise TypeError(f"exports must be a list such as [KeptExport(...)], got {exports!r}")
    if exports and near is not None:
        raise ValueError("exports must be empty with `near`, since no host may have a whole step; use `convert`")
    names = [each.name for each in exports]
    if len({*names}) < len(names):
        raise ValueError(f"exports must have different names, got {', '.join(names)}")
    return tuple(exports)


class Exporters:
    """The exporters of a manager."""

    def __init__(self) -> None:
        self._all: list[StepExporter] = []

    def open(self, exports: Sequence[StepExport], root: Root, cleaner: Cleaner | None) -> None:
        self._all = [each.open(root, cleaner.look_again if cleaner else list) for each in exports]
        if cleaner is not None:
            cleaner.removed = lambda steps: [each.removed(steps) for each in self._all]

    def committed(self, step: int, *, leads: bool) -> None:
        for each in self._all if leads else ():
            each.committed(step)

    def need(self, step: int) -> bool:
        return any(each.needs(step) for each in self._all)

    def close(self, *, patient: bool) -> None:
        for each in self._all:
            each.close(patient=patient)
