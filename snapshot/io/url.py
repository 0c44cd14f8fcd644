"""Storage URLs, parsed and printed without secrets, and storage options from a file or the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from snapshot.decoding import decode_yaml
from snapshot.errors import CorruptSnapshotError
from snapshot.io.system import WINDOWS
from snapshot.settings import Settings
from snapshot.text import with_article

# Storage URLs: parsed, joined with paths, and printed without secrets.

_SECRET_WITH_SLASH = re.compile(r"[^/:@]+:(?!\d+(?:/|$))[^@]*@")
"""Matches `name:secret@` with a `/` in the secret. It should be written `%2F`, but people paste keys unescaped."""
_NAMES = {"abfs", "abfss", "sftp", "ssh", "ftp"}
"""Schemes with a container or user name before an `@`; in other schemes it may be a token."""
PER_HOST = "near"
"""Scheme of folders that each host of a job has for itself, possibly at different paths."""
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_DRIVE = re.compile(r"[A-Za-z]:")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")


@dataclass(frozen=True, slots=True)
class URL:
    """A storage location. Its text hides passwords and query strings; `reveal()` returns the full URL for a client."""

    scheme: str
    location: str
    """The part after `scheme://`, without the query; for `file` a file system path."""
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> URL:
        """Parse `scheme://location?query`. Text without a scheme is a file system path.

        >>> str(URL.parse("s3://key:secret@bucket/run?token=abc"))
        's3://key:***@bucket/run?***'
        """
        if not text:
            raise ValueError("the path must not be empty; the current folder is '.'")
        found = _SCHEME.match(text)
        if not found:
            if _ONE_SLASH.match(text) and not (WINDOWS and _DRIVE.match(text)):
                scheme, _, rest = text.partition(":/")
                raise ValueError(
                    f"{scheme}:/...: a URL must have two slashes after its scheme: {scheme}://...; write a file "
                    f"system path of this name as ./{scheme}:/..."
                )
            return cls("file", Path(os.path.expanduser(text)).absolute().as_posix())  # an unknown ~user is kept
        scheme, rest = found[1].lower(), text[found.end() :]
        if scheme == "file":
            if not rest.startswith("/"):
                host, slash, path = rest.partition("/")
                if host != "localhost" or not slash:
                    raise ValueError(f"a file URL must have three slashes, as in file:///absolute/path, got {text!r}")
                rest = "/" + path
            path = unquote(rest)
            return cls("file", Path(path[1:] if WINDOWS and _DRIVE.match(path[1:]) else path).as_posix())
        if scheme == PER_HOST:
            return cls(scheme, unquote(rest))
        location, _, query = rest.partition("?")
        return cls(scheme, location.rstrip("/"), query)

    def join(self, path: str) -> URL:
        """Return the URL of a file below this one. The query stays after the path."""
        return URL(self.scheme, f"{self.location.rstrip('/')}/{path}" if path else self.location, self.query)

    def reveal(self) -> str:
        """Return the full URL with its secrets, for use by clients only. Parsing it gives this URL again."""
        if self.scheme in ("file", PER_HOST):
            slash = "/" if self.scheme == "file" and not self.location.startswith("/") else ""  # before a drive
            return f"{self.scheme}://{slash}{quote(self.location)}"
        return f"{self.scheme}://{self.location}" + (f"?{self.query}" if self.query else "")

    def apart(self) -> tuple[str, str]:
        """Split at the `@` after a host's user or container. An `@` in a path does not count."""
        end = self.location.partition("/")[0].rfind("@")
        if end < 0 and (pasted := _SECRET_WITH_SLASH.match(self.location)):
            end = pasted.end() - 1
        return self.location[: max(end, 0)], self.location[end + 1 :]

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.location
        user, rest = self.apart()
        if len(user) + len(rest) < len(self.location):
            rest = f"@{rest}"
        if user:
            name, colon, _ = user.partition(":")
            user = f"{name}:***" if colon else user if self.scheme in _NAMES else "***"
        return f"{self.scheme}://{user}{rest}" + ("?***" if self.query else "")

    def __repr__(self) -> str:
        return f"URL({str(self)!r})"


# Storage options from a file or from the environment.
#
# No error message shows a value, since it may be a secret.

VARIABLE = "SNAPSHOT_STORAGE_OPTIONS"
WHERE = re.compile(
    r"endpoint|account_(name|host)|profile|connection_string|host|(^|_)port$|url|protocol|project|(^|_)fo$",
    re.IGNORECASE,
)
"""Names of storage options that select another server or account."""


@dataclass(frozen=True)
class Location:
    """The place of a checkpoint: its URL, its storage options, and the check that its files must pass."""

    url: URL
    options: Mapping[str, Any] | None = None
    seal: Any = None
    """A `Seal`, for a checkpoint that must be signed."""


class Located(Protocol):
    """A snapshot."""

    @property
    def location(self) -> Location:
        """Its place, with the options that open it."""
        ...


Source = str | os.PathLike[str] | Located


def expect_mapping(options: Any) -> Mapping[str, Any]:
    """Return storage options; raise TypeError unless they are a mapping or None."""
    if options is None or isinstance(options, Mapping):
        return options or {}
    raise TypeError(f"storage_options must be a mapping, got {with_article(type(options).__name__)}")


def locate_source(source: Source, beside: Location | None = None) -> Location:
    """Return the place of a snapshot. A path has the options of another place, if that has the same scheme."""
    if not isinstance(source, (str, os.PathLike)):
        return source.location
    url = URL.parse(os.fspath(source))
    return Location(url, beside.options if beside is not None and beside.url.scheme == url.scheme else None)


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
