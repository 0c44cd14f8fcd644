"""Logical paths: an injective mapping from the keys of nested containers to one string, and back.

Components are joined by `/`; `%` and `/` in a component become `%25` and `%2F`, a lone surrogate `%uD800`. A key that
is not a string is written as its text, or tagged (`%int:1`) if another key of the same dict has that text.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from snapshot.errors import CorruptSnapshotError

LONGEST_INT = 13_000
"""Maximum bits of an int, about 3,900 digits: Python's decimal texts have at most 4,300."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"%(25|2F|u[0-9A-F]{4})")


def encode_component(text: str) -> str:
    """Return a string as a component of a path.

    >>> encode_component("a/b%"), encode_component("layer.0.weight")
    ('a%2Fb%25', 'layer.0.weight')
    """
    if "%" in text or "/" in text:
        text = text.replace("%", "%25").replace("/", "%2F")
    return text if text.isascii() else _SURROGATES.sub(lambda found: f"%u{ord(found[0]):04X}", text)


def decode_component(text: str) -> str:
    """Return the string that a component encodes."""
    return _ESCAPE.sub(lambda found: chr(int(found[1].lstrip("u"), 16)), text) if "%" in text else text


def encode_text(text: str) -> str | None:
    """Return a text with its lone surrogates escaped; None if it has none."""
    if text.isascii() or not _SURROGATES.search(text):
        return None
    return encode_component(text)


decode_text = decode_component


def _is_long(key: Any) -> bool:
    """Return True if a key is an int with too many digits for Python's decimal text."""
    return type(key) is int and key.bit_length() >= LONGEST_INT


def _parse_int(text: str) -> int:
    value = int(text, 16)
    if _is_long(value):
        raise ValueError(f"an int key must have fewer than {LONGEST_INT} bits")
    return value


_FROM_TAG = {
    "str": decode_component,
    "int": _parse_int,
    "bool": {"True": True, "False": False}.__getitem__,
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "NoneType": {"None": None}.__getitem__,
}


def encode_key(key: Any) -> str | int | dict[str, str] | None:
    """Return a dict's key as an item of a manifest's `keys`; None if it cannot be one."""
    kind = type(key)
    if kind is str:
        escaped = encode_text(key)
        return key if escaped is None else {"str": escaped}
    if kind is int:
        return None if _is_long(key) else key if -(1 << 63) <= key < 1 << 63 else {"int": hex(key)}
    if kind is bool or key is None:
        return {kind.__name__: str(key)}
    if kind is float and not math.isnan(key):
        return {"float": struct.pack(">d", key).hex()}
    return None


def decode_key(key: str | int | dict[str, str]) -> Any:
    """Return the dict's key that an item of `keys` encodes."""
    if not isinstance(key, dict):
        return key
    try:
        ((tag, text),) = key.items()
        return _FROM_TAG[tag](text)
    except (KeyError, ValueError, struct.error) as error:
        raise CorruptSnapshotError(f"invalid dict key {str(key)[:80]}") from error


def decode_keys(keys: Sequence[str | int | dict[str, str]]) -> Sequence[Any]:
    """Return the dict's keys that the items of `keys` encode.

    >>> decode_keys(["a", 1]), decode_keys(["a", {"bool": "True"}])
    (['a', 1], ['a', True])
    """
    return keys if dict not in set(map(type, keys)) else list(map(decode_key, keys))


def are_components(keys: Collection[Any]) -> bool:
    """Return True if all keys are strings that are their own components, as nearly all are."""
    if not set(map(type, keys)) <= {str}:
        return False
    text = "".join(keys)
    return text.isascii() and "/" not in text and "%" not in text


def key_component(key: str | int | dict[str, str], tagged: bool) -> str:
    """Return the path component of an item of `keys`."""
    value = decode_key(key)
    if tagged:
        return f"%{type(value).__name__}:{value}"
    return encode_component(value) if isinstance(value, str) else str(value)


def find_tagged_keys(keys: Iterable[Any]) -> list[int]:
    """Return the positions of keys that need a tagged component, since a string key has the same text."""
    keys = list(keys)
    texts = {key for key in keys if type(key) is str}
    return [
        i for i, key in enumerate(keys) if type(key) is not str and encode_key(key) is not None and str(key) in texts
    ]


def name_keys(keys: Iterable[Any]) -> list[str | None]:
    """Return the path component of each key of a dict; None for one that cannot be an item of `keys`.

    >>> name_keys(["a/b", 1, "1", (2, 3)])
    ['a%2Fb', '%int:1', '1', None]
    """
    keys = list(keys)
    if are_components(keys):
        return keys
    if all(type(key) is str for key in keys):
        return list(map(encode_component, keys))
    tagged = set(find_tagged_keys(keys))
    return [None if key is None else key_component(key, i in tagged) for i, key in enumerate(map(encode_key, keys))]


def quote_path(text: str) -> str:
    """Return a path as a tensor name in a safetensors header, where `[` begins a box and one name is reserved."""
    if "[" in text:
        text = text.replace("[", "%5B")
    return "%5F%5Fmetadata__" if text == "__metadata__" else text


def add_parents(paths: Iterable[str]) -> set[str]:
    """Return the paths, and those of the containers above them."""
    found: set[str] = set()
    for path in paths:
        above = path
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def signature_path(save_id: str) -> str:
    """Return the path of a snapshot's signature."""
    return f"data/{save_id}.signature"


BUNDLE = "model.sig"
"""A signature of all files, in the format of OpenSSF Model Signing."""
