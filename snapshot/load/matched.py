"""What is chosen of a snapshot, and what of that has a place in the application: values that pass between the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snapshot.state.state_tree import ChosenState


@dataclass
class ChosenEntries:
    """What of a snapshot is asked for, before anything is compared with the application."""

    grouped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key -> path -> entry."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys of which a part is asked for."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not asked for."""
    lacking: bool = False
    """True if the snapshot, or what was read of its manifest, lacks a key."""
    unknown: list[str] = field(default_factory=list)
    """Why something that was asked for was not found here; another rank may have it."""
    incomplete: bool = False
    """True if something may be in parts of the manifest that were not read yet."""


@dataclass
class Matched:
    """What is restored, and what is left as it is."""

    restored: int = 0
    left: bool = False
    """True if something that the snapshot has is left as it is, since it does not fit."""
    unfit: set[str] = field(default_factory=set)
    """Tensors that are left as they are, since their shape differs."""
    unfit_memory: set[int] = field(default_factory=set)
    """Addresses of the memory of those tensors."""
    shapes: bool = False
    """True if a shape that differs is among the mismatches."""
    lacking: bool = False
    """True if the application has names that were not found."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys of which a part is restored."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not asked for."""
    dropped: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> what is removed there before its state is handed back."""
    unexpected: dict[str, None] = field(default_factory=dict)
    """Names of modules that are shared, and which this rank has no use for: another rank may."""
