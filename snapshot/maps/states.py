"""Names of what an optimizer keeps of each tensor, so that a map of a model's tensors applies to its optimizer, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from snapshot.maps.names import NamePattern

NAME, STATE = "name", "state"


class StateRule(NamedTuple):
    """Names of states in the old layout, and their paths in the new one."""

    pattern: NamePattern
    """A name with `{name...}`, the name of the tensor, and `{state}`."""
    path: str | None
    """The path with both, such as `optim/state/{name}/{state}`. None if these states are dropped."""


class State(NamedTuple):
    """A tensor that an optimizer keeps of another one."""

    of: str
    """Name of the other tensor in the old layout."""
    kind: str
    """Name of the state, such as `exp_avg`; empty if the rule has one state alone."""
    rule: StateRule


def parse_states(given: Mapping[str, Any] | None) -> tuple[StateRule, ...]:
    """Return the rules for states. Raise ValueError if one is invalid."""
    if not isinstance(given or {}, Mapping):
        raise ValueError(f"states must be a mapping, got {given!r}")
    found = []
    for text, path in (given or {}).items():
        pattern = NamePattern.compile(text if isinstance(text, str) else "")
        extra = set(pattern.placeholders) - {NAME, STATE}
        if NAME not in pattern.placeholders or extra or not isinstance(path, str | None):
            raise ValueError(
                f"states: {text!r} must have {{name...}}, and may have {{state}}; its value must be a path or null, "
                f"got {path!r}"
            )
        if path is not None and f"{{{NAME}}}" not in path.split("/"):
            raise ValueError(f"states: {path!r} must be a path with {{name}} as one of its components")
        found.append(StateRule(pattern, path))
    return tuple(found)


def find_states(rules: Iterable[StateRule], names: Iterable[str]) -> dict[str, State]:
    """Return the names that are those of states.

    >>> rules = parse_states({"optimizer.{state}.{name...}": "optim/state/{name}/{state}"})
    >>> found = find_states(rules, ["layer.weight", "optimizer.exp_avg.layer.weight"])
    >>> {name: (state.of, state.kind) for name, state in found.items()}
    {'optimizer.exp_avg.layer.weight': ('layer.weight', 'exp_avg')}
    """
    rules, found = tuple(rules), {}
    for name in names if rules else ():
        for rule in rules:
            values = rule.pattern.match(name)
            if values is not None:
                found[name] = State(values[NAME], values.get(STATE, ""), rule)
                break
    return found
