"""What the manager writes into each snapshot's metadata: its step, and metrics, which may be no number at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snapshot.text import with_article

NOTE = "snapshot.manager"
"""The key in a snapshot's metadata."""


def checked_step(step: Any) -> int:
    """Return the step, if it is one; `TypeError` or `ValueError` if not."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r}: a step is a whole number")
    number = int(step.__index__())
    if not 0 <= number < 10**18:
        raise ValueError(f"step={number}: a step is 0 or more, and less than 10**18")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats: numbers, tensors and arrays of one element. `TypeError` for anything else."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is {with_article(type(metrics).__name__)}, and must map names to numbers")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"metrics: {name!r} is no name")
    return name


def _number(name: str, value: Any) -> float:
    given = value
    if hasattr(value, "item") and hasattr(value, "shape"):  # a tensor, an array, or a scalar of NumPy's
        if math.prod(value.shape) != 1:
            raise TypeError(f"metrics[{name!r}] has shape {tuple(value.shape)}, and must be one number")
        try:
            value = value.item()
        except (RuntimeError, NotImplementedError) as error:  # on the meta device there is no value
            raise TypeError(f"metrics[{name!r}]: {error}") from error
    if isinstance(value, (bool, str, bytes, complex)) or not hasattr(value, "__float__"):
        raise TypeError(f"metrics[{name!r}] is {given!r}, and must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"metrics[{name!r}] is no number that a float can hold: {error}") from error


def add_note(step: int, metrics: Mapping[str, float], metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a snapshot's metadata: the user's, and ours beside it. JSON has no NaN and no infinity, but their
    names."""
    given = dict(metadata or {})
    if NOTE in given:
        raise ValueError(f"metadata: the key {NOTE!r} is the manager's own")
    stored = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
    return {**given, NOTE: {"step": step, "metrics": stored}}


def noted_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that stand in a snapshot's metadata; what is no number there is left out, as of somebody
    else's."""
    own = metadata.get(NOTE)
    stored = own.get("metrics") if isinstance(own, dict) else None
    found = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[name] = float(value)
    return found
