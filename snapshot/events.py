"""Events: one log line per operation, and handlers that are called with each event."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from snapshot.per_process import PerProcess

log = logging.getLogger("snapshot")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an operation.

    Its name is `start`, `staged`, `committed`, `restored`, `loaded`, `verified`, `deleted`, `converted`, `merged`,
    `copied`, `compared`, `signed`, `failed` or `cleaned`. A manager also sends `pruned`, `fell_back` and `stopping`.

    A take sends `blocked` when its call returns, with the `seconds` that the call took.

    A take with `compression="auto"` sends `compression`: whether it is `chosen`, and the expected bytes per second,
    `raw` and `compressed`.

    A take with a `base` sends `shared` with the number of `files` and their `bytes`, and `rotten` with a damaged
    `file` of the base and its `faults`.

    A manager with `near` sends `degraded` for a take that is written directly to the far root. It sends `replaced` for
    an uploader that hung, with its `pid`. It sends `rerouted` for a file that is read from another place than the
    `source` that failed. It sends `healed` for a damaged near file that was replaced. The events of an uploader are
    sent in its own process: `uploaded`, `replicated`, `dropped`, `damaged` and `healed`. With `on_error="warn"`, a
    manager sends `tolerated`, with the number of `failures`.

    A `Publisher` sends `pruned` with the deleted `versions`, and `full_only` if deltas do not fit into its budget. A
    `Subscriber` sends `pulled`, and `fell_back` for a version that it cannot use. It sends `damaged` for a local
    version that changed. It sends `left_out` for a foreign file beside the weights that it does not pull. Both send
    `notify_failed` for a hook that failed.

    A `retry` event has a request as its verb and a file as its path, with `attempt`, `error` and `pause` (in seconds).
    A `swept` event has the number of `uploads` that were dropped.
    """

    name: str
    verb: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Event], None]
GROUP = "snapshot.events"
"""The entry-point group for handlers of installed packages: `name = "package.module:function"`.

They are loaded with the first event of a process.
"""
_handlers: list[Handler] = []
_points = list(entry_points(group=GROUP))
"""Entry points are listed at once, which takes 20 ms, but loaded later, since they import this library."""
_brought: list[Handler] = []
_loading = PerProcess(threading.RLock)
"""Held while entry points are loaded. A handler may send events itself while it is loaded."""


def add_handler(handler: Handler) -> None:
    """Call `handler` with every event. Exceptions of a handler are logged, and do not fail the operation."""
    _handlers.append(handler)


def remove_handler(handler: Handler) -> None:
    """Stop calling a handler."""
    _handlers.remove(handler)


def emit(name: str, verb: str, path: str, **fields: Any) -> None:
    """Call the handlers, and log the event if it ends an operation."""
    if name in (
        "committed",
        "restored",
        "loaded",
        "deleted",
        "verified",
        "converted",
        "merged",
        "copied",
        "compared",
        "signed",
    ):
        log.info("%s %s: %s", verb, path, ", ".join(f"{key} {value}" for key, value in fields.items()))
    for handler in (*_installed(), *_handlers):
        try:
            handler(Event(name, verb, path, fields))
        except Exception:
            log.exception("an event handler failed on %s of %s", name, path)


def _installed() -> list[Handler]:
    """Return the handlers of installed packages. A handler that cannot be loaded is logged and skipped."""
    with _loading.get():  # other threads wait: their events are for these handlers, too
        while _points:
            point = _points.pop()
            try:
                _brought.append(point.load())
            except Exception:
                log.exception("cannot load the event handler %s = %s", point.name, point.value)
    return _brought


def warn(message: str) -> None:
    """Warn with the location of the caller's code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "snapshot":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
