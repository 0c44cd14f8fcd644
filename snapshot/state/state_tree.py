"""The current state of an application by logical path: the tensors that a restore fills."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.manifest.entries import Compound, Container, DictEntry
from snapshot.manifest.paths import (
    add_parents,
    decode_key,
    encode_component,
    encode_key,
    find_tagged_keys,
    key_component,
)
from snapshot.state.compound import ENUM, find_form, find_parts, holds_itself

_DICTS = {dict, OrderedDict, defaultdict, Counter}
_SEQUENCES = {list, tuple, deque}
_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}
MISSING: Any = object()
"""A placeholder for a missing leaf."""


def collect_leaves(path: str, value: Any, compounds: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the leaves of nested containers, under the paths that flattening gives them.

    Objects with a class of their own are added to `compounds`, under their paths.
    """
    found: dict[str, Any] = {}
    _collect_leaves(path, value, found, {} if compounds is None else compounds)
    return found


def _collect_leaves(
    path: str, value: Any, found: dict[str, Any], compounds: dict[str, Any], within: bool = False
) -> None:
    """Collect leaves recursively; `within` is True inside an object that is known not to contain itself."""
    kind = type(value)
    if kind in _SEQUENCES:
        for i, child in enumerate(value):
            _collect_leaves(f"{path}/{i}", child, found, compounds, within)
        return
    if kind not in _DICTS:
        parts = find_parts(value) if within or not holds_itself(value) else None
        if parts is None:
            found[path] = value
        if parts is not None or find_form(kind) is ENUM:
            compounds[path] = value
        for name, child in (parts or {}).items():
            _collect_leaves(f"{path}/{encode_component(name)}", child, found, compounds, True)
        return
    prefix = path + "/"
    strings = all(type(key) is str for key in value)
    tagged = () if strings else find_tagged_keys(value)
    for i, (key, child) in enumerate(value.items()):
        if type(key) is str:
            text = key if key.isascii() and "/" not in key and "%" not in key else encode_component(key)
        else:
            encoded = encode_key(key)
            if encoded is None:
                found[path] = value
                return
            text = key_component(encoded, i in tagged)
        if type(child) not in _LEAVES:
            _collect_leaves(prefix + text, child, found, compounds, within)
        else:
            found[prefix + text] = child


def inflate_tree(path: str, entries: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the value at a path: its containers from `entries`, its leaves from `values`.

    A leaf that is MISSING leaves no key.
    """
    entry = entries.get(path)
    if path in values or not isinstance(entry, Container):
        return values.get(path, MISSING)
    prefix = path + "/"
    children = []
    for text in entry.components():
        below = prefix + text
        children.append(values[below] if below in values else inflate_tree(below, entries, values))
    if any(child is MISSING for child in children):
        if not isinstance(entry, DictEntry):
            raise RestoreError(f"{path}: a sequence cannot be restored without some of its elements", [path])
        return entry.without_children(child is MISSING for child in children).build(
            [c for c in children if c is not MISSING]
        )
    return _build_container(path, entry, children)


def _build_container(path: str, entry: Container, children: list[Any]) -> Any:
    try:
        return entry.build(children)
    except TypeError as error:  # a set with an unhashable element, which is stored as opaque bytes
        raise CorruptSnapshotError(f"{path}: {error}") from error


class ChosenState:
    """The leaves of a tree of entries that are restored; all others remain unchanged in the application."""

    def __init__(self, entries: Mapping[str, Any], wanted: Callable[[str], bool]) -> None:
        leaves = {
            path: wanted(path)
            for path, entry in entries.items()
            if not isinstance(entry, Container) or entry.width == 0
        }
        self.skipped = {path for path, is_wanted in leaves.items() if not is_wanted}
        self._above_skipped = add_parents(self.skipped)
        self._above_wanted = add_parents(path for path, is_wanted in leaves.items() if is_wanted)

    @property
    def is_empty(self) -> bool:
        """True if nothing is restored."""
        return not self._above_wanted

    def includes(self, path: str) -> bool:
        """Return True if anything at a path or beneath it is restored."""
        return path in self._above_wanted

    def merge(self, path: str, entries: Mapping[str, Any], values: Mapping[str, Any], live: Any) -> Any:
        """Return the live value with the chosen leaves replaced; raise if a sequence lacks their positions."""
        if path not in self._above_skipped:
            return inflate_tree(path, entries, values)
        if path not in self._above_wanted:
            return live
        entry = entries[path]
        names = entry.components()
        if isinstance(entry, Compound):
            held = find_parts(live) or {}
            children = [
                self.merge(f"{path}/{name}", entries, values, held.get(key, MISSING))
                for name, key in zip(names, entry.list_names(), strict=True)
            ]
            kept = entry.without_children(child is MISSING for child in children)
            return _build_container(path, kept, [child for child in children if child is not MISSING])
        if isinstance(entry, DictEntry) and isinstance(live, dict):
            made = copy.copy(live)
            for name, key in zip(names, map(decode_key, entry.keys), strict=True):
                child = self.merge(f"{path}/{name}", entries, values, live.get(key, MISSING))
                if child is not MISSING:
                    made[key] = child
            return made
        if isinstance(live, (list, tuple, deque)) and len(live) == len(names):
            children = [self.merge(f"{path}/{name}", entries, values, live[i]) for i, name in enumerate(names)]
            return _build_container(path, entry, children)
        raise RestoreError(
            f"{path}: a partial restore needs a live {type(entry).__name__} of {len(names)} to hold the rest, "
            f"and the application has none",
            [path],
        )
