"""Entry of the manager in a snapshot's metadata: the step and the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snapshot.text import with_article

NOTE = "snapshot.manager"
"""Key in a snapshot's metadata."""
WRITER = "writer"
"""Key in the entry: the job that took the step."""


def checked_step(step: Any) -> int:
    """Return the step as an int; raise TypeError or ValueError if invalid."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r} must be an integer")
    number = int(step.__index__())
    if not 0 <= number < 10**18:
        raise ValueError(f"step must be at least 0 and less than 10**18, got {number}")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats: numbers, or tensors and arrays of one element. Raise TypeError for other values."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must map names to numbers, got {with_article(type(metrics).__name__)}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a metric's name must be a non-empty str, got {name!r}")
    return name


def _number(name: str, value: Any) -> float:
    given = value
    if hasattr(value, "item") and hasattr(value, "shape"):  # a tensor, an array, or a NumPy scalar
        if math.prod(value.shape) != 1:
            raise TypeError(f"metrics[{name!r}] must be one number, got shape {tuple(value.shape)}")
        try:
            value = value.item()
        except (RuntimeError, NotImplementedError) as error:  # a meta tensor has no value
            raise TypeError(f"metrics[{name!r}]: {error}") from error
    if isinstance(value, (bool, str, bytes, complex)) or not hasattr(value, "__float__"):
        raise TypeError(f"metrics[{name!r}] must be a number, got {given!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"metrics[{name!r}] does not fit into a float: {error}") from error


def add_note(
    step: int, metrics: Mapping[str, float], metadata: Mapping[str, Any] | None, writer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a snapshot's metadata: the user's plus the manager's. NaN and infinity are stored by name."""
    given = dict(metadata or {})
    if NOTE in given:
        raise ValueError(f"metadata must not have the key {NOTE!r}: it is reserved for the manager")
    stored = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
    return {**given, NOTE: {"step": step, "metrics": stored} | ({WRITER: dict(writer)} if writer else {})}


def noted_step(metadata: Mapping[str, Any]) -> int | None:
    """Return the step number in a snapshot's metadata; None if no manager took it."""
    own = metadata.get(NOTE)
    step = own.get("step") if isinstance(own, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def noted_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a snapshot's metadata. Skip values that are not numbers: another program wrote them."""
    own = metadata.get(NOTE)
    stored = own.get("metrics") if isinstance(own, dict) else None
    found = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[name] = float(value)
    return found
