"""Objects with a class of their own for formats that have no place for a class: as what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.manifest import entries as e
from snapshot.manifest.typed import EnumEntry


def without_classes(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Entries of which none needs a class that only the application has; and a line for each that lost its own.

    A dataclass becomes a dict of its fields, a wrapped tensor a dict of its inner ones, a member of an Enum its value.
    """
    made: dict[str, Any] = {}
    lines = []
    for path, entry in entries.items():
        if isinstance(entry, e.Compound):
            made[path] = e.DictEntry(entry.keys, entry.tagged, entry.replicated)
            lines.append(f"{path}: the class {entry.obj_type}; it is a dict")
        elif isinstance(entry, EnumEntry):
            made[path] = entry.to_scalar()
            lines.append(f"{path}: the class {entry.obj_type}; it is its {'value' if entry.held else 'name'}")
        else:
            made[path] = entry
    return made, lines
