"""Parsing and formatting of durations, for policies, save decisions and the advisor."""

from __future__ import annotations

import math
import re
from datetime import timedelta

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h|d|w)\s*")

Duration = float | timedelta | str
"""Seconds, a `timedelta`, or text: `"90s"`, `"10m"`, `"12h"`, `"7d"`, `"2w"`."""


def parse_duration(text: str) -> float | None:
    """Parse text such as `90s` to seconds; return None if it is not a duration.

    >>> parse_duration("7d"), parse_duration("1.5h"), parse_duration("soon")
    (604800.0, 5400.0, None)
    """
    found = _TEXT.fullmatch(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


def seconds_of(given: Duration, what: str) -> float:
    """Return a duration in seconds. Raise `ValueError` or `TypeError`, naming `what`, if it is not a duration above 0.

    >>> seconds_of("10m", "every"), seconds_of(timedelta(hours=1), "every")
    (600.0, 3600.0)
    """
    if isinstance(given, str):
        parsed = parse_duration(given)
        if parsed is None:
            raise ValueError(f"{what} must be written as '90s', '10m', '12h', '7d' or '2w', got {given!r}")
        seconds = parsed
    elif isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        seconds = float(given)
    else:
        raise TypeError(f"{what} must be seconds, a timedelta, or a text such as '10m', got {given!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{what} must be above 0, got {given!r}")
    return seconds


def duration_text(seconds: float) -> str:
    """Format a duration for people.

    >>> [duration_text(value) for value in (0.0123, 4.5, 90, 5400, 200000)]
    ['12.3 ms', '4.50 s', '90 s', '1.5 h', '2.3 d']
    """
    if seconds < 0.00095:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    _, unit, name = next(each for each in _SHOWN if seconds < each[0])
    value = seconds / unit
    return f"{value:.1f} {name}" if value < 10 else f"{value:.0f} {name}"


_SHOWN = ((120, 1.0, "s"), (5400, 60.0, "min"), (172_800, 3600.0, "h"), (math.inf, 86400.0, "d"))
