"""A model and its optimizer under torch's parallelism-independent names.

The names are those of `torch.distributed.checkpoint.state_dict`, so every parallelism can restore the state of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from snapshot.errors import SnapshotError


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
