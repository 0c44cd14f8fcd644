"""What fsspec's file systems say of a file, each under names of its own: how old it is, and which version."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from snapshot.plugins.fsspec_systems import System


def listed(folder: str) -> Callable[[System], Sequence[tuple[str, Mapping[str, Any]]]]:
    """A call for what is in a folder: names, and what is said of them; nothing if there is none."""

    def work(system: System) -> Sequence[tuple[str, Mapping[str, Any]]]:
        try:
            entries = system.inner.ls(system.full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [entry["name"].strip("/") for entry in entries]
        return [
            (name.rpartition("/")[2], entry)
            for name, entry in zip(names, entries, strict=True)
            if name != system.plain(folder).strip("/")  # the folder itself
        ]

    return work


_TIMES = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")
_VERSIONS = ("etag", "ETag", "generation", "version_id", "VersionId", "ino", "blob_id", "md5", "content_md5", "crc32c")


def when(info: Mapping[str, Any]) -> float:
    """When a file was written. One of unknown age counts as new: who is thought old is cleaned away."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            value = _read_time(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    return time.time()


def _read_time(text: str) -> datetime | None:
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError):
            return read(text)
    return None


def version(info: Mapping[str, Any], data: bytes | None) -> str:
    """A digest of all that changes with the content."""
    seen = [f"{name}={info[name]}" for name in ("size", *_TIMES, *_VERSIONS) if info.get(name) is not None]
    digest = hashlib.sha256("\n".join(seen).encode())
    digest.update(data or b"")
    return digest.hexdigest()[:32]
