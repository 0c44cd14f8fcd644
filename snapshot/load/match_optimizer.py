"""Matching an optimizer: its class, options, dtypes and shapes, before any of its state is placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapshot.load.restore_options import CASTS, RestoreOptions
from snapshot.reports import RestoreIssues
from snapshot.state.optimizer_kinds import StateOfParameters


@dataclass
class OptimizerMatch:
    """The result of the comparison."""

    goes_on: bool = True
    """False where nothing of the stateful is restored."""
    left: bool = False
    """True if something that the snapshot has was left as it is."""
    shapes: bool = False
    """True if a shape that differs is among the mismatches."""


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
    """Compare an optimizer with the saved one. `lines` says why it cannot take the state, as far as that is known."""
    why = kind.describe_mismatch(entries)
    lines = [why] if why else lines
    if lines and not options.strict:
        reasons = "; ".join(line.removeprefix(f"{kind.base}: ") for line in lines)
        notes.add("skipped", kind.base, f"left as it is: {reasons}")
        return OptimizerMatch(goes_on=not kind.drop_optimizer(entries), left=True)
    if lines:
        notes.mismatches += [f"{line}; strict=False leaves the optimizer as it is" for line in lines]
        return OptimizerMatch()
    found = OptimizerMatch()
    for line, path, detail in kind.make_notes():
        notes.add(line, path, detail)
    notes.mismatches += kind.choose_dtypes(options.cast, CASTS[options.cast], beside)
    for name, what in kind.find_other_shapes(entries, unfit).items():
        path = f"{kind.base}/state/{name}"
        if options.mismatched == "skip":
            kind.drop_state(name, entries)
            notes.add("skipped", path, f"{what}; left as it is")
            found.left = True
        else:
            found.shapes = True
            notes.mismatches.append(f"{path}: {what}")
    return found
