"""Report lines for a target format: entries that it leaves out, and entries that load differently."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from snapshot.manifest import entries as e
from snapshot.state import numpy_arrays
from snapshot.tensors.strides import contiguous_strides, measure_span
from snapshot.verbs.select import clean_extra, places_of

PARAMETER = "torch.nn.parameter.Parameter"


def tensor_changes(path: str, entry: e.AnyTensor, keeps: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each property of a tensor, other than its values, that a format drops.

    `keeps`: the properties that the format holds, among `parameter`, `requires_grad` and `order`.
    """
    extra = entry.extra or e.PLAIN
    if extra.subclass is not None and not (extra.subclass == PARAMETER and "parameter" in keeps):
        yield f"{path}: the {extra.subclass} becomes a plain tensor"
    elif extra.requires_grad and "requires_grad" not in keeps:
        yield f"{path}: requires_grad is not kept"
    if extra.stride_order is not None and "order" not in keeps:
        yield f"{path}: the memory layout becomes contiguous"


def memory_changes(entries: Mapping[str, Any], is_kept: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield a line for each tensor that shares memory with another one in the source, and not in the target.

    `is_kept`: whether the same view of the same memory, under two paths, stays one tensor.
    """
    stored: dict[Any, list[tuple[int, int, str, str]]] = {}
    for path, entry in entries.items():
        if isinstance(entry, e.MappedTensorEntry):
            continue  # it never shared memory
        if isinstance(entry, e.TENSORS) and 0 not in entry.shape and (pieces := entry.pieces()):
            first = pieces[0][1]
            extra = first.extra or e.PLAIN
            begin = extra.storage_offset or 0
            count = math.prod(first.shape)
            dense = measure_span(first.shape, extra.strides or contiguous_strides(first.shape)) == count
            view = repr((places_of(entry), entry.dtype, entry.shape, clean_extra(entry)))
            place = first.location, first.byte_range
            stored.setdefault(place, []).append((begin, begin + count if dense else begin, path, view))
    for views in stored.values():
        if len(views) > 1:
            yield from _find_overlaps(sorted(views, key=lambda view: view[0]), is_kept)


def _find_overlaps(views: list[tuple[int, int, str, str]], is_kept: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield the lines for the views of one storage: first element, end (if dense), path, and view."""
    seen: dict[str, str] = {}
    reach, owner = 0, ""
    for begin, end, path, view in views:
        if (known := seen.setdefault(view, path)) != path:
            if not is_kept(path, known):
                yield f"{path}: the memory that it shares with {known} becomes its own"
            continue
        if begin < reach:
            yield f"{path}: the memory that it shares with {owner} becomes its own"
        if end > reach:
            reach, owner = end, path


def array_changes(path: str, entry: e.Entry) -> Iterator[str]:
    """Yield a line for a NumPy array whose dtype a pickle does not keep: NumPy reads most in the native order."""
    if isinstance(entry, e.NDArrayEntry) and not entry.scalar:
        dtype = numpy_arrays.read_dtype(path, entry.dtype)
        read = pickle.loads(pickle.dumps(np.empty(0, dtype), protocol=2)).dtype  # noqa: S301 - written here
        if read != dtype:
            yield f"{path}: the array of {dtype.str} becomes one of {read.str}"


def container_changes(state: Mapping[Any, Any], paths: Mapping[str, tuple[Any, ...]]) -> tuple[list[str], list[str]]:
    """Return lines for entries that DCP's flattening leaves out of a state, and for those that it changes.

    `paths`: for each flat name, the keys and indices that lead to its value.
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
                changed.append(f"{name}: its keys become strings")
            for key, child in value.items():
                walk((*path, str(key)), child)
        elif type(value) is list and path in flattened:
            for place, child in enumerate(value):
                walk((*path, place), child)

    walk((), state)
    return left_out, changed
