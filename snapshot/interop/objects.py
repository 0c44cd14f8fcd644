"""Objects of classes of a framework: a snapshot has their fields, and they are built again from known classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from operator import is_
from typing import Any

from snapshot.errors import CorruptSnapshotError
from snapshot.saved import SavedObject

Find = Callable[[str], type | None]
"""Function that returns a class by its full name; None for a class that is not known."""


def change_leaves(value: Any, path: str, change: Callable[[Any, str], Any]) -> Any:
    """Return nested dicts, lists and tuples with changed leaves. Containers without a changed leaf are not copied."""
    if isinstance(value, dict):
        new = {key: change_leaves(old, f"{path}/{key}", change) for key, old in value.items()}
        changed = {key: made for key, made in new.items() if made is not value[key]}
        if changed:
            value = copy.copy(value)
            value.update(changed)
        return value
    if type(value) in (list, tuple):
        items = [change_leaves(old, f"{path}/{at}", change) for at, old in enumerate(value)]
        return value if all(map(is_, items, value)) else type(value)(items)
    return change(value, path)


def build_objects(value: Any, path: str, find: Find) -> Any:
    """Return a state whose saved objects are members of their Enum, or instances of their class.

    Raises CorruptSnapshotError for a class that is not known, or an object that is not of it.
    """

    def build(leaf: Any, where: str) -> Any:
        if not isinstance(leaf, SavedObject):
            return leaf
        kind = find(leaf.class_name)
        if kind is not None and leaf.kind == "Enum" and issubclass(kind, Enum):
            member = leaf.get("name")
            if isinstance(member, str) and member in kind.__members__:
                return kind[member]
        if kind is None or leaf.kind != "dataclass" or issubclass(kind, Enum):
            raise CorruptSnapshotError(f"{where}: {leaf!r} is not an object of a class that is known here")
        made = kind.__new__(kind)
        vars(made).update(leaf)
        return made

    return change_leaves(value, path, build)
