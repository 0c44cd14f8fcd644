"""Events: one line per verb in the log, and handlers that are called with each event."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

log = logging.getLogger("snapshot")


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened: `start`, `staged`, `committed`, `restored`, `verified`, `deleted`, `converted`, `copied`,
    `compared`, `failed`, `cleaned`; and of a manager `pruned`, `fell_back` and `stopping`.

    And on the way: `retry`, whose verb is a request and whose path is its file, with `attempt`, `error` and `pause` (in
    seconds); `swept`, with the number of `uploads` that were dropped.
    """

    name: str
    verb: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Event], None]
GROUP = "snapshot.events"
"""The entry-point group of handlers that installed packages bring: `name = "package.module:function"`. They are loaded
with the first event of a process."""
_handlers: list[Handler] = []
_points = list(entry_points(group=GROUP))
"""Looked for at once, since that takes 20 ms; and loaded later, since they import us."""
_brought: list[Handler] = []


def add_handler(handler: Handler) -> None:
    """Call `handler` with every event. What it raises is logged, and fails nothing."""
    _handlers.append(handler)


def remove_handler(handler: Handler) -> None:
    """Call it no more."""
    _handlers.remove(handler)


def emit(name: str, verb: str, path: str, **fields: Any) -> None:
    """Tell the handlers; and the log, where it ends a verb."""
    if name in ("committed", "restored", "deleted", "verified", "converted", "copied", "compared"):
        log.info("%s %s: %s", verb, path, ", ".join(f"{key} {value}" for key, value in fields.items()))
    for handler in (*_installed(), *_handlers):
        try:
            handler(Event(name, verb, path, fields))
        except Exception:
            log.exception("an event handler failed on %s of %s", name, path)


def _installed() -> list[Handler]:
    """Return the handlers of installed packages. One that cannot be loaded is logged, and fails nothing."""
    while _points:
        point = _points.pop()
        try:
            _brought.append(point.load())
        except Exception:
            log.exception("the event handler %s = %s cannot be loaded", point.name, point.value)
    return _brought


def warn(message: str) -> None:
    """Warn, at the place where the caller's code called into the library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "snapshot":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
