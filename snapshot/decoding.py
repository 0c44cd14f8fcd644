"""Decoding of JSON, msgpack and YAML that may be damaged or hostile: one error for all that can be wrong."""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)
"""Errors of msgspec for bytes that it cannot decode: a damaged text is a `UnicodeDecodeError`."""


@functools.cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@functools.cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode_json(data: bytes | memoryview | msgspec.Raw | str, kind: Any, what: object) -> Any:
    """Return JSON as a value of a type. Raise `CorruptSnapshotError` if it is not one; `what` begins its message.

    >>> decode_json(b"[1, 2]", list[int], "numbers")
    [1, 2]
    """
    try:
        return _json_decoder(kind).decode(data)
    except UNREADABLE as error:
        raise CorruptSnapshotError(f"{what}: {error}") from error


def decode_json_of_python(data: bytes | str, what: object) -> Any:
    """Return JSON of Python's own module, which may have NaN and Infinity. Raise as `decode_json` does."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptSnapshotError(f"{what}: {error}") from error


def decode_msgpack(data: bytes | memoryview, kind: Any, what: object) -> Any:
    """Return msgpack as a value of a type. Raise `CorruptSnapshotError` if it is not one; `what` begins its message."""
    try:
        return _msgpack_decoder(kind).decode(data)
    except UNREADABLE as error:
        raise CorruptSnapshotError(f"{what}: {error}") from error


def decode_yaml(text: str | bytes, what: object) -> Any:
    """Return YAML as plain values. Raise `CorruptSnapshotError` if it is not YAML, or if it has aliases.

    A few bytes with aliases can stand for any number of values. The message has no part of the text, which may have
    secrets.
    """
    import yaml  # imported late: rarely needed

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader))
        found = None if aliases else yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise CorruptSnapshotError(f"{what}: not YAML{line}") from error
    if aliases:
        raise CorruptSnapshotError(f"{what}: must not have YAML aliases")
    return found
