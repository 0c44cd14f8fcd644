"""Redirection of old module names for plugins, with a warning, for two minor versions."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def forward(module: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose names have moved: old name -> `module:name`."""

    def __getattr__(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        target = moved[name].replace(":", ".")
        warnings.warn(f"{module}.{name} is deprecated; use {target}", FutureWarning, stacklevel=2)
        return pkgutil.resolve_name(moved[name])

    return __getattr__
