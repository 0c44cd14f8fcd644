"""Storage options from a file or from the environment.

No error message shows a value, since it may be a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from snapshot.decoding import decode_yaml
from snapshot.errors import CorruptSnapshotError
from snapshot.options import Settings
from snapshot.text import with_article
from snapshot.url import URL

VARIABLE = "SNAPSHOT_STORAGE_OPTIONS"
WHERE = re.compile(
    r"endpoint|account_(name|host)|profile|connection_string|host|(^|_)port$|url|protocol|project|(^|_)fo$",
    re.IGNORECASE,
)
"""Names of storage options that select another server or account."""


class Located(Protocol):
    """A snapshot, with the storage options that open it."""

    def source(self) -> tuple[URL, Mapping[str, Any]]:
        """Return its URL and its storage options."""
        ...

    @property
    def seal(self) -> Any:
        """The check that its files must pass, or None."""
        ...


Source = str | os.PathLike[str] | Located


def expect_mapping(options: Any) -> Mapping[str, Any]:
    """Return storage options; raise TypeError unless they are a mapping or None."""
    if options is None or isinstance(options, Mapping):
        return options or {}
    raise TypeError(f"storage_options must be a mapping, got {with_article(type(options).__name__)}")


def locate_source(source: Source, options: Mapping[str, Any] | None) -> tuple[URL, Mapping[str, Any] | None]:
    """Return the URL and the options of a snapshot. A path has the `options`."""
    if isinstance(source, (str, os.PathLike)):
        return URL.parse(os.fspath(source)), options
    return source.source()


def seal_of(source: Source) -> Any:
    """Return the check that a snapshot's files must pass; None for a path."""
    return None if isinstance(source, (str, os.PathLike)) else getattr(source, "seal", None)


def options_from_environment() -> dict[str, Any]:
    """Return the storage options that the environment sets."""
    text = Settings.current().storage_options.strip()
    if not text:
        return {}
    try:
        return _mapping(text) if text.startswith("{") else read_options(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def read_options(name: str) -> dict[str, Any]:
    """Read options from a JSON or YAML file. Raise `ValueError` if it holds none."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ValueError(f"{name}: {reason}") from None
    return _mapping(text, name)


def _mapping(text: str, name: str = "") -> dict[str, Any]:
    where = f"{name}: " if name else ""
    value: Any = None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if name:  # the environment holds JSON only
            value = _yaml(text, name)
    if value is None and name and not text.strip():
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}is not a mapping of names to values")
    return value


def _yaml(text: str, name: str) -> Any:
    try:
        return decode_yaml(text, f"{name}: must be JSON or YAML")
    except CorruptSnapshotError as error:
        raise ValueError(str(error)) from None


def select_server(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the storage options that select the server and the account, without credentials and tuning."""
    made: dict[str, Any] = {}
    for name, value in dict(options or {}).items():
        if isinstance(value, Mapping):
            made |= {f"{name}.{below}": each for below, each in select_server(value).items()}
        elif WHERE.search(name):
            made[name] = value
    return made
