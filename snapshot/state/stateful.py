"""Objects with `state_dict()` and `load_state_dict()`, which make up an application's state."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from snapshot.events import warn
from snapshot.state.rng import RNGState


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


def check_app_state(app_state: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError`, with the key, for an invalid app state."""
    if not isinstance(app_state, Mapping):
        raise TypeError(f"app_state must be a dict of stateful objects, got {type(app_state).__name__}")
    for key, value in app_state.items():
        if not isinstance(key, str):
            raise TypeError(f"app_state keys must be strings, got {key!r}")
        if isinstance(value, type) or not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is {_describe_value(value)}, which has no state_dict() and load_state_dict(); "
                f"wrap plain values: StateDict({_keyword_name(key)}=...)"
            )
    if not app_state:
        warn("app_state is empty, so there is nothing to save or restore")
    rng = [key for key, value in app_state.items() if isinstance(value, RNGState)]
    if len(rng) > 1:
        raise ValueError(f"app_state must hold at most one RNGState, got several ({', '.join(map(repr, rng))})")


def _describe_value(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__qualname__}"


def _keyword_name(key: str) -> str:
    return key if key.isidentifier() else "value"
