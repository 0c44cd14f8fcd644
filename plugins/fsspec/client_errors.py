"""Errors of fsspec's many clients: their translation, and their text without secrets."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.plugins.network.retry import TransientError

_TRANSIENT = {
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("asyncssh", "ConnectionLost"),
    ("asyncssh", "SFTPConnectionLost"),
    ("asyncssh", "SFTPNoConnection"),
    ("asyncssh", "ChannelOpenError"),
    ("botocore", "HTTPClientError"),
    ("requests", "ConnectionError"),
    ("webdav4", "BadGatewayError"),
    ("webdav4", "ResourceLocked"),
}
"""Transient errors by package and class, for classes that are not derived from Python's own."""


class LostError(TransientError):
    """Broken connection: the next attempt uses a new one."""


def translate(error: BaseException, said: str) -> StorageError:
    """Return this library's error for a client's error, with the text `said`."""
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    if isinstance(error, FileNotFoundError) or ("webdav4", "ResourceNotFound") in bases:
        return StorageNotFoundError(said)
    status = _status(error)
    if status in (404, 410):
        return StorageNotFoundError(said)
    if status is not None and (status in (408, 425, 429) or (status >= 500 and status not in (501, 505, 507))):
        return TransientError(said, refused=status in (425, 429))
    if isinstance(error, socket.gaierror):
        return StorageError(said) if error.errno == socket.EAI_NONAME else LostError(said)
    lost = isinstance(error, (ConnectionError, TimeoutError, EOFError)) or bool(bases & _TRANSIENT)
    if lost or (isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)):
        return LostError(said)
    made = StorageError(said)
    if isinstance(error, OSError):
        made.errno = error.errno
    return made


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from any of the clients' attributes."""
    response = getattr(error, "response", None)
    for holder, name in [(error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")]:
        status = getattr(holder, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


_HARMLESS = {
    "host",
    "port",
    "username",
    "user",
    "base_url",
    "endpoint_url",
    "known_hosts",
    "client_keys",
    "cache_storage",
    "fo",
    "path",
    "root",
}
_CREDENTIALS = re.compile(r"(://[^/\s:@]*):[^/\s@]*@")


def secrets_in(options: Any, name: str = "") -> Iterator[str]:
    """Yield the values to hide: all except addresses, since any other option may be a key."""
    if isinstance(options, Mapping):
        for each, value in options.items():
            yield from secrets_in(value, str(each))
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from secrets_in(value, name)
    elif isinstance(options, (str, bytes)) and name not in _HARMLESS:
        text = options if isinstance(options, str) else options.decode(errors="replace")
        if len(text) > 3:
            yield text


def redact(text: str, values: Sequence[str]) -> str:
    """Return a client's text without secrets."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return _CREDENTIALS.sub(r"\1:***@", text)


def all_words(error: BaseException | None) -> str:
    """Return all text of an error that a traceback shows."""
    words = []
    while error is not None:
        words.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__
    return " ".join(words)
