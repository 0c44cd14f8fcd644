"""Objects with a class of their own, as plain values for formats without classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.manifest import entries as e
from snapshot.manifest.typed import EnumEntry


def without_classes(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return entries that need no class of the application, and a line for each entry that lost its class.

    A dataclass becomes a dict of its fields, a wrapped tensor a dict of its inner tensors, and an Enum member its
    value.
    """
    made: dict[str, Any] = {}
    lines = []
    for path, entry in entries.items():
        if isinstance(entry, e.Compound):
            made[path] = e.DictEntry(entry.keys, entry.tagged, entry.replicated)
            lines.append(f"{path}: the class {entry.described}; stored as a dict")
        elif isinstance(entry, EnumEntry):
            made[path] = entry.to_scalar()
            lines.append(f"{path}: the class {entry.obj_type}; stored as its {'value' if entry.held else 'name'}")
        else:
            made[path] = entry
    return made, lines
