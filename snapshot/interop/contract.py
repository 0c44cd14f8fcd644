"""The check that a framework has the methods that an adapter overrides or calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from snapshot.errors import SnapshotError


def expect_parameters(owner: Any, methods: Mapping[str, tuple[str, ...]], requires: str) -> None:
    """Raise `SnapshotError` unless a class or module has these functions with these parameters, without `self`.

    Further parameters are allowed if they have defaults. `requires`: the versions that the adapter knows.
    """
    for name, expected in methods.items():
        function = getattr(owner, name, None)
        found = list(inspect.signature(function).parameters.values()) if callable(function) else None
        shown = None if found is None else [each for each in found if each.name not in ("self", "cls")]
        if shown is not None:
            names = tuple(each.name for each in shown[: len(expected)])
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            rest = [each for each in shown[len(expected) :] if each.default is each.empty and each.kind not in kinds]
            if names == expected and not rest:
                continue
        where = f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__
        got = "no such function" if shown is None else f"({', '.join(each.name for each in shown)})"
        raise SnapshotError(
            f"{where}.{name} must have the parameters ({', '.join(expected)}), got {got}; this version is not known, "
            f"use {requires}"
        )
