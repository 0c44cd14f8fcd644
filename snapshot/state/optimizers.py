"""Optimizers compared by name: what a saved one and a live one keep of each parameter, and which options they have.

The names come from a table, since a fresh optimizer has no state yet, and taking a step would change the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snapshot.manifest.entries import DictEntry, ListEntry
from snapshot.manifest.optimizer import OptimizerRecord
from snapshot.manifest.paths import component
from snapshot.manifest.scalars import Scalar
from snapshot.tensors.dtypes import NAMES

_LIKE_PARAMETER = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev"}
    | {"square_avg", "step_size", "sum", "variance"}
)
"""What torch's optimizers keep in the shape of the parameter."""
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
"""Of torch's optimizers: the names in the state of each parameter that has any, and those that depend on options."""
_ANY_OPTIMIZER = frozenset(
    {"params", "param_names", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable", "maximize"}
    | {"decoupled_weight_decay", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
)
"""Options that say nothing of the class: how it computes, and what learning rate schedulers add."""


@dataclass(frozen=True)
class SavedOptimizer:
    """What a snapshot holds of an optimizer, without its tensors."""

    classes: tuple[str, ...]
    """Empty for a snapshot that does not record them."""
    state: frozenset[str]
    """The names in the state of the parameters."""
    groups: tuple[frozenset[str], ...]
    """The options of each parameter group."""
    params: tuple[str, ...]
    """The parameters, as they are named in `state`, in the order of the groups."""
    dtypes: tuple[str, ...]
    """Of the parameters, in that order; empty for a snapshot that does not record them."""

    @staticmethod
    def of(path: str, entries: Mapping[str, Any]) -> SavedOptimizer | None:
        """Read it from the entries below a path; None where these are of no optimizer."""
        top, listed = entries.get(path), entries.get(f"{path}/param_groups")
        if not isinstance(top, DictEntry) or not isinstance(listed, ListEntry):
            return None
        groups, params = [], []
        for number in range(listed.length):
            base = f"{path}/param_groups/{number}"
            group = entries.get(base)
            groups.append(frozenset(group.components()) if isinstance(group, DictEntry) else frozenset())
            held = entries.get(f"{base}/params")
            for at in range(held.length if isinstance(held, ListEntry) else 0):
                index = entries.get(f"{base}/params/{at}")
                params.append(component(str(index.value())) if isinstance(index, Scalar) else "")
        states = entries.get(f"{path}/state")
        found: set[str] = set()
        for name in states.components() if isinstance(states, DictEntry) else ():
            each = entries.get(f"{path}/state/{name}")
            found.update(each.components() if isinstance(each, DictEntry) else ())
        record = top.optimizer
        dtypes = record.dtypes if record else ()
        dtypes = dtypes * len(params) if len(dtypes) == 1 else dtypes
        return SavedOptimizer(
            record.classes if record else (), frozenset(found), tuple(groups), tuple(params),
            dtypes if len(dtypes) == len(params) else (),
        )  # fmt: skip


def record_of(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Any]) -> OptimizerRecord:
    """Return what is recorded of optimizers with these parameters."""
    dtypes = [NAMES.get(each.dtype, "") if isinstance(each, torch.Tensor) else "" for each in parameters]
    return OptimizerRecord(
        tuple(map(_class_name, optimizers)), tuple(dtypes[:1] if len(set(dtypes)) == 1 else dtypes)
    )  # fmt: skip


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def mismatch_of(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Say why the state of the saved optimizer is none for these; None if it is."""
    classes = tuple(map(_class_name, optimizers))
    if saved.classes == classes:
        return None
    here = ", ".join(sorted({type(each).__name__ for each in optimizers}))
    by = f"saved by {_short(saved.classes)} with" if saved.classes else "saved with"
    names = [_state_names(each) for each in optimizers]
    if saved.state and None not in names:
        known = [each for each in names if each is not None]
        always = frozenset.intersection(*(each[0] for each in known))
        possible = frozenset().union(*(each[0] | each[1] for each in known))
        if not always <= saved.state <= possible:
            return f"{by} {_listed(saved.state)}; {here} has {_listed(possible) or 'no state'}"
    options = frozenset().union(*saved.groups) if saved.groups else frozenset()
    defaults = frozenset().union(*(each.defaults for each in optimizers))
    held = frozenset(name for each in optimizers for group in each.param_groups for name in group)
    theirs, ours = options - defaults - held - _ANY_OPTIMIZER, defaults - options - _ANY_OPTIMIZER
    if (theirs or ours) if saved.classes else (theirs and ours):
        return (
            f"{by} the options {_listed(options - _ANY_OPTIMIZER) or '(none)'}; "
            f"{here} has {_listed(defaults - _ANY_OPTIMIZER) or '(none)'}"
        )
    return None


def change_of(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Say that the optimizers are of another class than those that were saved; None if they are not."""
    if not saved.classes or saved.classes == tuple(map(_class_name, optimizers)):
        return None
    here = ", ".join(type(each).__name__ for each in optimizers)
    return f"saved by {_short(saved.classes)}, restored into {here}: the names of state and options are the same"


def expected_shape(optimizers: Sequence[torch.optim.Optimizer], name: str, shape: torch.Size) -> torch.Size | None:
    """The shape that torch's own optimizers give to what they keep of a parameter; None where it is not known."""
    if any(_state_names(each) is None for each in optimizers):
        return None
    if name in _LIKE_PARAMETER:
        return shape
    if name == "row_var" and shape:
        return torch.Size((*shape[:-1], 1))
    if name == "col_var" and len(shape) > 1:
        return torch.Size((*shape[:-2], 1, shape[-1]))
    return None


def _state_names(optimizer: torch.optim.Optimizer) -> tuple[frozenset[str], frozenset[str]] | None:
    """The names that an optimizer whose `step` is torch's own keeps of each parameter."""
    step = type(optimizer).step
    if not step.__module__.startswith("torch.optim."):
        return None
    return _STATE.get(step.__qualname__.partition(".")[0])


def _short(classes: Iterable[str]) -> str:
    return ", ".join(each.rpartition(".")[2] for each in classes)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
