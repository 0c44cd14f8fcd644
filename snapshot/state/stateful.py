"""Objects with `state_dict()` and `load_state_dict()`, and the adapters that restore them."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from snapshot.events import warn
from snapshot.manifest.paths import decode_keys, encode_component
from snapshot.state.compound import collect_leaves
from snapshot.state.flatten import MISSING
from snapshot.state.foreign_parts import read_state
from snapshot.state.model_state import ModuleMap
from snapshot.state.rng import RNGState
from snapshot.tensors.geometry import Box


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: modules, optimizers, schedulers, dataloaders, `StateDict`."""

    def state_dict(self) -> Any:
        """Return the state, as nested containers of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""
        ...


@runtime_checkable
class Reshardable(Stateful, Protocol):
    """A stateful whose state depends on the number of ranks, and that can redistribute it.

    If a snapshot of another number of ranks is restored, it receives what it makes of the states of all ranks.
    """

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world: int) -> Any:
        """Return the state for `load_state_dict` on a rank of `world` ranks.

        Change nothing, and raise if the states cannot be redistributed: then nothing is restored.

        Args:
            states: The result of `state_dict()` on each rank of the take; None for a rank that had none.
            rank: This rank.
            world: The number of ranks now.
        """
        ...


class StateDict(UserDict[str, Any]):
    """A dictionary with `state_dict()` and `load_state_dict()`, for state that lives in no object of its own.

    A restore sets the keys that were saved. A key that the snapshot lacks keeps its value, unless the restore was asked
    to be `exact`.

    >>> progress = StateDict(step=7, best=0.25)
    >>> progress["step"] += 1
    >>> progress.state_dict()
    {'step': 8, 'best': 0.25}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the dictionary itself, not a copy: tensors in it are saved from, and restored into, where they are."""
        return self.data

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the keys of `state_dict`; the others keep their values."""
        self.data.update(state_dict)


def check_app_state(app_state: object) -> None:
    """Raise `TypeError` or `ValueError`, with the key, for an invalid app state."""
    if not isinstance(app_state, Mapping):
        from snapshot.state.mistakes import describe_wrong  # only an error needs it

        raise TypeError(describe_wrong(app_state))
    for key, value in app_state.items():
        if not isinstance(key, str):
            raise TypeError(f"app_state keys must be strings, got {key!r}")
        if isinstance(value, type) or not isinstance(value, Stateful):
            from snapshot.state.mistakes import describe_wrong_value

            raise TypeError(describe_wrong_value(key, value))
    if not app_state:
        warn("app_state is empty, so there is nothing to save or restore")
    rng = [key for key, value in app_state.items() if isinstance(value, RNGState)]
    if len(rng) > 1:
        raise ValueError(f"app_state must hold at most one RNGState, got several ({', '.join(map(repr, rng))})")


def map_modules(app_state: Mapping[str, Any]) -> list[ModuleMap]:
    """Return the modules and optimizers of each stateful. Raise as `check_app_state` does."""
    check_app_state(app_state)
    return [ModuleMap(key, stateful) for key, stateful in app_state.items()]


ReadBoxes = Callable[[Sequence[tuple[str, Any, Box]]], list[torch.Tensor]]
"""Returns boxes of stored tensors, given by path, entry and box, in new host memory."""


class RestoreAdapter:
    """The part of a stateful in a restore. This one receives exactly the state that it saved."""

    by_name = False
    """True if names are matched one by one; a name without a match is an error or left out."""
    needs: frozenset[str] = frozenset()
    """Paths that `find_mismatches` needs."""
    exact = False
    """True if a differing shape or dtype is an error; otherwise the leaf is replaced by a new object."""
    models: str | None = None
    """The path of a model's names below the key; None if there is no model."""
    unfolds = True
    """True if plain values in other libraries' pickles become separate entries."""
    compares_values = False
    """True if `find_wrong_values` needs to be called. All ranks wait for each other after it."""

    def __init__(self, key: str, stateful: Any, state: Any = MISSING) -> None:
        """`state`: the current state, if it has been read already."""
        self.key = key
        self.stateful = stateful
        self.state = self.read_state() if state is MISSING else state
        self.compounds: dict[str, Any] = {}
        """Path -> a live object with a class of its own: a dataclass, an Enum, a wrapped tensor."""
        self.live = collect_leaves(key, self.state, self.compounds)

    def read_state(self) -> Any:
        """Return the current state of the stateful."""
        return read_state(ModuleMap(self.key, self.stateful))

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the reasons, known only to the stateful, why it cannot take this state."""
        return []

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        """Return the entries of other ranks that belong here as well."""
        return []

    def find_wrong_values(
        self, entries: Mapping[str, Any], skipped: Collection[str], values: Mapping[str, Any], read: ReadBoxes
    ) -> list[str]:
        """Return the reasons, known only from stored values, why the state cannot be taken.

        No live tensor has been written yet.

        Args:
            entries: The entries.
            skipped: Those that are not requested.
            values: Path -> value, of all but tensors.
            read: Reads boxes of tensors.
        """
        return []

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the entries without a counterpart in the application, if names matter."""
        return []

    def find_missing(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the application's names that the snapshot lacks, if names matter."""
        return []

    def wants_entry(self, path: str) -> bool:
        """Return True if the application has an entry that only another rank saved."""
        return False

    def find_kept(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return live values that the snapshot lacks and that stay unchanged: path -> key."""
        return {}

    def drop_keys(self, keys: Iterable[Any]) -> None:
        """Remove the keys of `find_kept`."""

    def list_model_names(self) -> list[str]:
        """Return the model's names, as components of paths."""
        return []

    def find_like(self, path: str, shape: tuple[int, ...]) -> Any | None:
        """Return a live tensor whose layout a new one of this shape should have."""
        return None

    def choose_device(self, path: str, shape: tuple[int, ...]) -> torch.device | str:
        """Return the device for a new tensor."""
        return "cpu"

    def load_state(self, state: Any, strict: bool) -> list[str]:
        """Load the state; return the names that could not be restored."""
        self.stateful.load_state_dict(state)
        return []


class StateDictAdapter(RestoreAdapter):
    """A `StateDict`: its own keys are set one by one, with the saved values."""

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        top = entries.get(self.key)
        if top is not None and top.is_keyed:
            return []
        return [f"{self.key}: the snapshot holds no dictionary under this key"]

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        return [path for path in self.live if path not in entries and path in elsewhere] if elsewhere else []

    def wants_entry(self, path: str) -> bool:
        return path in self.live

    def find_kept(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        top = entries.get(self.key)
        keys = decode_keys(top.keys) if top is not None and top.is_keyed else []
        if keys == list(self.state):
            return {}
        saved = set(keys)
        return {f"{self.key}/{encode_component(str(key))}": key for key in self.state if key not in saved}

    def drop_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            del self.stateful[key]


class RNGAdapter(RestoreAdapter):
    """The RNG state: its values are copies, so none is filled in place. Missing generators are reported."""

    def __init__(self, key: str, stateful: RNGState) -> None:
        super().__init__(key, stateful)
        self.live = {}

    def load_state(self, state: Any, strict: bool) -> list[str]:
        return [f"{self.key}/{name}" for name in self.stateful.load_state_dict(state)]


class ModuleAdapter(RestoreAdapter):
    """A module."""

    by_name = True
    exact = True
    models = ""

    def __init__(self, key: str, stateful: Any) -> None:
        super().__init__(key, stateful)
        self.kept_names: set[str] = set()
        """Names that keep their values, since they belong to a wrapper that the snapshot lacks."""

    def list_model_names(self) -> list[str]:
        return [encode_component(name) for name in self.state] if isinstance(self.state, Mapping) else []

    def load_state(self, state: Any, strict: bool) -> list[str]:
        if type(state) is dict:
            state = OrderedDict(state)
        if not hasattr(state, "_metadata") and hasattr(self.state, "_metadata"):
            state._metadata = self.state._metadata  # the names were changed: the versions keep the module's own names
        state.update((name, self.state[name]) for name in self.kept_names)
        self.stateful.load_state_dict(state, strict=strict)
        return []


def find_names_beneath(key: str, entries: Mapping[str, Any]) -> list[str] | None:
    """Return the paths of a state dict's first level; None if the state is not a dict."""
    top = entries.get(key)
    return None if top is None or not top.is_keyed else [f"{key}/{name}" for name in top.components()]
