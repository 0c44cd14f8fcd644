"""Parameter groups of Megatron-core's optimizers: as they are stored, and which stored one a live one takes.

The common state has the groups of rank 0, as in Megatron's own directories. Another rank may have others, or rank 0
none at all. So the numbers of its group are also stored with each parameter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from snapshot.errors import RestoreError, SnapshotError

STEP = "step"
GROUPS = "optimizer.param_groups"
"""Name of the groups in messages."""
GROUP_NUMBERS = (
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "lr",
    "max_lr",
    "min_lr",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
)
"""What is stored of the group of each parameter. NaN stands for a value that a group lacks."""
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells groups apart in versions that list no more."""
_OWN = ("params", STEP, "is_expert_parallel")
"""Options that a live group does not take from a stored one."""


def read_numbers(group: Mapping[str, Any]) -> torch.Tensor:
    """Return `GROUP_NUMBERS` of a group."""
    beta1, beta2 = group.get("betas", (None, None))
    held = {**group, "beta1": beta1, "beta2": beta2}
    found = (held.get(name, held.get(f"pre_{name}")) for name in GROUP_NUMBERS)
    return torch.tensor([math.nan if each is None else float(each) for each in found], dtype=torch.float64)


def make_options(numbers: torch.Tensor) -> dict[str, Any]:
    """Return the options that `read_numbers` has read."""
    held = {n: value for n, value in zip(GROUP_NUMBERS, numbers.tolist(), strict=True) if not math.isnan(value)}
    betas = tuple(held.pop(name) for name in ("beta1", "beta2") if name in held)
    if "is_decoupled_lr" in held:
        held["is_decoupled_lr"] = bool(held["is_decoupled_lr"])
    return {**held, "betas": betas} if betas else held


# The common state


def read_common(optimizer: Any, optimizers: Sequence[Any]) -> Any:
    """Return groups and scalers, in the form of Megatron's own `state_dict()`, which needs a first step."""
    steps = [_read_step(one.optimizer) for one in optimizers]
    known = {step for step in steps if step is not None}
    only = known.copy().pop() if len(known) == 1 else None
    each = [_read_one(one, only if step is None else step) for one, step in zip(optimizers, steps, strict=True)]
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) == 1:
        return each[0] if each else {}
    numbers = [number for number, one in enumerate(chained) if not getattr(one, "is_stub_optimizer", False)]
    return dict(zip(numbers, each, strict=True))


def _read_step(inner: Any) -> float | int | None:
    """Return the step of an inner optimizer; None if it has no parameters on this rank."""
    steps: set[float | int] = {
        float(held[STEP]) for held in inner.state.values() if isinstance(held.get(STEP), torch.Tensor)
    }
    used = [group for group in inner.param_groups if group["params"]]
    if not steps:  # Transformer Engine does not count the step of a group without parameters
        steps = {int(group[STEP]) for group in used if STEP in group}
    if len(steps) > 1:
        raise SnapshotError(
            f"optimizer.state.{STEP}: all parameters must have made the same steps, got {sorted(steps)}"
        )
    return steps.pop() if steps else 0.0 if used else None


def _read_one(optimizer: Any, step: float | int | None) -> dict[str, Any]:
    counted = {} if step is None else {STEP: step}
    groups = [
        {**{name: value for name, value in group.items() if name not in ("params", STEP)}, **counted}
        for group in optimizer.optimizer.param_groups
    ]
    scaler = getattr(optimizer, "grad_scaler", None)
    found: dict[str, Any] = {"optimizer": {"param_groups": groups}}
    return {**found, "grad_scaler": scaler.state_dict()} if scaler else found


def load_scalers(optimizers: Sequence[Any], common: Any) -> None:
    """Give gradient scalers their stored state."""
    stored = common if isinstance(common, dict) and "optimizer" in common else None
    if stored is None:
        parts = common.values() if isinstance(common, dict) else common or []
        stored = next((each for each in parts if isinstance(each, dict) and "grad_scaler" in each), {})
    for each in optimizers:
        scaler = getattr(each, "grad_scaler", None)
        if scaler and "grad_scaler" in stored:
            scaler.load_state_dict(stored["grad_scaler"])


def list_groups(common: Any) -> list[dict[str, Any]]:
    """Return the stored groups of all optimizers of a chain."""
    if isinstance(common, list):
        return [group for each in common for group in list_groups(each)]
    if not isinstance(common, dict):
        return []
    groups = common.get("param_groups")
    if isinstance(groups, list):
        return [each for each in groups if isinstance(each, dict)]
    return [group for each in common.values() for group in list_groups(each)]


# The comparison


def _list_identifiers() -> tuple[str, ...]:
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return tuple(getattr(module, "param_group_identifier_keys", _IDENTIFIERS))


def identify(group: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what tells a group apart. NeMo has other names for two of the values."""
    names = [name for name in _list_identifiers() if name not in without]
    return {name: group.get(name, group.get(f"pre_{name}")) for name in names}


def find_group(group: Mapping[str, Any], stored: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the options and the step that a live group takes; None if no stored group fits.

    Groups agree in all that Megatron tells them apart by; else in all but parallelism of experts, which a group may
    gain or lose; else in the multipliers alone, since a resumed job may have other rates.

    Raises:
        RestoreError: Several stored groups fit, and differ.
    """
    rates = [name for name in _list_identifiers() if name not in _IDENTIFIERS]
    ways: tuple[Sequence[str], ...] = ((), ("is_expert_parallel",), rates, [*rates, "is_expert_parallel"])
    for without in ways:
        fits = [each for each in stored if identify(each, without) == identify(group, without)]
        options = [{name: value for name, value in each.items() if name not in _OWN} for each in fits]
        steps = [each[STEP] for each in fits if STEP in each]
        if any(each != options[0] for each in options) or any(each != steps[0] for each in steps):
            raise RestoreError(
                f"{GROUPS}: several stored groups fit the live group {identify(group)}: "
                f"{[identify(each) for each in fits]}",
                [GROUPS],
            )
        if options:
            return options[0] | ({STEP: steps[0]} if steps else {})
    return None


def choose_options(group: Mapping[str, Any], numbers: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Return the options that the numbers stored with a group's parameters have; None if they are of other groups."""
    options = [make_options(each) for each in numbers]
    known = [name for name in identify(group) if name in GROUP_NUMBERS]
    wanted = {name: group.get(name, group.get(f"pre_{name}")) for name in known}
    for names in (known, [name for name in known if name in _IDENTIFIERS]):
        if all(each.get(name) == wanted[name] for each in options for name in names):
            return options[0] if options and all(each == options[0] for each in options) else None
    return None


def describe_misfit(group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> RestoreError:
    """Return the error for a live group that no stored one fits."""
    return RestoreError(
        f"{GROUPS}: no stored group fits the live group {identify(group)}; the snapshot has "
        f"{[identify(each) for each in stored]}",
        [GROUPS],
    )
