"""Results of selection and matching, as values that are passed between the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snapshot.loading.aliasing import Twin
from snapshot.state.state_tree import ChosenState


@dataclass
class ChosenEntries:
    """The requested entries of a snapshot, before they are compared with the application."""

    grouped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key -> path -> entry."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys that are requested in part."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not requested."""
    lacking: bool = False
    """True if the snapshot, or the manifest parts that were read, lack a key."""
    unknown: list[str] = field(default_factory=list)
    """Requested names that were not found here, with the reason; another rank may have them."""
    incomplete: bool = False
    """True if a requested entry may be in manifest parts that have not been read yet."""


@dataclass
class Matched:
    """The entries that are restored, and those that are left unchanged."""

    restored: int = 0
    left: bool = False
    """True if a saved value does not fit and is not restored."""
    unfit: set[str] = field(default_factory=set)
    """Tensors that are left unchanged because their shape differs."""
    unfit_memory: set[int] = field(default_factory=set)
    """Addresses of the memory of those tensors."""
    shapes: bool = False
    """True if a mismatch is about a shape."""
    lacking: bool = False
    """True if the application has names that were not found."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys that are restored in part."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not requested."""
    tied: set[str] = field(default_factory=set)
    """Names of live tensors that are restored under another name."""
    twins: list[Twin] = field(default_factory=list)
    """Entries of those names, whose bytes must be equal."""
    dropped: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> names that are removed before its state is handed back."""
    unexpected: dict[str, None] = field(default_factory=dict)
    """Shared module names that this rank does not use, but another rank may."""
