"""A model and its optimizer under torch's parallelism-independent names, and the kind of each stateful."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from snapshot.errors import SnapshotError
from snapshot.manifest.compounds import Container
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.state.optimizers import (
    OptimizerKind,
    StateOfParameters,
    add_live_options,
    describe_group_change,
    has_param_groups,
    restore_dtypes,
)
from snapshot.state.rng import RNGState
from snapshot.state.stateful import StateDict
from snapshot.state.stateful_kinds import Kind, ModuleKind, RNGKind, StateDictKind
from snapshot.tensors.memory import address_of_tensor

# A model and its optimizer under torch's parallelism-independent names.
#
# The names are those of `torch.distributed.checkpoint.state_dict`, so every parallelism can restore the state of
# another.


class ModelState:
    """A model, with its optimizer or several, as one stateful.

    Parameters and their optimizer state have the parameter's full name in the unwrapped model. Wrappers do not change
    it: `DistributedDataParallel`, FSDP, tensor parallelism or `torch.compile`. So a snapshot restores into another
    parallelism and another number of ranks.

    Args:
        model: The model.
        optimizer: Its optimizer, or several.
        options: A `torch.distributed.checkpoint.state_dict.StateDictOptions`; as it is by default, every rank gives its
            own shards, which is what a snapshot wants.

    >>> import torch
    >>> from snapshot import ModelState
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ModelState(model, torch.optim.Adam(model.parameters()))
    >>> sorted(state.state_dict())
    ['model', 'optim']
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        options: Any = None,
    ) -> None:
        self.model = model
        if optimizer is None:
            self.optimizers: list[torch.optim.Optimizer] = []
        elif isinstance(optimizer, torch.optim.Optimizer):
            self.optimizers = [optimizer]
        else:
            self.optimizers = list(optimizer)
        self.options = options

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state under `model`, and the optimizers' under `optim`.

        A fresh optimizer has no state, and remains fresh.
        """
        return self._read_state_dict(self.options)

    def nested_state_dict(self) -> dict[str, Any]:
        """Return the state dict with the optimizers' state by parameter, even if the options request a flat one."""
        return self._read_state_dict(_nest_options(self.options))

    def _read_state_dict(self, options: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if options is not None and options.full_state_dict and options.cpu_offload and _has_peers():
            raise SnapshotError(
                "ModelState: full_state_dict with cpu_offload leaves all ranks but 0 without a state; unset both, and "
                "every rank saves its own shards"
            )
        if not self.optimizers:
            return {"model": get_model_state_dict(self.model, options=options)}
        fresh = [not optimizer.state for optimizer in self.optimizers]
        try:
            model, optim = get_state_dict(self.model, self.optimizers, options=options)
            names = self._find_fresh_names(fresh, optim, options) if any(fresh) else set()
        finally:
            for optimizer, was_fresh in zip(self.optimizers, fresh, strict=True):
                if was_fresh:  # torch has taken a step of zeros with it, from which training would go on otherwise
                    optimizer.state.clear()
        return {"model": model, "optim": _drop_state(optim, names) if names else optim}

    def _find_fresh_names(self, fresh: list[bool], optim: Mapping[str, Any], options: Any) -> set[str]:
        """Return the parameters of fresh optimizers."""
        if "param_groups" not in optim:
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            optim = get_optimizer_state_dict(self.model, self.optimizers, options=_nest_options(options))
        groups = [was for was, each in zip(fresh, self.optimizers, strict=True) for _ in each.param_groups]
        listed = zip(groups, optim["param_groups"], strict=False)
        return {name for was_fresh, group in listed if was_fresh for name in group["params"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this parallelism, which `Snapshot.restore` has converted."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

        if not self.optimizers or "optim" not in state_dict:
            set_model_state_dict(self.model, state_dict["model"], options=self.options)
            return
        optim, options = state_dict["optim"], self.options
        if "param_groups" in optim:  # DCP drops what is empty, and torch would take the rest for flattened names
            optim, options = {"state": {}, **optim}, _nest_options(options)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=optim,
            options=options,
        )


def _drop_state(optim: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return an optimizer's state dict, nested or flat, without the state of some parameters."""
    if "param_groups" in optim:
        return {**optim, "state": {name: each for name, each in optim["state"].items() if name not in names}}
    flat = {name: name.partition(".")[2].rpartition(".")[0] for name in optim if name.startswith("state.")}
    return {name: each for name, each in optim.items() if flat.get(name) not in names}


def _nest_options(options: Any) -> Any:
    if options is None or not options.flatten_optimizer_state_dict:
        return options
    return dataclasses.replace(options, flatten_optimizer_state_dict=False)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# `ModelState` as a stateful: a model and its optimizers, restored together under the names of parameters.


class ModelStateKind(StateOfParameters):
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
        return self.stateful.nested_state_dict()

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
            if shape is not None and isinstance(held, torch.Tensor) and tuple(shape) != tuple(held.shape):
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
        leaves = (path for path, entry in entries.items() if not isinstance(entry, Container))
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


# The kind of each stateful object.

_KINDS: tuple[tuple[type, type[Kind]], ...] = (
    (RNGState, RNGKind),
    (torch.nn.Module, ModuleKind),
    (torch.optim.Optimizer, OptimizerKind),
    (ModelState, ModelStateKind),
    (StateDict, StateDictKind),
)


def find_kind(stateful: Any) -> type[Kind]:
    """Return the kind of a stateful, without reading its state."""
    own: type[Kind] | None = getattr(type(stateful), "__snapshot_kind__", None)
    return own or next((kind for of, kind in _KINDS if isinstance(stateful, of)), Kind)


def make_kind(key: str, stateful: Any) -> Kind:
    """Return a stateful wrapped in its kind, with its current state."""
    kind = find_kind(stateful)
    if kind is OptimizerKind:
        state = stateful.state_dict()
        return OptimizerKind(key, stateful, state) if has_param_groups(stateful, state) else Kind(key, stateful, state)
    return kind(key, stateful)
