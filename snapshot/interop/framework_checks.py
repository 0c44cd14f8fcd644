"""The checks that an adapter knows a framework: its version, and the methods that it overrides or calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.text import counted


def expect_version(package: str, known: Sequence[str], adapter: str) -> str:
    """Return the version of an installed package.

    Args:
        package: Its name on the index.
        known: The beginnings of the versions that the adapter knows: `"0.19"` for 0.19 and 0.19.8.
        adapter: The name of the adapter, for the error.

    Raises:
        MissingExtraError: The package is not installed.
        SnapshotError: The adapter does not know this version.
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingExtraError(f"{adapter} needs {package} {' or '.join(known)}, which is not installed") from error
    if not any(found == each or found.startswith(f"{each}.") for each in known):
        raise SnapshotError(
            f"{adapter}: {package} must be of version {' or '.join(known)}, got {found}; install one of these, or a "
            "newer version of snapshot"
        )
    return found


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


def expect_overridden(kind: type, mixin: type, methods: Mapping[str, int], requires: str) -> None:
    """Raise unless a mixin overrides these methods in a class, which have these numbers of arguments, without `self`.

    Raises:
        TypeError: A base before the mixin has one of them.
        SnapshotError: No base after it has one of them, or with another number of arguments.
    """
    order = kind.__mro__
    after = order[order.index(mixin) + 1 :]
    before = [each for each in order if each not in after and not issubclass(each, mixin)]
    for name, count in methods.items():
        hidden = [each for each in before if name in vars(each)]
        if hidden:
            raise TypeError(
                f"{kind.__name__}: {hidden[0].__name__} must come after {mixin.__name__}, since it defines {name}; "
                f"write class {kind.__name__}({mixin.__name__}, {hidden[0].__name__})"
            )
        own = next((vars(each)[name] for each in after if name in vars(each)), None)
        if own is None or len(inspect.signature(own).parameters) != count + 1:
            raise SnapshotError(
                f"{kind.__name__}: no base class has a method {name} with {counted(count, 'argument')} to override; "
                f"{mixin.__name__} requires {requires}"
            )
