"""A model and its optimizer as one stateful, and the modules and optimizers of any stateful."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from snapshot.errors import SnapshotError
from snapshot.manifest.paths import encode_component

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


# The modules and optimizers of any stateful.

_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Attributes in which modules hold the module that they wrap."""


class ModuleMap:
    """The modules and optimizers of one stateful, which are found once for all steps of a take."""

    def __init__(self, key: str, stateful: Any) -> None:
        self.key = key
        self.stateful = stateful
        self.path = encode_component(key)
        """The path of its state."""
        self.joined = isinstance(stateful, ModelState)
        """True if a model and its optimizers have one state, under names without wrappers."""
        model = stateful.model if self.joined else stateful
        self.model: torch.nn.Module | None = model if isinstance(model, torch.nn.Module) else None
        self.optimizers = only_optimizers(stateful.optimizers if self.joined else [stateful])

    @property
    def model_path(self) -> str:
        """The path of the model's state."""
        return f"{self.path}/model" if self.joined else self.path

    @property
    def state_path(self) -> str:
        """The path of the optimizers' state of parameters."""
        return f"{self.path}/optim/state" if self.joined else f"{self.path}/state"

    @cached_property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Each module, with the prefix of its parameters' names. One that has several names is listed with each."""
        return [] if self.model is None else list(walk_modules(self.model, unwrapped=self.joined))

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield all names of parameters."""
        return named_parameters(self.modules)


def walk_modules(module: torch.nn.Module, *, unwrapped: bool) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each module and the prefix of its parameters' names. With `unwrapped`, wrappers have no part in names."""
    left: list[tuple[str, torch.nn.Module, tuple[int, ...]]] = [("", module, ())]
    while left:
        prefix, each, above = left.pop()
        yield prefix, each
        above = (*above, id(each))
        for name, child in each._modules.items():
            if child is not None and id(child) not in above:
                hidden = unwrapped and (
                    name in _WRAPPERS or (name == "module" and isinstance(each, DistributedDataParallel))
                )
                left.append((prefix if hidden else f"{prefix}{name}.", child, above))


def named_parameters(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of some modules with all of their names."""
    for prefix, each in modules:
        for name, parameter in each._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter


def only_optimizers(found: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return those objects that are optimizers with groups of parameters."""
    return [each for each in found if isinstance(each, torch.optim.Optimizer) and hasattr(each, "param_groups")]
