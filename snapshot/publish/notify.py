"""Hooks: a JSON message by HTTP POST after a version was published or pulled."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from snapshot.aio import gather_limited
from snapshot.events import emit, log
from snapshot.runtime.loop import LoopFuture, finish_before_exit, in_own_thread, start

TIMEOUT = 300.0
"""Seconds that a receiver may take: engines respond when they have loaded the weights."""


def check_hooks(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of hooks. Raise `ValueError` if one is not an HTTP URL."""
    if isinstance(urls, str):
        urls = [urls]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"notify must be http:// or https:// URLs, got {url!r}")
    return tuple(urls)


def start_hooks(urls: Sequence[str], verb: str, message: Mapping[str, Any]) -> LoopFuture[list[bool]]:
    """Send a message to all URLs in the background. The interpreter's exit waits for it.

    A failure is a `notify_failed` event and a line in the log.
    """
    body = json.dumps(message).encode()

    async def post(url: str) -> bool:
        return await in_own_thread(_post, url, verb, body)

    work = start(gather_limited(urls, post, 64))
    finish_before_exit(work)
    return work


def _post(url: str, verb: str, body: bytes) -> bool:
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # queries and users may be secret
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - checked: only HTTP
            response.read(1 << 20)
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = str(getattr(error, "reason", "")) or str(error) or type(error).__name__
        emit("notify_failed", verb, shown, error=reason)
        log.warning("%s: a hook failed: %s", shown, reason)
        return False
    return True
