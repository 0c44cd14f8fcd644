"""The argument `exports` of a manager: what is made of committed steps in the background, by a plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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

    def close(self, *, patient: Callable[[], bool]) -> object:
        """End. Wait for running work, while `patient()` returns True."""


class StepExport(Protocol):
    """An export, as a user describes it."""

    @property
    def name(self) -> str: ...

    def open(self, root: Root, released: Callable[[], object]) -> StepExporter:
        """Return what runs. It calls `released` when it needs a step no more."""
        ...
