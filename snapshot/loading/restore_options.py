"""The options of a restore, as a value."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from snapshot.io.url import Source
from snapshot.manifest.document import Document
from snapshot.plan.names import Rename
from snapshot.progress import ProgressArgument

if TYPE_CHECKING:
    from snapshot.maps.tensor_map import TensorMap

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
Environment = Literal["log", "ignore"]


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options of a restore, for `Snapshot.restore` and `SnapshotManager.restore_latest`.

    If a call has an argument of the same name, the argument takes precedence. A wrong value raises `ValueError` when
    the restore begins, on all ranks.

    >>> from snapshot import RestoreOptions, Snapshot, StateDict
    >>> progress = StateDict(step=3)
    >>> snapshot = Snapshot.take("memory://docs/atomic", {"progress": progress})
    >>> report = snapshot.restore({"progress": progress}, options=RestoreOptions(atomic=True))
    """

    strict: bool = True
    """As for `Snapshot.restore`."""
    exact: bool = False
    """Remove the keys of a `StateDict` that the snapshot lacks; otherwise they keep their values."""
    mismatched: Mismatched = "error"
    """What to do about a tensor of another shape: raise an `"error"`, or `"skip"` it and leave it unchanged."""
    select: Sequence[str] = ()
    """As for `Snapshot.restore`."""
    exclude: Sequence[str] = ()
    """Globs to leave out."""
    rename: Rename | None = None
    """As for `Snapshot.restore`."""
    map: TensorMap | None = None
    """Recipes that turn the snapshot's tensors into those of the application: other names, splits, stacks and
    transpositions. All other arguments refer to the new names."""
    cast: Cast = "error"
    """Whether a dtype may differ: `"error"`, `"same_kind"` (as `torch.can_cast` has it) or `"any"`."""
    verify: bool = True
    """Verify the digest of every byte that is read."""
    atomic: bool = False
    """Verify every byte before any live tensor is written. This reads everything twice."""
    memory_budget_bytes: int | None = None
    """Host memory for reads that cannot go to their destination directly.

    The default is 64 MiB for files, and 256 MiB for other storages or with a GPU.
    """
    read_once: Literal["auto"] | bool = "auto"
    """Whether one rank reads replicated data and sends it to the others."""
    base: Source | None = None
    """The base of a snapshot that was taken with `only="trainable"`, or a copy of the base.

    It is a snapshot or a folder of weights. What the snapshot left out is read from there. Without `base`, it is
    compared with the live tensors, and any difference is an error, even with `strict=False`.
    """
    unused: Unused = "warn"
    """As for `Snapshot.restore`."""
    environment: Environment = "log"
    """`"log"` a line if what changes the numbers of a training differs from the take: versions of torch and of
    frameworks, the number of ranks, mixed precision, kernels. `"ignore"` it otherwise."""
    progress: ProgressArgument = None
    """True for a progress bar, or a function that is called with `Progress`."""
    timeout: float | None = None
    """Seconds without a heartbeat after which another rank counts as dead."""

    def check(self) -> None:
        """Raise for a wrong value. A restore calls it when the error can be sent to the other ranks."""
        for name in ("strict", "exact", "verify", "atomic"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("select", "exclude"):
            globs = getattr(self, name)
            if not isinstance(globs, (list, tuple, set, frozenset)) or not all(isinstance(each, str) for each in globs):
                raise TypeError(f"{name} must be a list of globs, got {globs!r}")
        if (
            self.base is not None
            and not isinstance(self.base, (str, os.PathLike))
            and not hasattr(self.base, "location")
        ):
            raise TypeError(f"base must be a path, a URL or a Snapshot, got {type(self.base).__name__}")
        if self.cast not in CASTS:
            raise ValueError(f"cast must be {', '.join(map(repr, CASTS))}, got {self.cast!r}")
        if self.read_once not in ("auto", True, False):
            raise ValueError(f"read_once must be 'auto', True or False, got {self.read_once!r}")
        if self.unused not in ("warn", "error", "ignore"):
            raise ValueError(f"unused must be 'warn', 'error' or 'ignore', got {self.unused!r}")
        if self.environment not in ("log", "ignore"):
            raise ValueError(f"environment must be 'log' or 'ignore', got {self.environment!r}")
        if self.mismatched not in ("error", "skip"):
            raise ValueError(f"mismatched must be 'error' or 'skip', got {self.mismatched!r}")


RESTORE_OPTIONS = RestoreOptions()
"""The defaults."""
