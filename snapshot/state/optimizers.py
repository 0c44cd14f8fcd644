"""Comparison of saved and live optimizers: the state of each parameter, and the options.

The names come from a table, since a fresh optimizer has no state yet, and a step would change the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snapshot.manifest.entries import DictEntry, ListEntry
from snapshot.manifest.optimizer import OptimizerRecord
from snapshot.manifest.paths import encode_component
from snapshot.manifest.scalars import Scalar
from snapshot.saved import class_name
from snapshot.tensors.dtypes import NAMES

_LIKE_PARAMETER = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev"}
    | {"square_avg", "step_size", "sum", "variance"}
)
"""State names of torch's optimizers with the parameter's shape."""
_LBFGS = "al d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss"
_STATE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(always.split()), frozenset(sometimes.split()))
    for name, always, sometimes in (
        ("Adadelta", "step square_avg acc_delta", ""),
        ("Adafactor", "step", "row_var col_var variance"),
        ("Adagrad", "step sum", ""),
        ("Adam", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("AdamW", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("Adamax", "step exp_avg exp_inf", ""),
        ("ASGD", "step eta mu ax", ""),
        ("LBFGS", "func_evals n_iter", _LBFGS),
        ("Muon", "", "momentum_buffer"),
        ("NAdam", "step mu_product exp_avg exp_avg_sq", ""),
        ("RAdam", "step exp_avg exp_avg_sq", ""),
        ("RMSprop", "step square_avg", "momentum_buffer grad_avg"),
        ("Rprop", "step prev step_size", ""),
        ("SGD", "", "momentum_buffer"),
        ("SparseAdam", "step exp_avg exp_avg_sq", ""),
    )
}
"""For torch's optimizers: the names in each parameter's state, and those that depend on options."""
_ANY_OPTIMIZER = frozenset(
    {"params", "param_names", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable", "maximize"}
    | {"decoupled_weight_decay", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
)
"""Options that do not identify the class: implementation choices, and those of learning rate schedulers."""


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer in a snapshot, without its tensors."""

    classes: tuple[str, ...]
    """Empty for a snapshot that does not record them."""
    state: Mapping[str, frozenset[str]]
    """Parameter -> the names in its state."""
    options: tuple[frozenset[str], ...]
    """The options of each parameter group."""
    groups: tuple[tuple[str, ...], ...]
    """The parameters of each group, by their names in `state`."""
    dtypes: Mapping[str, str]
    """The parameters' dtypes; empty for a snapshot that does not record them."""

    @staticmethod
    def from_entries(path: str, entries: Mapping[str, Any]) -> SavedOptimizer | None:
        """Return the optimizer below a path; None if the entries are not of an optimizer."""
        top, listed = entries.get(path), entries.get(f"{path}/param_groups")
        if not isinstance(top, DictEntry) or not isinstance(listed, ListEntry):
            return None
        options, groups = [], []
        for number in range(listed.length):
            base = f"{path}/param_groups/{number}"
            group, held = entries.get(base), entries.get(f"{base}/params")
            options.append(frozenset(group.components()) if isinstance(group, DictEntry) else frozenset())
            indices = [entries.get(f"{base}/params/{at}") for at in range(getattr(held, "length", 0))]
            groups.append(
                tuple(encode_component(str(each.value())) if isinstance(each, Scalar) else "" for each in indices)
            )
        states = entries.get(f"{path}/state")
        found: dict[str, frozenset[str]] = {}
        alike: dict[str, frozenset[str]] = {}
        for name in states.components() if isinstance(states, DictEntry) else ():
            each = entries.get(f"{path}/state/{name}")
            if isinstance(each, DictEntry):
                text = repr(each.keys)
                if text not in alike:
                    alike[text] = frozenset(each.components())
                found[name] = alike[text]
        classes, dtypes = (top.optimizer.classes, top.optimizer.dtypes) if top.optimizer else ((), ())
        params = [name for group in groups for name in group]
        dtypes = dtypes * len(params) if len(dtypes) == 1 else dtypes
        known = dict(zip(params, dtypes, strict=True)) if len(dtypes) == len(params) else {}
        return SavedOptimizer(classes, found, tuple(options), tuple(groups), known)


def make_record(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Any]) -> OptimizerRecord:
    """Return the record of optimizers with these parameters."""
    dtypes = [NAMES.get(each.dtype, "") if isinstance(each, torch.Tensor) else "" for each in parameters]
    return OptimizerRecord(_list_class_names(optimizers), tuple(dtypes[:1] if len(set(dtypes)) == 1 else dtypes))


def _list_class_names(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    return tuple(class_name(type(each)) for each in optimizers)


Owners = Mapping[str, torch.optim.Optimizer]
"""Parameter -> the optimizer that it belongs to."""


def describe_mismatch(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer], owners: Owners) -> str | None:
    """Return the reason why the saved state does not fit these optimizers; None if it fits.

    Each optimizer is compared for its own parameters.
    """
    same = saved.classes == _list_class_names(optimizers)
    if same and len(optimizers) == 1:
        return None
    by = f"saved by {_shorten_classes(saved.classes)} with" if saved.classes else "saved with"
    known = {(id(owners[name]), kept): owners[name] for name, kept in saved.state.items() if kept and name in owners}
    for (_, kept), owner in known.items():
        always, sometimes = _find_state_names(owner) or _find_seen_names(
            owner, kept if same or not saved.classes else frozenset()
        )
        possible = always | sometimes
        if possible and not always <= kept <= possible:
            return f"{by} {_join_names(kept)}; {type(owner).__name__} has {_join_names(possible)}"
    met: dict[tuple[int, frozenset[str]], torch.optim.Optimizer] = {}
    for options, params in zip(saved.options, saved.groups, strict=True):
        met |= {(id(owners[name]), options): owners[name] for name in params if name in owners}
    for (_, options), owner in met.items():
        defaults = frozenset(owner.defaults)
        held = frozenset(name for group in owner.param_groups for name in group)
        theirs, ours = options - defaults - held - _ANY_OPTIMIZER, defaults - options - _ANY_OPTIMIZER
        if (theirs or ours) if saved.classes and not same else (theirs and ours):
            return (
                f"{by} the options {_join_names(options - _ANY_OPTIMIZER) or '(none)'}; "
                f"{type(owner).__name__} has {_join_names(defaults - _ANY_OPTIMIZER) or '(none)'}"
            )
    return None


def describe_class_change(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return a text for optimizers of another class than the saved ones; None if the classes are equal."""
    if not saved.classes or saved.classes == _list_class_names(optimizers):
        return None
    here = ", ".join(type(each).__name__ for each in optimizers)
    known = not saved.state or all(_find_state_names(each) or each.state for each in optimizers)
    what = (
        "the names of state and options are the same"
        if known
        else ("the names of the options are the same; which names its state has is not known before its first step")
    )
    return f"saved by {_shorten_classes(saved.classes)}, restored into {here}: {what}"


def describe_group_change(saved: SavedOptimizer, live: Sequence[Sequence[str]]) -> str | None:
    """Return a text if shared parameters are in other groups; None if they are not."""
    common = {name for group in live for name in group}.intersection(*[[n for g in saved.groups for n in g]])
    there, here = ({frozenset(group) & common for group in groups} - {frozenset()} for groups in (saved.groups, live))
    if there == here:
        return None
    sizes = [[len(group) for group in groups] for groups in (saved.groups, live)]
    return f"the parameters are in other groups: the snapshot has groups of {sizes[0]}, the application of {sizes[1]}"


def knows_shapes(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return True if the shapes of all that these optimizers keep are known."""
    return all(_find_state_names(each) is not None for each in optimizers)


def find_expected_shape(name: str, shape: torch.Size) -> torch.Size | None:
    """Return the shape of a state tensor in torch's own optimizers; None if it is unknown."""
    if name in _LIKE_PARAMETER:
        return shape
    if name == "row_var" and shape:
        return torch.Size((*shape[:-1], 1))
    if name == "col_var" and len(shape) > 1:
        return torch.Size((*shape[:-2], 1, shape[-1]))
    return None


def _find_seen_names(optimizer: torch.optim.Optimizer, kept: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that an optimizer of another library has stored so far; `kept` if it has none."""
    held = frozenset(name for state in optimizer.state.values() if isinstance(state, dict) for name in state)
    return (kept, kept) if kept else (held, held)


def _find_state_names(optimizer: torch.optim.Optimizer) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the state names of each parameter, for an optimizer with torch's own `step`."""
    step = type(optimizer).step
    if not step.__module__.startswith("torch.optim."):
        return None
    return _STATE.get(step.__qualname__.partition(".")[0])


def _shorten_classes(classes: Iterable[str]) -> str:
    return ", ".join(each.rpartition(".")[2] for each in classes)


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
