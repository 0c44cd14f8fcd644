"""Hooks: a JSON message by HTTP POST after a version was published or pulled."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from snapshot.aio import gather_limited
from snapshot.events import emit, log
from snapshot.runtime.loop import LoopFuture, finish_before_exit, in_own_thread, start

DEADLINE = 30.0
"""Seconds that a receiver may take to respond. The interpreter's exit waits for it."""


def check_hooks(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of hooks. Raise `ValueError` if one is not an HTTP URL."""
    if isinstance(urls, str):
        urls = [urls]
    for url in urls:
        parts = urlsplit(url)
        try:
            plain = parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
        except ValueError:  # of the port
            plain = False
        if "@" in parts.netloc:
            raise ValueError("notify URLs must not have a user or a password; put a token into the query")
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise ValueError(f"notify must be http:// or https:// URLs, got {url!r}")
    return tuple(urls)


def start_hooks(urls: Sequence[str], verb: str, message: Mapping[str, Any]) -> LoopFuture[list[bool]]:
    """Send a message to all URLs in the background. The interpreter's exit waits for it.

    A failure is a `notify_failed` event and a line in the log.
    """
    body = json.dumps(message).encode()

    async def post(url: str) -> bool:
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # queries may be secret
        error: Exception | None
        try:
            error = await asyncio.wait_for(in_own_thread(_post, url, body), DEADLINE)
        except TimeoutError:
            error = TimeoutError(f"no response within {DEADLINE:g} s")
        if error is not None:
            reason = str(getattr(error, "reason", "")) or str(error) or type(error).__name__
            emit("notify_failed", verb, shown, error=reason)
            log.warning("%s: a hook failed: %s", shown, reason)
        return error is None

    work = start(gather_limited(urls, post, 64))
    finish_before_exit(work)
    return work


def _post(url: str, body: bytes) -> Exception | None:
    """Send a message, and return the error. The body of the response says nothing, so it is not read."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=DEADLINE).close()  # noqa: S310 - checked: only HTTP
    except urllib.error.HTTPError as error:
        error.close()
        return error
    except Exception as error:  # noqa: BLE001 - whatever a receiver does must not stop the others
        return error
    return None
