"""The adapter of each stateful, and that of `ModelState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from snapshot.manifest.paths import decode_component, encode_component
from snapshot.state.foreign_parts import describe_state, read_state
from snapshot.state.model_state import ModelState, ModuleMap
from snapshot.state.optimizers import (
    OptimizerAdapter,
    StateOfParameters,
    add_live_options,
    describe_group_change,
    has_param_groups,
    keep_option_tensors,
    restore_dtypes,
)
from snapshot.state.rng import RNGState
from snapshot.state.sharded import shape_of_whole
from snapshot.state.stateful import (
    ModuleAdapter,
    RestoreAdapter,
    RNGAdapter,
    StateDict,
    StateDictAdapter,
    find_names_beneath,
)
from snapshot.tensors.memory import address_of_tensor

# `ModelState` as a stateful: a model and its optimizers, restored together under the names of parameters.


class ModelStateAdapter(StateOfParameters):
    """A model and its optimizer under names that do not depend on their parallelism."""

    models = "/model"
    optimizer_at = "/optim"

    def __init__(self, key: str, stateful: ModelState) -> None:
        super().__init__(key, stateful)
        self.groups_known = True
        """True if the snapshot records parameter groups; a flat state does not."""
        prefix = f"{key}/model/"
        self.parameters = {path[len(prefix) :]: held for path, held in self.live.items() if path.startswith(prefix)}
        groups = self.state["optim"]["param_groups"] if stateful.optimizers else ()
        owners = [optimizer for optimizer in stateful.optimizers for _ in optimizer.param_groups]
        self.groups = [[encode_component(str(name)) for name in group["params"]] for group in groups]
        self.owners = {name: owner for names, owner in zip(self.groups, owners, strict=False) for name in names}

    def forget_groups(self) -> None:
        """Note that the names of the parameters changed: the groups of the saved optimizer are not known by them."""
        self.groups_known = False

    def read_state(self) -> Any:
        """Return the state by parameter, independent of the options."""
        return describe_state(ModuleMap(self.key, self.stateful), self.stateful.nested_state_dict())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        found: list[torch.optim.Optimizer] = self.stateful.optimizers
        return found

    def describe_mismatch(self, entries: Mapping[str, Any]) -> str | None:
        why = super().describe_mismatch(entries)
        if why is None and self._saved is not None and self.groups_known:
            other = describe_group_change(self._saved, self.groups)
            why = f"{self.base}: {other}" if other else None
        return why

    def find_other_shapes(self, entries: Mapping[str, Any], unfit: set[int]) -> dict[str, str]:
        for name, held in self.parameters.items():
            shape = getattr(entries.get(f"{self.key}/model/{name}"), "shape", None)
            if shape is not None and isinstance(held, torch.Tensor) and tuple(shape) != shape_of_whole(held):
                unfit = unfit | {address_of_tensor(held)}
        return super().find_other_shapes(entries, unfit)

    def list_model_names(self) -> list[str]:
        return [encode_component(name) for name in self.state["model"]]

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        return [path for path in self.live if path not in entries and path in elsewhere]

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        if self.stateful.optimizers and f"{self.key}/optim" not in entries:
            return [f"{self.key}: the snapshot holds no optimizer's state as 'optim' under this key"]
        return []

    def find_missing(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the model's missing names, which torch would compare only after tensors were written."""
        prefix = f"{self.key}/model/"
        return sorted(path for path in self.live if path.startswith(prefix) and path not in entries)

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        prefix = f"{self.key}/model/"
        leaves = (path for path, entry in entries.items() if not entry.is_container)
        return sorted(path for path in leaves if path.startswith(prefix) and path not in self.live)

    def drop_optimizer(self, entries: dict[str, Any]) -> bool:
        for path in [each for each in entries if each == self.base or each.startswith(f"{self.base}/")]:
            del entries[path]
        entries[self.key] = entries[self.key].without_children(
            name == "optim" for name in entries[self.key].components()
        )
        return False

    def load_state(self, state: Any, strict: bool) -> list[str]:
        model = {**self.state["model"], **state["model"]}
        optim = state.get("optim")
        if optim is None or not self.stateful.optimizers or "param_groups" not in optim:
            return super().load_state({**state, "model": model}, strict)
        saved = optim.get("state", {})
        optim = {**optim, **self._complete_state(optim)}
        with keep_option_tensors(self.optimizers, self.filled):
            super().load_state({**state, "model": model, "optim": optim}, strict)
        self._amend_optimizers(optim["state"], saved)
        return []

    def _complete_state(self, optim: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state and groups, completed with live values where the snapshot has none.

        torch requires an entry for every parameter and option.
        """
        live = self.state["optim"]
        states = {**live["state"], **optim.get("state", {})}
        saved = {str(name): group for group in optim["param_groups"] for name in group["params"]}
        groups = []
        for group in live["param_groups"]:
            same = next((saved[name] for name in group["params"] if name in saved), group)
            groups.append({**add_live_options(same, group), "params": group["params"]})
        states = {name: states.get(name, {}) for group in live["param_groups"] for name in group["params"]}
        return {"state": states, "param_groups": groups}

    def _amend_optimizers(self, given: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Set the optimizers' state to the values that were read.

        torch casts the state, drops that of frozen parameters, and requires a state for each parameter.
        """
        live = {address_of_tensor(each): (each, owner) for owner in self.optimizers for each in _list_parameters(owner)}
        known = {name for group in self._saved.groups for name in group} if self._saved else set()
        for path, held in self.parameters.items():
            parameter, optimizer = live.get(address_of_tensor(held), (None, None))
            if parameter is None or optimizer is None:
                continue
            name = decode_component(path)
            state = optimizer.state.get(parameter)
            if path in known and path not in self.untouched and not saved.get(name):
                state = None  # the snapshot has the parameter, and no state of it
            elif not state:
                state = dict(saved[name]) if saved.get(name) and path not in self.untouched else None
            else:
                meant = given.get(name, {})
                state.update({what: restore_dtypes(now, meant[what]) for what, now in state.items() if what in meant})
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ScalerAdapter(RestoreAdapter):
    """A `GradScaler`. A disabled one saves an empty state, which torch's enabled one refuses."""

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        if not self.state or find_names_beneath(self.key, entries) != []:
            return []
        return [
            f"{self.key}: was saved by a disabled GradScaler, and this one is enabled; leave it out of app_state, or "
            "disable it"
        ]


# The kind of each stateful object.

_ADAPTERS: tuple[tuple[type, type[RestoreAdapter]], ...] = (
    (RNGState, RNGAdapter),
    (torch.nn.Module, ModuleAdapter),
    (torch.optim.Optimizer, OptimizerAdapter),
    (ModelState, ModelStateAdapter),
    (StateDict, StateDictAdapter),
    (torch.amp.GradScaler, ScalerAdapter),
)


def find_adapter(stateful: Any) -> type[RestoreAdapter]:
    """Return the adapter of a stateful, without reading its state."""
    own: type[RestoreAdapter] | None = getattr(type(stateful), "__snapshot_kind__", None)
    return own or next((adapter for of, adapter in _ADAPTERS if isinstance(stateful, of)), RestoreAdapter)


def make_adapter(key: str, stateful: Any) -> RestoreAdapter:
    """Return a stateful in its adapter, with its current state."""
    adapter = find_adapter(stateful)
    if adapter is OptimizerAdapter:
        state = read_state(ModuleMap(key, stateful))
        return (
            OptimizerAdapter(key, stateful, state)
            if has_param_groups(stateful, state)
            else RestoreAdapter(key, stateful, state)
        )
    return adapter(key, stateful)
