"""The kind of each stateful object."""

from __future__ import annotations

from typing import Any

import torch

from snapshot.state.model_state import ModelState
from snapshot.state.model_state_kind import ModelStateKind
from snapshot.state.optimizer_kinds import OptimizerKind, has_param_groups
from snapshot.state.rng import RNGState
from snapshot.state.stateful import StateDict
from snapshot.state.stateful_kinds import Kind, ModuleKind, RNGKind, StateDictKind

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
