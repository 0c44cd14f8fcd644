"""Numbers, sizes, durations and lists as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

# The version of the installed library.

try:
    VERSION = version("snapshot-torch")
except PackageNotFoundError:  # imported from a checkout that is not installed
    VERSION = "0+unknown"


def size_text(nbytes: float) -> str:
    """Format a number of bytes for people.

    >>> size_text(3 << 20), size_text(12)
    ('3.0 MiB', '12 B')
    """
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 1024 or unit == "TiB":
            break
    return f"{nbytes:.1f} {unit}"


def rate_text(nbytes: float, seconds: float) -> str:
    """Format a number of bytes with its seconds, and the bytes per second.

    >>> rate_text(3 << 20, 2)
    '3.0 MiB in 2.000 s, 1.5 MiB/s'
    """
    rate = f", {size_text(nbytes / seconds)}/s" if seconds > 0 else ""
    return f"{size_text(nbytes)} in {seconds:.3f} s{rate}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun.

    >>> counted(1, "file"), counted(2000, "file"), counted(0, "entry", "entries")
    ('1 file', '2,000 files', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """Return a noun, or the name of a class, with "a" or "an".

    >>> with_article("int"), with_article("OrderedDict"), with_article("UUID"), with_article("float")
    ('an int', 'an OrderedDict', 'a UUID', 'a float')
    """
    like_a_vowel = noun[:1].lower() in tuple("aeio") or (noun[:2].lower() == "un" and noun[:3].lower() != "uni")
    return f"{'an' if like_a_vowel else 'a'} {noun}"


def entries_text(number: int) -> str:
    """Format a number of entries."""
    return counted(number, "entry", "entries")


def listed(items: Sequence[object], most: int = 20) -> str:
    """Format items as indented lines, at most `most` of them."""
    more = f"\n  … and {len(items) - most} more" if len(items) > most else ""
    return "".join(f"\n  {item}" for item in items[:most]) + more


_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _SIZES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(text: str) -> int | None:
    """Parse text such as `2TiB` to bytes; return None if it is not a size of at least one byte.

    >>> parse_size("64MiB"), parse_size("1.5g"), parse_size("2MB"), parse_size("4096"), parse_size("much")
    (67108864, 1610612736, 2000000, 4096, None)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    return (int(float(found[1]) * _SIZES[found[2]]) or None) if found and found[2] in _SIZES else None


# Parsing and formatting of durations, for policies, save decisions and the advisor.

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

    >>> [duration_text(value) for value in (0.0123, 4.5, 10, 90, 5400, 200000)]
    ['12.3 ms', '4.50 s', '10 s', '90 s', '1.5 h', '2.3 d']
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
