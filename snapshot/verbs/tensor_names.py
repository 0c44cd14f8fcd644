"""Names of tensors in files that hold only tensors: safetensors, and the dict that `snapshot.load` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from snapshot.errors import RestoreError
from snapshot.manifest import entries as e
from snapshot.manifest.paths import decode_component

_RESERVED = "__metadata__"
"""The key of a safetensors header that is not a tensor."""


def name_tensors(entries: Mapping[str, Any], paths: Iterable[str]) -> dict[str, str]:
    """Return path -> name: the path's components joined with dots, without the top one if all entries share it.

    Raise RestoreError if two paths would get one name.
    """
    tops = {path.partition("/")[0] for path, entry in entries.items() if not isinstance(entry, e.Container)}
    one = len(tops) == 1 and all(path.count("/") for path in entries if path not in tops)
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for path in paths:
        components = [decode_component(each) for each in path.split("/")]
        name = ".".join(components[1:] if one and len(components) > 1 else components)
        if name in owners or name == _RESERVED:
            raise RestoreError(f"{path} and {owners.get(name)} would both be named {name!r}: rename one of them")
        names[path] = name
        owners[name] = path
    return names
