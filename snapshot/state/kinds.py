"""Kinds of statefuls: how each wants its state back. What depends on the kind lives here, and is looked up once.

Modules are matched by name and filled in place; optimizers get all of what was saved, where their parameters are, in
the dtypes that were saved; everything else gets back exactly what it gave, whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from snapshot.errors import RestoreError
from snapshot.manifest.entries import Container, DictEntry, ListEntry
from snapshot.state.live import live_leaves
from snapshot.state.model import ModelState
from snapshot.state.rng import RNGState
from snapshot.state.stateful import StateDict


class Kind:
    """A stateful that gets back exactly what it gave."""

    by_name = False
    """Whether names are matched one by one, and what does not match is an error or left out."""
    needs: frozenset[str] = frozenset()
    """Paths without which `mismatches` has nothing to say."""
    exact = False
    """Whether a shape or dtype that differs is an error; else the leaf is replaced by a new object."""
    unfolds = True
    """Whether plain values that others pickled become entries of their own, and are no objects any more."""

    def __init__(self, key: str, stateful: Any) -> None:
        self.key = key
        self.stateful = stateful
        self.state = stateful.state_dict()
        self.compounds: dict[str, Any] = {}
        """Path -> an object that is held there and has a class of its own: a dataclass, an Enum, a wrapped tensor."""
        self.live = live_leaves(key, self.state, self.compounds)

    def mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """Why the stateful cannot take this state, as far as only it knows."""
        if isinstance(self.stateful, StateDict) and not isinstance(entries.get(self.key), DictEntry):
            return [f"{self.key}: the snapshot holds no dictionary under this key"]
        return []

    def adopts(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        """Which of the entries that other ranks had belong here as well."""
        return []

    def unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        """Which entries have names that mean nothing here, though names matter."""
        return []

    def like(self, path: str, shape: tuple[int, ...]) -> Any | None:
        """A live tensor of the layout that a new one of this shape should have."""
        return None

    def device(self, path: str, shape: tuple[int, ...]) -> torch.device | str:
        """Where a new tensor belongs."""
        return "cpu"

    def hand_back(self, state: Any, strict: bool) -> list[str]:
        """Give the state back; what had no place there."""
        self.stateful.load_state_dict(state)
        return []


class RNGKind(Kind):
    """The RNG state: what it gives are copies, not places to fill; generators that are not here are reported."""

    def __init__(self, key: str, stateful: RNGState) -> None:
        super().__init__(key, stateful)
        self.live = {}

    def hand_back(self, state: Any, strict: bool) -> list[str]:
        return [f"{self.key}/{name}" for name in self.stateful.load_state_dict(state)]


class ModuleKind(Kind):
    """A module."""

    by_name = True
    exact = True

    def hand_back(self, state: Any, strict: bool) -> list[str]:
        if type(state) is dict:
            state = OrderedDict(state)
        if not hasattr(state, "_metadata") and hasattr(self.state, "_metadata"):
            state._metadata = self.state._metadata  # names were changed: the versions stand under names of its own
        self.stateful.load_state_dict(state, strict=strict)
        return []


def _exact(cast: Any, saved: Any) -> Any:
    """What an optimizer holds, in the dtypes that were saved, on the devices where torch has put it."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(cast, torch.Tensor):
            return saved
        return cast if cast.dtype == saved.dtype else saved.to(cast.device)
    if isinstance(saved, dict) and isinstance(cast, dict):
        return type(cast)((key, _exact(cast.get(key), value)) for key, value in saved.items())
    if isinstance(saved, (list, tuple)) and isinstance(cast, (list, tuple)) and len(saved) == len(cast):
        return type(saved)(map(_exact, cast, saved))
    return cast


class OptimizerKind(Kind):
    """One of torch's optimizers."""

    exact = True

    def __init__(self, key: str, stateful: torch.optim.Optimizer) -> None:
        super().__init__(key, stateful)
        self._parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
        indices = [index for group in self.state.get("param_groups", ()) for index in group["params"]]
        self.needs = frozenset({f"{key}/param_groups"})
        self._by_index = dict(zip(map(str, indices), self._parameters, strict=False))
        self._numbers = {str(index): index for index in indices}
        groups = f"{key}/param_groups/"  # torch copies what it is given for them: they are no places to fill
        self.live = {path: value for path, value in self.live.items() if not path.startswith(groups)}

    def mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """Parameter groups must be as many, and as large: torch would find out only after tensors were written."""
        groups = entries.get(f"{self.key}/param_groups")
        if not isinstance(groups, ListEntry):
            return [f"{self.key}: the snapshot holds no optimizer's parameter groups under this key"]
        here = isinstance(self.state.get("state"), dict) and f"{self.key}/state" not in self.live
        found = entries.get(f"{self.key}/state")  # DCP drops what is empty, as a fresh optimizer's state is
        if here and not isinstance(found, DictEntry) and (found is not None or self.state["state"]):
            return [f"{self.key}: the snapshot holds no optimizer's state under this key"]
        have = [len(group["params"]) for group in self.stateful.param_groups]
        saved = []
        for i in range(groups.length):
            params = entries.get(f"{self.key}/param_groups/{i}/params")
            saved.append(params.length if isinstance(params, ListEntry) else -1)
        if have == saved:
            return []
        return [f"{self.key}/param_groups: the snapshot has groups of {saved} parameters, and the optimizer of {have}"]

    def _parameter(self, path: str) -> torch.Tensor | None:
        parts = path.split("/")
        if len(parts) < 4 or parts[1] != "state":
            return None
        return self._by_index.get(parts[2])

    def like(self, path: str, shape: tuple[int, ...]) -> Any | None:
        parameter = self._parameter(path)
        return parameter if parameter is not None and tuple(parameter.shape) == shape and shape else None

    def device(self, path: str, shape: tuple[int, ...]) -> torch.device | str:
        parameter = self.like(path, shape)
        return "cpu" if parameter is None else parameter.device

    def hand_back(self, state: Any, strict: bool) -> list[str]:
        """Torch casts state to its parameter's dtype; what was saved in another one is put back as it was."""
        states = state.get("state")
        if isinstance(states, dict):  # DCP makes texts of the numbers, and torch would take those for no parameter's
            numbered = {self._numbers.get(key, key) if type(key) is str else key: each for key, each in states.items()}
            state = {**state, "state": numbered}
        else:
            state = {"state": {}, **state}
        try:
            self.stateful.load_state_dict(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RestoreError(f"{self.key}: the optimizer does not take this state: {error}", [self.key]) from error
        states = state.get("state")
        for index, saved in states.items() if isinstance(states, dict) else ():
            parameter = self._by_index.get(str(index))
            if parameter is None or not isinstance(saved, dict):
                continue
            held = self.stateful.state.get(parameter)
            if held is not None:
                held.update({name: _exact(held.get(name), value) for name, value in saved.items()})
        return []


class ModelStateKind(Kind):
    """A model and its optimizer under names that do not depend on how they are parallelised."""

    exact = True

    def adopts(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        return [path for path in self.live if path not in entries and path in elsewhere]

    def mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """The model's names, which torch would compare only after tensors were written."""
        prefix = f"{self.key}/model/"
        here = {path for path in self.live if path.startswith(prefix)}
        there = {
            path for path, entry in entries.items() if path.startswith(prefix) and not isinstance(entry, Container)
        }
        lines = [f"{path}: is in the application, not in the snapshot" for path in sorted(here - there)]
        if self.stateful.optimizers and f"{self.key}/optim" not in entries:
            lines.append(f"{self.key}: the snapshot holds no optimizer's state as 'optim' under this key")
        return lines

    def unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        prefix = f"{self.key}/model/"
        leaves = (path for path, entry in entries.items() if not isinstance(entry, Container))
        return sorted(path for path in leaves if path.startswith(prefix) and path not in self.live)


def kind_type(stateful: Any) -> type[Kind]:
    """What kind of stateful this is, which is known without asking for its state."""
    if isinstance(stateful, RNGState):
        return RNGKind
    if isinstance(stateful, torch.nn.Module):
        return ModuleKind
    if isinstance(stateful, torch.optim.Optimizer):
        return OptimizerKind
    if isinstance(stateful, ModelState):
        return ModelStateKind
    own: type[Kind] = getattr(type(stateful), "__snapshot_kind__", Kind)
    return own


def kind_of(key: str, stateful: Any) -> Kind:
    """A stateful of its kind, with what it holds now."""
    return kind_type(stateful)(key, stateful)


def names_beneath(key: str, entries: Mapping[str, Any]) -> list[str] | None:
    """The paths of what a state dict holds at its first level; None where the state is no dict."""
    top = entries.get(key)
    return [f"{key}/{name}" for name in top.components()] if isinstance(top, DictEntry) else None
