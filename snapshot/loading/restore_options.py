"""The arguments of a restore, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from snapshot.manifest.document import Document
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.renaming import Rename
from snapshot.progress import ProgressArgument
from snapshot.signing.keys import Key
from snapshot.storage_options import Source

Accept = Callable[[Document], None]
"""A check of a manifest, which raises if it refuses it."""
CASTS: dict[str, Callable[[torch.dtype, torch.dtype], bool]] = {
    "error": lambda saved, wanted: False,
    "same_kind": torch.can_cast,
    "any": lambda saved, wanted: True,
}
"""Rules for `cast`: each returns True if a saved dtype may be cast to the wanted one."""


Mismatched = Literal["error", "skip"]
Cast = Literal["error", "same_kind", "any"]
Unused = Literal["warn", "error", "ignore"]


class RestoreArguments(TypedDict, total=False):
    """Arguments of `Snapshot.restore`, for functions that pass them on."""

    strict: bool
    exact: bool
    mismatched: Mismatched
    include: Sequence[str]
    exclude: Sequence[str]
    rename: Rename | None
    map: TensorMap | None
    cast: Cast
    verify: bool
    atomic: bool
    memory_budget_bytes: int | None
    read_once: Literal["auto"] | bool
    base: Source | None
    unused: Unused
    key: Key | None
    """For `SnapshotManager.restore_latest`; a `Snapshot` has its own `key`."""
    progress: ProgressArgument
    timeout: float | None


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The arguments of `Snapshot.restore`: which entries are restored, and which differences are allowed."""

    strict: bool = True
    exact: bool = False
    mismatched: Mismatched = "error"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    map: TensorMap | None = None
    cast: Cast = "error"
    verify: bool = True
    atomic: bool = False
    memory_budget_bytes: int | None = None
    read_once: Literal["auto"] | bool = "auto"
    base: Source | None = None
    """The snapshot that has what this one left out, or its URL."""
    unused: Unused = "warn"
    key: Key | None = None
    """The key that must have signed the snapshot, in place of the key of the `Snapshot`."""
    progress: ProgressArgument = None
    timeout: float | None = None

    def check(self) -> None:
        """Raise `ValueError` for an invalid choice. Called when the error can be sent to the other ranks."""
        if self.cast not in CASTS:
            raise ValueError(f"cast must be {', '.join(map(repr, CASTS))}, got {self.cast!r}")
        if self.read_once not in ("auto", True, False):
            raise ValueError(f"read_once must be 'auto', True or False, got {self.read_once!r}")
        if self.unused not in ("warn", "error", "ignore"):
            raise ValueError(f"unused must be 'warn', 'error' or 'ignore', got {self.unused!r}")
        if self.mismatched not in ("error", "skip"):
            raise ValueError(f"mismatched must be 'error' or 'skip', got {self.mismatched!r}")
