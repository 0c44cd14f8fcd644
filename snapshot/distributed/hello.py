"""The first exchange of an operation: all ranks report which one they called, and with which path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from snapshot.errors import SnapshotError
from snapshot.events import warn
from snapshot.url import PER_HOST, URL


class Hello(msgspec.Struct, array_like=True):
    """A rank's first message."""

    verb: str
    path: str
    globs: list[str] = []
    keys: list[str] = []
    """The public keys of the operation and of its bases; empty texts for none."""


class _Caller(Protocol):
    """A rank's first message, of any kind."""

    verb: str


def expect_same_verb(hellos: Sequence[_Caller]) -> None:
    """Raise if the ranks called different verbs."""
    verbs = {hello.verb: rank for rank, hello in enumerate(hellos)}
    if len(verbs) > 1:
        raise SnapshotError(
            "all ranks must call the same method, got "
            f"{', '.join(f'{verb} on rank {rank}' for verb, rank in verbs.items())}"
        )


def expect_same_keys(argument: str, keys: Sequence[Sequence[str]]) -> None:
    """Raise unless the ranks gave the same keys. Otherwise, some ranks would use bytes that others refuse."""
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise SnapshotError(
                f"{argument} must be the same on all ranks, got {_key_text(keys[0])} on rank 0, {_key_text(key)} on "
                f"rank {rank}"
            )


def _key_text(keys: Sequence[str]) -> str:
    return " and ".join(each or "no key" for each in keys) or "no key"


def agreed_url(url: URL, leader: str) -> URL:
    """Return the leader's URL. Warn if this rank gave another one, unless each host has its own."""
    if leader == url.reveal():
        return url
    agreed = URL.parse(leader)
    if agreed.scheme == url.scheme == PER_HOST:
        return url
    warn(f"this rank gave the path {str(url)!r}; rank 0's is used: {str(agreed)!r}")
    return agreed
