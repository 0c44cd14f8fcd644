"""Universal checkpoints of DeepSpeed as a target: the values of their files, from a model and its named optimizer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from snapshot.errors import UnsupportedFormatError
from snapshot.text import listed
from snapshot.transform.export import StandIns
from snapshot_deepspeed.groups import WEIGHTS
from snapshot_deepspeed.universal import MODEL, MODEL_OF_STAGE_3, OPTIMIZER

LATEST = "latest_universal"
VERSION = "0.19.8"
"""The version of DeepSpeed whose format is written. Its reader expects one."""
_FORMAT_VERSION = 0.4
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""States that DeepSpeed expects of each parameter."""
_STEP = "step"
_STATE = re.compile(r"\w{1,100}", re.ASCII)
_NOT_FOLDERS = frozenset({"", ".", "..", OPTIMIZER.rpartition("/")[2]})
_MOST_STEPS = 1 << 53
_DEEPEST = 4
"""The depth in a state at which an optimizer is found."""
_OWN = frozenset(
    {"module", "optimizer", "zero", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
    | {"buffer_names", "universal_checkpoint_info", "checkpoint_parallel_dimensions", "ds_autoep_layers"}
)
"""Keys of DeepSpeed that describe its own tensors."""

Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


class NewFile(NamedTuple):
    """A file of torch.save."""

    name: str
    value: Any
    dtype: str | None = None
    """The dtype of its tensors, which are contiguous and plain; None for tensors that stay as they are."""


class UniversalFiles(NamedTuple):
    """The files of a universal checkpoint."""

    tag: str
    """The name of their folder."""
    files: list[NewFile]
    last: list[tuple[str, bytes]]
    """The small files that make it a checkpoint."""
    left_out: list[str]


class _Found(NamedTuple):
    """An optimizer in a state."""

    path: tuple[str, ...]
    """The keys of the dict that has it and the model."""
    above: Mapping[Any, Any]
    key: str

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of its parameters."""
        return self.above[self.key]["param_groups"]  # type: ignore[no-any-return]


def plan_universal(state: Any, where: object, absent: StandIns, read: Read) -> UniversalFiles:
    """Plan the files for a state.

    Args:
        state: The state. Most of its tensors are not in memory.
        where: The source, for errors.
        absent: The tensors that are not in memory.
        read: Returns small tensors, read from their paths in the source.
    """
    found = _find_optimizer(state, where)
    names = [name for group in found.groups for name in group["params"]]
    _expect_names(names, where)
    chosen = _find_model(found, names, where)
    weights, module = found.above[chosen], found.above[chosen]
    used = {found.key, chosen}
    if chosen == "model" and _is_model(found.above.get("module"), names):  # DeepSpeed's own: in the trained form
        module = found.above["module"]
        used.add("module")
    states = found.above[found.key]["state"]
    _expect_states(weights, states, names, where)
    small = _read_small(found.groups, states, where, absent, read)
    steps = _steps_of_groups(found.groups, states, small, where)

    rest = _without(state, found.path, used)
    left_out = [f"{name}: DeepSpeed has its own value of this name" for name in rest if name in _OWN]
    counted = rest.get("global_steps")
    done = int(counted if type(counted) is int and _is_step(counted) else max(steps))
    tag = f"global_step{done}_universal"
    places = {name: _place_of(each, absent) for name, each in weights.items() if isinstance(each, torch.Tensor)}
    owners = {places[name]: name for name in names}
    tied = {name for name, place in places.items() if place in owners} - set(names)
    skipped = rest.get("skipped_steps")
    head = {
        **{name: value for name, value in rest.items() if name not in _OWN},
        "param_shapes": [{name: weights[name].shape for name in group["params"]} for group in found.groups],
        "shared_params": {alias: owners[place] for alias, place in places.items() if alias in tied},
        "global_steps": done,
        "skipped_steps": skipped if type(skipped) is int else 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _FORMAT_VERSION},
    }
    files = []
    for name in names:
        folder = f"{tag}/zero/{name}"
        files.append(NewFile(f"{folder}/{WEIGHTS}.pt", _wrap(weights[name]), _wide(weights[name])))
        for key, value in states[name].items():
            if key == _STEP:
                files.append(NewFile(f"{folder}/{key}.pt", small.get(id(value), value)))
            else:
                files.append(NewFile(f"{folder}/{key}.pt", _wrap(value), _name_of(value.dtype)))
    files.append(NewFile(f"{tag}/{MODEL_OF_STAGE_3}", head))
    files.append(NewFile(f"{tag}/{MODEL}", {"module": module, **head}))
    optimizer = _encode_optimizer(found.groups, small, steps)
    return UniversalFiles(tag, files, [(f"{tag}/{OPTIMIZER}", optimizer), (LATEST, tag.encode())], left_out)


def _wrap(tensor: torch.Tensor) -> dict[str, Any]:
    return {"param": tensor, "cat_dim": 0}


def _place_of(tensor: torch.Tensor, absent: StandIns) -> object:
    """Return where a tensor is stored. Tied weights are stored at one place."""
    if id(tensor) not in absent or not tensor.numel():
        return id(tensor)
    entry = absent[id(tensor)][2]
    return repr((entry.places(), entry.dtype, entry.shape))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(weight: torch.Tensor) -> str:
    """Return the dtype of an optimizer's copy of a weight."""
    return "float32" if weight.element_size() < 4 else _name_of(weight.dtype)


# The model and its optimizer in the state


def _find_optimizer(state: Any, where: object) -> _Found:
    """Return the only optimizer in a state; raise if there is none, or if there are several."""
    every = list(_optimizers_in(state, ()))
    if len(every) != 1:
        names = ["/".join((*each.path, each.key)) for each in every]
        what = f"has several; exclude all but one:{listed(names)}" if names else "has none"
        raise UnsupportedFormatError(
            f"{where}: must have one optimizer, with its state and param_groups, for DeepSpeed; {what}"
        )
    return every[0]


def _optimizers_in(value: Any, path: tuple[str, ...]) -> Iterator[_Found]:
    if not isinstance(value, dict) or len(path) >= _DEEPEST:
        return
    for key, below in value.items():
        if not isinstance(key, str):
            continue
        if _is_optimizer(below):
            yield _Found(path, value, key)
        else:
            yield from _optimizers_in(below, (*path, key))


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(each, dict) and isinstance(each.get("params"), list) and each["params"] for each in groups
    )


def _expect_names(names: Sequence[Any], where: object) -> None:
    """Raise unless parameters have different names, which can be those of folders."""
    if not all(isinstance(name, str) for name in names):
        raise UnsupportedFormatError(
            f"{where}: the optimizer's parameters must have names for DeepSpeed, as ModelState saves them, got "
            "numbers; restore it into ModelState(model, optimizer), and save that"
        )
    wrong = [repr(name[:100]) for name in names if name in _NOT_FOLDERS or re.search(r"[/\\\0]", name)]
    if wrong:
        raise UnsupportedFormatError(f"{where}: names of parameters must be those of folders:{listed(wrong)}")
    if not names or len(set(names)) < len(names):
        raise UnsupportedFormatError(f"{where}: the optimizer must have each parameter once")


def _is_model(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), torch.Tensor) for name in names)


def _find_model(found: _Found, names: Sequence[str], where: object) -> str:
    """Return the key of the model beside its optimizer."""
    fitting = [key for key, value in found.above.items() if isinstance(key, str) and _is_model(value, names)]
    if "model" in fitting:
        return "model"
    if len(fitting) != 1:
        below = "/".join((*found.path, found.key))
        what = f"several do; exclude all but one, or name it model:{listed(fitting)}" if fitting else "none does"
        raise UnsupportedFormatError(f"{where}: a model beside {below} must have the optimizer's parameters; {what}")
    return fitting[0]


def _expect_states(weights: Mapping[str, Any], states: Mapping[Any, Any], names: Sequence[str], where: object) -> None:
    """Raise unless each parameter has a step, Adam's moments, and further states of its own shape only."""
    wrong = []
    for name in names:
        shape, held = weights[name].shape, states.get(name)
        if not weights[name].is_floating_point():
            wrong.append(f"{name}: {weights[name].dtype}")
        elif not isinstance(held, dict) or not {_STEP, *_MOMENTS} <= held.keys():
            wrong.append(f"{name}: {', '.join(map(str, held)) if isinstance(held, dict) and held else 'no state'}")
        else:
            wrong += [
                f"{name}: {key}"
                for key, value in held.items()
                if key != _STEP
                and not (isinstance(value, torch.Tensor) and value.shape == shape and _STATE.fullmatch(str(key)))
            ]
    if wrong:
        raise UnsupportedFormatError(
            f"{where}: DeepSpeed needs step, exp_avg and exp_avg_sq of each parameter, and other states of its shape "
            f"only; exclude the others, or save after a step of all parameters:{listed(wrong)}"
        )


def _without(state: Mapping[Any, Any], path: Sequence[str], keys: set[str]) -> dict[Any, Any]:
    """Return a state without some keys of the dict at a path, and without dicts that become empty."""
    if not path:
        return {key: value for key, value in state.items() if key not in keys}
    made = {**state, path[0]: _without(state[path[0]], path[1:], keys)}
    return made if made[path[0]] else {key: value for key, value in made.items() if key != path[0]}


# The values of groups, and the steps


def _read_small(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    where: object,
    absent: StandIns,
    read: Read,
) -> dict[int, torch.Tensor]:
    """Return tensors of one element, by the ids of those that are not in memory: steps, and values of groups."""
    steps = [states[name][_STEP] for group in groups for name in group["params"]]
    values = [value for group in groups for value in group.values()]
    wanted = [each for each in (*steps, *values) if isinstance(each, torch.Tensor)]
    if any(each.numel() != 1 for each in wanted):
        raise UnsupportedFormatError(f"{where}: steps and values of the optimizer's groups must be of one element")
    paths = {id(each): absent[id(each)][1] for each in wanted if id(each) in absent}
    held = read(list(paths.values()))
    return {number: held[path] for number, path in paths.items()}


def _steps_of_groups(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    small: Mapping[int, torch.Tensor],
    where: object,
) -> list[Any]:
    """Return the step of each group. DeepSpeed has one for all parameters of a group."""
    made = []
    for number, group in enumerate(groups):
        steps = {name: small.get(id(step := states[name][_STEP]), step) for name in group["params"]}
        first = next(iter(steps.values()))
        for name, step in steps.items():
            if not _is_step(step):
                raise UnsupportedFormatError(
                    f"{where}: the step of {name} must be a number up to 2**53, got {str(step)[:100]}"
                )
        if wrong := [f"{name}: {float(step)}" for name, step in steps.items() if step != first]:
            raise UnsupportedFormatError(
                f"{where}: all parameters of a group must have one step for DeepSpeed, which is {float(first)} in "
                f"group {number}, got:{listed(wrong)}"
            )
        made.append(first)
    return made


def _is_step(value: Any) -> bool:
    try:
        return isinstance(value, (torch.Tensor, int, float)) and 0 <= float(value) < _MOST_STEPS
    except (OverflowError, RuntimeError, TypeError):  # such as a complex tensor
        return False


def _encode_optimizer(
    groups: Sequence[Mapping[str, Any]], small: Mapping[int, torch.Tensor], steps: Sequence[Any]
) -> bytes:
    """Return the file of the groups' values. ZeRO 3 looks for them, and for the step, at another place."""
    made = [
        {**{key: small.get(id(value), value) for key, value in group.items()}, "params": [number]}
        for number, group in enumerate(groups)
    ]
    inner = {"state": {number: {_STEP: step} for number, step in enumerate(steps)}, "param_groups": made}
    file = io.BytesIO()
    torch.save({"ds_version": VERSION, "param_groups": made, "optimizer_state_dict": inner}, file)
    return file.getvalue()
