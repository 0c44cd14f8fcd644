"""Storage options that a process is given from outside: by a file, or by its environment.

No error shows a value, which may be a secret.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from snapshot.options import Settings

VARIABLE = "SNAPSHOT_STORAGE_OPTIONS"


def options_from_environment() -> dict[str, Any]:
    """Return the storage options that the environment gives."""
    text = Settings.current().storage_options.strip()
    if not text:
        return {}
    try:
        return _mapping(text) if text.startswith("{") else read_options(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def read_options(name: str) -> dict[str, Any]:
    """Return the options in a file, JSON or YAML; raise `ValueError` if it holds none."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text in UTF-8"
        raise ValueError(f"{name}: {reason}") from None
    return _mapping(text, name)


def _mapping(text: str, name: str = "") -> dict[str, Any]:
    where = f"{name}: " if name else ""
    value: Any = None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if name:  # what is in the environment is JSON
            value = _yaml(text, name)
    if value is None and name and not text.strip():
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}is not a mapping of names to values")
    return value


def _yaml(text: str, name: str) -> Any:
    import yaml  # few need it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)  # the error's text would show the line
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise ValueError(f"{name}: is neither JSON nor YAML{line}") from None
