"""The entries of dicts, by their type, with the details that restore each exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from snapshot.manifest import entries as e


def find_dict_maker(value: dict[Any, Any]) -> Callable[[list[Any], list[int] | None], e.DictEntry] | None:
    """Return a function that creates the entry of this type of dict; None if a factory cannot be recorded."""
    kind = type(value)
    if kind is dict:
        return e.DictEntry
    if kind is Counter:
        return e.CounterEntry
    if kind is defaultdict:
        factory = e.find_factory_name(value.default_factory)  # type: ignore[attr-defined]
        return None if factory is None else lambda keys, tagged: e.DefaultdictEntry(keys, tagged, factory=factory)
    versions = read_module_versions(getattr(value, "_metadata", None))
    return lambda keys, tagged: e.OrderedDictEntry(keys, tagged, module_versions=versions)


def read_module_versions(metadata: Any) -> dict[str, dict[str, Any]] | None:
    """Return a module's versions as plain values, without entries of hooks that JSON cannot represent."""
    if not isinstance(metadata, dict):
        return None
    plain = (str, int, float, bool, type(None))
    return {
        str(module): {str(name): value for name, value in versions.items() if isinstance(value, plain)}
        for module, versions in metadata.items()
        if isinstance(versions, dict)
    }
