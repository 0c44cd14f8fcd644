"""Parameters that are parts of larger tensors, by the marks of other libraries.

A module's `state_dict()` has detached tensors, which have lost the attributes of the parameters. So the live parameters
are looked at in each take and restore: another library may mark them, or replace them, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from snapshot import extensions
from snapshot.errors import SnapshotError
from snapshot.manifest.paths import encode_component
from snapshot.state.model_state import ModuleMap, walk_modules
from snapshot.state.sharded import copy_description, describes_parts, mark_parts
from snapshot.tensors.memory import address_of_tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPLIT = "tensor_model_parallel"
_LONGEST = 1000
"""Elements of the longest list in a stateful that may have modules. Longer ones are data, and cost time."""


class MarkedNames(NamedTuple):
    """The names of a module's parameters and buffers that are parts of larger tensors, and these tensors."""

    described: Mapping[str, torch.Tensor]
    """Tensors with the fields of torch's `CheckpointableTensor`."""
    empty: Mapping[str, torch.Tensor]
    """Parameters of DeepSpeed's ZeRO-3, whose elements are in a tensor of their own."""
    split: Mapping[str, torch.Tensor]
    """Parameters that Megatron splits over the ranks of its tensor parallelism."""


_NOTHING = MarkedNames({}, {}, {})


def find_marked_names(modules: Sequence[tuple[str, torch.nn.Module]]) -> MarkedNames:
    """Return the parameters and buffers with marks of other libraries, of modules with the prefixes of their names."""
    held = [(prefix, tensors) for prefix, each in modules for tensors in (each._parameters, each._buffers) if tensors]
    found = (each for _, tensors in held for each in tensors.values() if each is not None)
    if not any(type(each) not in _PLAIN or each.__dict__ for each in found):
        return _NOTHING  # without their names, which take longer
    named = [(prefix + name, each) for prefix, tensors in held for name, each in tensors.items() if each is not None]
    return MarkedNames(
        {name: each for name, each in named if describes_parts(each)},
        {name: each for name, each in named if hasattr(each, "ds_id")},
        {name: each for name, each in named if is_split(each)},
    )


def is_split(tensor: torch.Tensor) -> bool:
    """Return True for a parameter that Megatron splits over ranks."""
    return getattr(tensor, _SPLIT, False) is True


def find_split_paths(statefuls: Sequence[ModuleMap]) -> tuple[str, ...]:
    """Return the beginnings of the paths of parameters that Megatron marks as split, and of their moments."""
    found: list[str] = []
    for each in statefuls:
        if each.joined:
            continue
        found += [f"{each.path}/{encode_component(name)}/" for name in find_marked_names(each.modules).split]
        held = [parameter for one in each.optimizers for group in one.param_groups for parameter in group["params"]]
        found += [f"{each.state_path}/{number}/" for number, parameter in enumerate(held) if is_split(parameter)]
    return tuple(found)


def read_state(of: ModuleMap) -> Any:
    """Return the state dict of a stateful.

    The tensors of parameters that describe parts describe them, too, and so do their moments.
    The tensors of modules and optimizers in the attributes of a stateful are found by their memory.

    Raise `SnapshotError` for parameters whose elements are elsewhere.
    """
    return describe_state(of, of.stateful.state_dict())


def describe_state(of: ModuleMap, state: Any) -> Any:
    """As `read_state`, for a state dict that was read in another way."""
    if not isinstance(state, Mapping):
        return state
    if isinstance(of.stateful, torch.nn.Module):
        _describe_parameters(of, state)
    elif isinstance(of.stateful, torch.optim.Optimizer):
        _describe_moments(of.stateful, state)
    else:
        _describe_attributes(of.key, of.stateful, state)
    return state


def _describe_parameters(of: ModuleMap, state: Any) -> None:
    marked = find_marked_names(of.modules)
    if marked.empty:
        refuse_empty((f"{of.key}/{name}", each) for name, each in marked.empty.items())
    for name, each in marked.described.items():
        held = state.get(name)
        if not isinstance(held, torch.Tensor) or describes_parts(held):
            continue
        if address_of_tensor(held) == address_of_tensor(each):
            state[name] = copy_description(each, held)


def _describe_attributes(key: str, stateful: Any, state: Any) -> None:
    """Mark the tensors of a state dict that are those of marked parameters, or of their moments."""
    attributes = _list_attributes(stateful)
    models = (each for each in attributes if isinstance(each, torch.nn.Module))
    found = [find_marked_names(list(walk_modules(each, unwrapped=False))) for each in models]
    if not any(map(any, found)):
        return
    marked = [each for names in found for each in (*names.described.values(), *names.split.values())]
    sources = {(address_of_tensor(each), each.shape): each for each in marked}
    for optimizer in (each for each in attributes if isinstance(each, torch.optim.Optimizer)):
        for parameter in (each for each in marked if each in optimizer.state):
            for moment in optimizer.state[parameter].values():
                if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                    sources[address_of_tensor(moment), moment.shape] = parameter
    empty = {name: each for names in found for name, each in names.empty.items()}
    for path, value in _list_values(key, state):
        if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN:
            continue
        if not value.numel() and (name := path.rpartition("/")[2]) in empty:
            refuse_empty([(path, empty[name])])
        source = sources.get((address_of_tensor(value), value.shape)) if value.numel() else None
        if source is None or source is value:
            continue
        if describes_parts(source) and not describes_parts(value):
            mark_parts(source, value)
        if is_split(source):
            setattr(value, _SPLIT, True)


def _list_attributes(stateful: Any) -> list[Any]:
    """Return the attributes of an object, and the elements of those that are containers."""
    found: list[Any] = []
    for each in getattr(stateful, "__dict__", {}).values():
        if type(each) not in (list, tuple, dict):
            found.append(each)
        elif len(each) <= _LONGEST:
            found += each.values() if type(each) is dict else each
    return found


def _list_values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts, lists and tuples with their paths."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _list_values(f"{path}/{name}", each)
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _list_values(f"{path}/{at}", each)
    else:
        yield path, value


def refuse_empty(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `SnapshotError` for parameters of ZeRO-3 that are not gathered."""
    for path, parameter in parameters:
        if hasattr(parameter, "ds_id") and not parameter.numel() and getattr(parameter, "ds_numel", True):
            raise SnapshotError(
                f"{path}: is a parameter of DeepSpeed's ZeRO-3, which is empty between its uses; save with "
                f"{extensions.ADVICE['zero']}, or within deepspeed.zero.GatheredParameters"
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
