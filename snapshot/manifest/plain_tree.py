"""Trees of many plain values as one object: a JSON text in a data file, instead of an entry for each value.

A tree has lists, tuples, dicts, strings, numbers, booleans and None, all of exactly these types. JSON has no form for
some of them. So each of these is an object with one key that begins with `$`:

    {"$tuple": [1, 2]}      {"$items": [[1, "a"], [2, "b"]]}    a dict with keys that are not all strings
    {"$int": "0x1f..."}     {"$float": "7ff8000000000000"}      an int beyond 64 bits; NaN or infinity
    {"$dict": {"$x": 1}}    a dict that could be taken for one of these
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from math import isfinite
from typing import Any

import msgspec

from snapshot.decoding import UNREADABLE, decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.values import LONG, FloatEntry, IntEntry

PLAIN_TREE = "plain"
"""Serializer of a tree."""
FEWEST = 1000
"""Trees of fewer values have an entry for each value."""
LONGEST_TREE = 64 << 20
"""Maximum length of a text in bytes, since its values take many times as much memory."""
MOST_VALUES = 8 << 20
"""Maximum number of values at one level."""
DEEPEST_TREE = 100
"""Maximum nesting."""

_TREES = frozenset((list, tuple, dict))
_PLAIN = frozenset((int, float, str, bool, type(None)))
PLAIN_KINDS = _TREES | _PLAIN
"""Exact types of the values in a tree."""
_KEYS = frozenset((int, str, bool, type(None)))
_LOW, _HIGH = -(1 << 63), (1 << 64) - 1
"""The ints that JSON has as numbers."""
_encoder = msgspec.json.Encoder()


def may_be_tree(value: list[Any] | dict[Any, Any]) -> bool:
    """Return False for a list or a dict that is no tree, as most are, after a look at its first values.

    >>> may_be_tree([1, 2]), may_be_tree([[1], [2]])
    (False, True)
    """
    inner = value.values() if type(value) is dict else value
    return type(next(iter(inner), None)) in PLAIN_KINDS and (
        len(inner) >= FEWEST or not _TREES.isdisjoint(map(type, inner))
    )


def encode_tree(value: Any) -> bytes | None:
    """Return the text of a tree; None for a tree with fewer values, or with other ones.

    >>> encode_tree(list(range(1000)))[:9]
    b'[0,1,2,3,'
    """
    plain = _survey(value)
    if plain is None:
        return None
    try:
        text = _encoder.encode(value if plain else _mark(value))
    except (*UNREADABLE, msgspec.MsgspecError):  # strings that UTF-8 cannot encode
        return None
    return text if len(text) <= LONGEST_TREE else None


def decode_tree(path: str, data: bytes | bytearray) -> Any:
    """Return the tree of a text. Raise CorruptSnapshotError for one that `encode_tree` does not write."""
    if len(data) > LONGEST_TREE:
        raise CorruptSnapshotError(f"{path}: a tree must have at most {LONGEST_TREE:,} bytes, got {len(data):,}")
    found = decode_json(bytes(data), Any, path)
    try:
        made = _unmark(found) if b'"$' in data else found
        plain = _survey(made)
        if plain is not None and _encoder.encode(made if plain else _mark(made)) == data:
            return made
    except (*UNREADABLE, msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        pass
    raise CorruptSnapshotError(f"{path}: not a tree of plain values in the canonical form")


def _survey(value: Any) -> bool | None:
    """Return True if JSON has all values of a tree, False if some must be marked, and None for anything else.

    Each level is examined at once: a Python step for each value would dominate the cost.
    """
    level: list[Any] = [value]
    count, plain = 0, True
    seen: set[int] = set()
    for _ in range(DEEPEST_TREE):
        kinds = set(map(type, level))
        if not kinds <= PLAIN_KINDS:
            return None
        held: dict[Any, list[Any]] = {
            kind: level if len(kinds) == 1 else [each for each in level if type(each) is kind] for kind in kinds
        }
        inside = [*map(id, held.get(list, ())), *map(id, held.get(dict, ()))]
        before = len(seen)
        seen.update(inside)
        twice = len(seen) < before + len(inside)  # a container is there twice, or holds itself
        if twice or len(level) > MOST_VALUES or (str in held and max(map(len, held[str])) > LONG):
            return None
        count += sum(len(each) for kind, each in held.items() if kind in _PLAIN)
        plain = plain and tuple not in held and all(map(isfinite, held.get(float, ())))
        if int in held:
            plain = plain and min(held[int]) >= _LOW and max(held[int]) <= _HIGH
        if dict in held:
            strings = _survey_keys(list(chain.from_iterable(held[dict])))
            if strings is None:
                return None
            plain = plain and strings
        inner = [each.values() for each in held.get(dict, ())]
        level = list(chain.from_iterable((*held.get(list, ()), *held.get(tuple, ()), *inner)))
        if not level:
            return plain if count >= FEWEST else None
    return None


def _survey_keys(keys: list[Any]) -> bool | None:
    """Return True if JSON has all keys, False if some must be marked, and None if a tree must not have them."""
    kinds = set(map(type, keys))
    names = set(keys) if kinds == {str} else {key for key in keys if type(key) is str}
    if not kinds <= _KEYS or GROUPS in names or max(map(len, names), default=0) > LONG:
        return None
    return kinds <= {str} and not any(name.startswith("$") for name in names)


GROUPS = "param_groups"
"""The key of an optimizer's groups. Their values have entries, since a restore matches them with parameters."""


def _mark(value: Any) -> Any:
    """Return a tree in which each value that JSON lacks is an object."""
    kind = type(value)
    if kind is list:
        return [_mark(each) for each in value]
    if kind is tuple:
        return {"$tuple": [_mark(each) for each in value]}
    if kind is dict and all(type(key) is str for key in value):
        made = {key: _mark(each) for key, each in value.items()}
        return {"$dict": made} if len(made) == 1 and next(iter(made)).startswith("$") else made
    if kind is dict:
        return {"$items": [[_mark(key), _mark(each)] for key, each in value.items()]}
    return _mark_number(value)


def _mark_number(value: Any) -> Any:
    if type(value) is float and not isfinite(value):
        return {"$float": FloatEntry.write(value)}
    if type(value) is int and not _LOW <= value <= _HIGH:
        return {"$int": IntEntry.write(value)}
    return value


def _unmark(value: Any) -> Any:
    """Return a marked tree without marks. The caller compares its text, so that no other form is accepted."""
    if type(value) is list:
        return [_unmark(each) for each in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        [(name, held)] = value.items()
        if name.startswith("$"):
            return _UNMARKED[name](held)
    return {key: _unmark(each) for key, each in value.items()}


_UNMARKED: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda held: tuple(_unmark(held)),
    "$items": lambda held: {_unmark(key): _unmark(each) for key, each in held},
    "$float": FloatEntry.read,
    "$int": IntEntry.read,
    "$dict": lambda held: {key: _unmark(each) for key, each in held.items()},
}
