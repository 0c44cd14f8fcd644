"""Matching an optimizer: its class, options, dtypes and shapes, before any of its state is placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapshot.loading.restore_options import CASTS, RestoreOptions
from snapshot.reports import RestoreIssues
from snapshot.state.optimizer_kinds import StateOfParameters


@dataclass
class OptimizerMatch:
    """The result of an optimizer's comparison."""

    goes_on: bool = True
    """False if nothing of the stateful is restored."""
    left: bool = False
    """True if a part of the saved state was not restored."""
    shapes: bool = False
    """True if a mismatch is about a shape."""


def match_optimizer(
    kind: StateOfParameters,
    entries: dict[str, Any],
    lines: list[str],
    options: RestoreOptions,
    *,
    beside: Callable[[Any], bool],
    notes: RestoreIssues,
    unfit: set[int],
) -> OptimizerMatch:
    """Compare an optimizer with the saved one. `lines` has the reasons already known why it cannot take the state."""
    why = kind.describe_mismatch(entries)
    lines = [why] if why else lines
    if lines and not options.strict:
        reasons = "; ".join(line.removeprefix(f"{kind.base}: ") for line in lines)
        notes.add("skipped", kind.base, f"left unchanged: {reasons}")
        return OptimizerMatch(goes_on=not kind.drop_optimizer(entries), left=True)
    if lines:
        notes.mismatches += [f"{line}; strict=False leaves the optimizer unchanged" for line in lines]
        return OptimizerMatch()
    found = OptimizerMatch()
    for line, path, detail in kind.make_notes():
        notes.add(line, path, detail)
    notes.mismatches += kind.choose_dtypes(options.cast, CASTS[options.cast], beside)
    for name, what in kind.find_other_shapes(entries, unfit).items():
        path = f"{kind.base}/state/{name}"
        if options.mismatched == "skip":
            kind.drop_state(name, entries)
            notes.add("skipped", path, f"{what}; left unchanged")
            found.left = True
        else:
            found.shapes = True
            notes.mismatches.append(f"{path}: {what}")
    return found
