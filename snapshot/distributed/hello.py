"""The first exchange of an operation: all ranks report which one they called, and with which path."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot.errors import SnapshotError
from snapshot.events import warn
from snapshot.url import PER_HOST, URL


class Hello(msgspec.Struct, array_like=True):
    """A rank's first message."""

    verb: str
    path: str
    globs: list[str] = []


def expect_same_verb(hellos: Sequence[Hello]) -> None:
    """Raise if the ranks called different verbs."""
    verbs = {hello.verb: rank for rank, hello in enumerate(hellos)}
    if len(verbs) > 1:
        raise SnapshotError(
            "all ranks must call the same method, got "
            f"{', '.join(f'{verb} on rank {rank}' for verb, rank in verbs.items())}"
        )


def agreed_url(url: URL, leader: str) -> URL:
    """Return the leader's URL. Warn if this rank gave another one, unless each host has its own."""
    if leader == url.reveal():
        return url
    agreed = URL.parse(leader)
    if agreed.scheme == url.scheme == PER_HOST:
        return url
    warn(f"this rank gave the path {str(url)!r}; rank 0's is used: {str(agreed)!r}")
    return agreed
