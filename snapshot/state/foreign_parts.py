"""Parameters that are parts of larger tensors, by the marks of other libraries.

A module's `state_dict()` has detached tensors, which have lost the attributes of the parameters. So the live parameters
are looked at, once for each module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from snapshot.errors import SnapshotError
from snapshot.io.system import PerProcess
from snapshot.state.sharded import copy_description, describes_parts


class MarkedNames(NamedTuple):
    """The names of a module's parameters that are parts of larger tensors."""

    first: int
    """The id of the first parameter. Other parameters are looked at again."""
    described: tuple[str, ...]
    """Parameters with the fields of torch's `CheckpointableTensor`."""
    empty: tuple[str, ...]
    """Parameters of DeepSpeed's ZeRO-3, whose elements are in a tensor of their own."""
    split: tuple[str, ...]
    """Parameters that Megatron splits over the ranks of its tensor parallelism."""


_known: PerProcess[weakref.WeakKeyDictionary[torch.nn.Module, MarkedNames]] = PerProcess(weakref.WeakKeyDictionary)


def find_marked_names(module: torch.nn.Module) -> MarkedNames:
    """Return the names of parameters with marks of other libraries."""
    known, first = _known.get().get(module), id(next(module.parameters(), None))
    if known is None or known.first != first:
        named = list(module.named_parameters(remove_duplicate=False))
        known = MarkedNames(
            first,
            tuple(name for name, each in named if describes_parts(each)),
            tuple(name for name, each in named if hasattr(each, "ds_id")),
            tuple(name for name, each in named if getattr(each, "tensor_model_parallel", False) is True),
        )
        _known.get()[module] = known
    return known


def read_state(key: str, stateful: Any) -> Any:
    """Return a state dict. The tensors of parameters that describe parts describe them, too, and so do their moments.

    Raise `SnapshotError` for parameters whose elements are elsewhere.
    """
    state = stateful.state_dict()
    if isinstance(stateful, torch.nn.Module) and isinstance(state, Mapping):
        _describe_parameters(key, stateful, state)
    elif isinstance(stateful, torch.optim.Optimizer) and isinstance(state, Mapping):
        _describe_moments(stateful, state)
    return state


def _describe_parameters(key: str, module: torch.nn.Module, state: Any) -> None:
    marked = find_marked_names(module)
    if marked.empty:
        refuse_empty((f"{key}/{name}", module.get_parameter(name)) for name in marked.empty)
    for name in marked.described:
        held, parameter = state.get(name), module.get_parameter(name)
        if isinstance(held, torch.Tensor) and not describes_parts(held) and held.data_ptr() == parameter.data_ptr():
            state[name] = copy_description(parameter, held)


def refuse_empty(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `SnapshotError` for parameters of ZeRO-3 that are not gathered."""
    for path, parameter in parameters:
        if hasattr(parameter, "ds_id") and not parameter.numel() and getattr(parameter, "ds_numel", True):
            raise SnapshotError(
                f"{path}: is a parameter of DeepSpeed's ZeRO-3, which is empty between its uses; save with "
                "snapshot.interop.deepspeed, or within deepspeed.zero.GatheredParameters"
            )


def _describe_moments(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Let the state of each parameter that describes parts describe them, where it has the parameter's shape."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        return
    parameters = [each for group in groups for each in group["params"]]
    if not any(map(describes_parts, parameters)) or not isinstance(state.get("state"), dict):
        return
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    states = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        held = states.get(number)
        if describes_parts(parameter) and isinstance(held, dict):
            states[number] = {name: _describe_moment(parameter, each) for name, each in held.items()}
    state["state"] = states


def _describe_moment(parameter: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or describes_parts(value):
        return value
    return copy_description(parameter, value)
