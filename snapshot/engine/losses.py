"""Report lines for what a target format cannot hold: what is left out of it, and what comes back otherwise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from snapshot.manifest import entries as e
from snapshot.state import arrays

PARAMETER = "torch.nn.parameter.Parameter"


def tensor_changes(path: str, entry: Any, keeps: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each property of a tensor, other than its values, that a format drops.

    `keeps`: the properties that the format holds, among `parameter`, `requires_grad` and `order`.
    """
    extra = getattr(entry, "extra", None) or e.PLAIN
    if extra.subclass is not None and not (extra.subclass == PARAMETER and "parameter" in keeps):
        yield f"{path}: the {extra.subclass} becomes a plain tensor"
    elif extra.requires_grad and "requires_grad" not in keeps:
        yield f"{path}: requires_grad is not kept"
    if extra.stride_order is not None and "order" not in keeps:
        yield f"{path}: the memory layout becomes contiguous"


def array_changes(path: str, entry: Any) -> Iterator[str]:
    """Yield a line for a NumPy array whose dtype a pickle does not keep: NumPy reads most in the native order."""
    if isinstance(entry, e.NDArrayEntry) and not entry.scalar:
        dtype = arrays.numpy_dtype(path, entry.dtype)
        read = pickle.loads(pickle.dumps(np.empty(0, dtype), protocol=2)).dtype  # noqa: S301 - written here
        if read != dtype:
            yield f"{path}: the array of {dtype.str} becomes one of {read.str}"


def container_changes(state: Mapping[Any, Any], paths: Mapping[str, tuple[Any, ...]]) -> tuple[list[str], list[str]]:
    """Return the lines of what DCP's flattening leaves out of a state, and those of what it changes.

    `paths`: of each flat name, the keys and places that lead to its value.
    """
    flattened = {path[:length] for path in paths.values() for length in range(len(path))}
    left_out: list[str] = []
    changed: list[str] = []

    def walk(path: tuple[Any, ...], value: Any) -> None:
        name = "/".join(map(str, path)) or "the state"
        if isinstance(value, Mapping):
            kind = type(value).__name__
            if not value and path:
                left_out.append(f"{name}: the empty {kind}")
                return
            if type(value) is not dict:
                changed.append(f"{name}: the {kind} becomes a dict")
            if any(type(key) is not str for key in value):
                changed.append(f"{name}: its keys become texts")
            for key, child in value.items():
                walk((*path, str(key)), child)
        elif type(value) is list and path in flattened:
            for place, child in enumerate(value):
                walk((*path, place), child)

    walk((), state)
    return left_out, changed
