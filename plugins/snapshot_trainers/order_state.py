"""The parts of the state of a `DataOrder`, which may come from a damaged snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from snapshot_trainers.ledger import RECORD

_NOTHING = object()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_sum(value: Any) -> bool:
    return type(value) is bytes and len(value) == RECORD


def _is_held(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _is_start(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and type(value.get("lazy")) is bool
        and all(
            isinstance(part := value.get(name), Mapping) and isinstance(part.get("globals"), Mapping)
            for name in ("iter", "next")
        )
        and _is_held(value["iter"].get("samplers"))
        and (value["next"].get("samplers") is None or _is_held(value["next"]["samplers"]))
    )


_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "shape": (lambda value: isinstance(value, Mapping), "a mapping"),
    **dict.fromkeys(("epoch", "batches", "units", "round"), (_is_count, "a number")),
    **{name: (lambda value: type(value) is bool, "True or False") for name in ("between", "moved")},
    **dict.fromkeys(("seen", "before", "divided"), (_is_sum, f"{RECORD} bytes")),
    **{name: (lambda value: value is None or _is_count(value), "a number") for name in ("batch_size", "iteration")},
    **{name: (lambda value: value is None or _is_held(value), "a list of mappings") for name in ("now", "after")},
    "past": (lambda value: type(value) is bytes and not len(value) % RECORD, f"a multiple of {RECORD} bytes"),
    "evened": (
        lambda value: (
            isinstance(value, Mapping) and all(str(name).isdecimal() and _is_sum(each) for name, each in value.items())
        ),
        "a mapping of numbers to sums",
    ),
    "start": (_is_start, "what the samplers held"),
}
"""The parts of a state -> whether one is right, and what it must be."""


def expect_whole(state: Any) -> None:
    """Raise unless a state has all parts, of the right types."""
    for name, (is_right, wanted) in _PARTS.items():
        value = state.get(name, _NOTHING) if isinstance(state, Mapping) else _NOTHING
        if not is_right(value):
            told = "nothing" if value is _NOTHING else repr(value)[:60]
            raise ValueError(
                f"the state of the loader is damaged: its {name} must be {wanted}, got {told}; exclude the loader to "
                "begin a new epoch"
            )
