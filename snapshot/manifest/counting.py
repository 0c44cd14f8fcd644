"""Counting of entries, consistent in all reports, listings and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.manifest.containers import Container
from snapshot.manifest.entries import Entry


def is_leaf(entry: Entry) -> bool:
    """Return True if an entry counts: a tensor, a value, or an empty container.

    Other containers are represented by their contents.
    """
    return not (isinstance(entry, Container) and entry.width)


def count_entries(manifest: Mapping[str, Any]) -> int:
    """Return the number of entries that count."""
    return sum(map(is_leaf, manifest.values()))
