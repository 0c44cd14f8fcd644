"""Time and version of a file, from the field names of each file system of fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

_TIMES = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")
_VERSIONS = ("etag", "ETag", "generation", "version_id", "VersionId", "ino", "blob_id", "md5", "content_md5", "crc32c")


def modified_time(info: Mapping[str, Any]) -> float:
    """Return the time of a file. A file of unknown age counts as new, since old ones are cleaned up."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            value = _parse_time(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    return time.time()


def _parse_time(text: str) -> datetime | None:
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError):
            return read(text)
    return None


def version_token(info: Mapping[str, Any], data: bytes | None) -> str:
    """Return a digest of all fields that change with the content, and of the content if it is given."""
    seen = [f"{name}={info[name]}" for name in ("size", *_TIMES, *_VERSIONS) if info.get(name) is not None]
    digest = hashlib.sha256("\n".join(seen).encode())
    digest.update(data or b"")
    return digest.hexdigest()[:32]
