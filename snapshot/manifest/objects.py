"""Objects as bytes whose classes every reader knows: random number generators, and configurations of OmegaConf."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.containers import CONFIG, RANDOM
from snapshot.manifest.plain_tree import PLAIN_TREE, decode_tree
from snapshot.saved import SavedObject


class StoredObject(NamedTuple):
    """An object as bytes."""

    serializer: str
    kind: str
    """Name of the class, of those that this module knows."""
    data: bytes


# Random number generators

_BITS = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}
"""Names of NumPy's bit generators. `numpy.random` is imported only for values that need it."""
_MOST_WORDS = 64
"""Maximum length of a seed: one from a file must not take much memory or time."""
_LIMITS = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": (1 << 32) - 1}
"""Largest values of numbers that NumPy does not check. Beyond them it reads memory that is not its own."""


def find_bit_generator(name: Any) -> type[np.random.BitGenerator]:
    """Return the class of a bit generator. Raise KeyError for an unknown name."""
    if not isinstance(name, str) or name not in _BITS:
        raise KeyError(name)
    return getattr(np.random, name)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Return a state as values for JSON: numbers are texts, since readers of JSON cut long ones."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (np.ndarray, list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    return float(value).hex() if isinstance(value, (float, np.floating)) else value


def _number(text: Any) -> int:
    if type(text) is not str or len(text) > 400:
        raise ValueError("a number must be a short text")
    return int(text)


def _bits_state(found: Any, kind: type[np.random.BitGenerator]) -> dict[str, Any]:
    """Return the state of a bit generator, as NumPy expects it."""
    state: dict[str, Any] = {"bit_generator": kind.__name__}
    for name, value in found.items():
        if name == "state":
            state[name] = {each: _words(held) for each, held in value.items()}
        elif name == "buffer":
            state[name] = _words(value)
        elif name == "gauss":
            state[name] = float.fromhex(value)
        elif name != "bit_generator":
            state[name] = _number(value)
    for name, most in _LIMITS.items():
        for held in (state, state["state"]):
            if not 0 <= held.get(name, 0) <= most:
                raise ValueError(f"{name} must be at most {most}, got {held[name]}")
    return state


def _words(value: Any) -> Any:
    return np.array([_number(each) for each in value], dtype=np.uint64) if isinstance(value, list) else _number(value)


def _make_bits(found: Any, seed: Any) -> np.random.BitGenerator:
    kind = find_bit_generator(found["bit_generator"])
    state = _bits_state(found, kind)
    made: Any = kind(seed)
    made.state = state
    if _plain(made.state) != _plain(found):  # NumPy cuts numbers that are too long, and ignores unknown names
        raise ValueError("its state is not that of a bit generator")
    return made  # type: ignore[no-any-return]


def _read_generator(value: np.random.Generator) -> dict[str, Any] | None:
    bits = value.bit_generator
    seed = bits.seed_seq
    kind = type(bits).__name__
    if kind not in _BITS or type(bits) is not find_bit_generator(kind) or type(seed) is not np.random.SeedSequence:
        return None
    found = {"bits": _plain(bits.state), "seed": _plain(seed.state)}
    try:
        again = _make_seed(found["seed"])
    except (KeyError, TypeError, ValueError, OverflowError):  # of an unusual seed, such as one of texts
        return None
    return found if np.array_equal(again.generate_state(8), seed.generate_state(8)) else None


def _make_seed(found: Any) -> np.random.SeedSequence:
    entropy = found["entropy"]
    words = [*(entropy if isinstance(entropy, list) else [entropy]), *found["spawn_key"]]
    pool = _number(found["pool_size"])
    if len(words) > _MOST_WORDS or not 4 <= pool <= _MOST_WORDS:
        raise ValueError("its seed is too long")
    return np.random.SeedSequence(
        [_number(each) for each in entropy] if isinstance(entropy, list) else _number(entropy),
        spawn_key=[_number(each) for each in found["spawn_key"]],
        pool_size=pool,
        n_children_spawned=_number(found["n_children_spawned"]),
    )


def _make_generator(found: Any) -> Any:
    return np.random.Generator(_make_bits(found["bits"], _make_seed(found["seed"])))


def _read_random_state(value: np.random.RandomState) -> dict[str, Any] | None:
    state: Any = value.get_state(legacy=False)
    return {"bits": _plain(state)} if state.get("bit_generator") in _BITS else None


def _make_random_state(found: Any) -> Any:
    bits = found["bits"]
    kind = find_bit_generator(bits["bit_generator"])
    state = _bits_state(bits, kind)
    made: Any = np.random.RandomState(kind(0))
    made.set_state(state)
    if _plain(made.get_state(legacy=False)) != _plain(bits):
        raise ValueError("its state is not that of a bit generator")
    return made


def _read_python_random(value: random.Random) -> dict[str, Any] | None:
    version, words, normal = value.getstate()
    return {"version": version, "words": list(words), "normal": None if normal is None else normal.hex()}


def _make_python_random(found: Any) -> Any:
    normal = found["normal"]
    words = found["words"]
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in words):
        raise ValueError("its words must have 32 bits")
    made = random.Random(0)  # noqa: S311 - not for secrets
    made.setstate((found["version"], tuple(words), None if normal is None else float.fromhex(normal)))
    return made


def _fill_numpy(live: Any, made: Any) -> None:
    if isinstance(made, np.random.RandomState):
        state: Any = made.get_state(legacy=False)
        live.__init__(find_bit_generator(state["bit_generator"])(0))
        live.set_state(state)
    else:
        live.__init__(made.bit_generator)  # how NumPy's own __setstate__ replaces the bit generator


_Reader = Callable[[Any], dict[str, Any] | None]
_GENERATORS: dict[str, tuple[_Reader, Callable[[Any], Any]]] = {
    "numpy.random.Generator": (_read_generator, _make_generator),
    "numpy.random.RandomState": (_read_random_state, _make_random_state),
    "random.Random": (_read_python_random, _make_python_random),
}
_HOMES = {name.rpartition(".")[2]: name for name in _GENERATORS}


def generator_kind(value: Any) -> str | None:
    """Return the kind of a random number generator that needs no pickle; None for other values."""
    name = _HOMES.get(type(value).__name__)
    if name is None:
        return None
    module, _, own = name.rpartition(".")
    return name if getattr(sys.modules.get(module), own, None) is type(value) else None


def fill_generator(live: Any, made: Any) -> Any:
    """Give a live generator the state of a new one of the same class, and return it."""
    if isinstance(live, random.Random):
        live.setstate(made.getstate())
    else:
        _fill_numpy(live, made)
    return live


def is_filled_by(live: Any, kind: str) -> bool:
    """Return True if a live object is a generator of this kind."""
    return generator_kind(live) == kind


# Configurations


def is_config(value: Any) -> bool:
    """Return True for a configuration of OmegaConf."""
    omegaconf: Any = sys.modules.get("omegaconf")
    return omegaconf is not None and type(value) in (
        getattr(omegaconf, "DictConfig", None),
        getattr(omegaconf, "ListConfig", None),
    )


def _read_config(value: Any) -> dict[str, Any] | None:
    """Return the content and the flags of a configuration; None if they would not make an equal one."""
    omegaconf: Any = sys.modules["omegaconf"]
    try:
        content = omegaconf.OmegaConf.to_container(value, resolve=False)
        flags = dict(_settings_of(value)["flags"] or {})
        found = {"content": _encode_node(content), "flags": flags}
        text = json.dumps(found)
        if vars(value)["_parent"] is not None and "${" in text:  # its interpolations may need the whole tree
            return None
        return found if _same_nodes(value, _make_config(decode_json(text, Any, CONFIG))) else None
    except Exception:  # noqa: BLE001 - such as one that is missing as a whole, or has a value that JSON lacks
        return None


def _encode_node(value: Any) -> Any:
    """Return a value of a configuration for JSON. Dicts become pairs, since their keys may be numbers."""
    if type(value) is dict:
        return {"dict": [[_encode_node(key), _encode_node(each)] for key, each in value.items()]}
    if type(value) is list:
        return [_encode_node(each) for each in value]
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is int:
        return {"int": str(value)}
    if value is None or type(value) in (bool, str):
        return value
    raise TypeError(f"a configuration with a {type(value).__name__}")


def _decode_node(value: Any) -> Any:
    if isinstance(value, dict):
        [(kind, held)] = value.items()
        if kind == "dict":
            return {_decode_node(key): _decode_node(each) for key, each in held}
        return float.fromhex(held) if kind == "float" else _number(held)
    return [_decode_node(each) for each in value] if isinstance(value, list) else value


def _make_config(found: Any) -> Any:
    content, flags = _decode_node(found["content"]), found["flags"]
    if type(content) not in (dict, list) or not all(type(each) is bool for each in flags.values()):
        raise ValueError("it must be a dict or a list, with flags")
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return SavedObject(CONFIG, "omegaconf.OmegaConf", {"content": content, "flags": flags})
    try:
        return OmegaConf.create(content, flags=flags)
    except Exception as error:
        raise ValueError(str(error)) from error


def _same_nodes(a: Any, b: Any) -> bool:
    """Return True if two nodes of configurations have the same type, settings and values."""
    if type(a) is not type(b) or _settings_of(a) != _settings_of(b):
        return False
    held, other = vars(a).get("_content"), vars(b).get("_content")
    if isinstance(held, dict) and isinstance(other, dict):
        return list(held) == list(other) and all(_same_nodes(each, other[key]) for key, each in held.items())
    if isinstance(held, list) and isinstance(other, list):
        return len(held) == len(other) and all(map(_same_nodes, held, other))
    return repr((held, vars(a).get("_val"))) == repr((other, vars(b).get("_val")))  # a NaN is not equal to itself


def _settings_of(node: Any) -> dict[str, Any]:
    settings = {**vars(vars(node)["_metadata"]), "key": None, "resolver_cache": None}
    return {**settings, "flags": settings["flags"] or {}}


# Both ways


def encode_object(value: Any) -> StoredObject | None:
    """Return a generator or a configuration as bytes; None for an object that cannot be stored so."""
    kind = generator_kind(value)
    if kind is not None:
        found = _GENERATORS[kind][0](value)
        return None if found is None else StoredObject(RANDOM, kind, json.dumps(found).encode())
    if isinstance(value, SavedObject) and value.kind == CONFIG:
        found = {"content": _encode_node(value["content"]), "flags": value["flags"]}
    elif is_config(value):
        found = _read_config(value)
    else:
        return None
    return None if found is None else StoredObject(CONFIG, "omegaconf.OmegaConf", json.dumps(found).encode())


def decode_object(path: str, serializer: str, kind: str, data: bytes | bytearray) -> Any:
    """Return a new object of stored bytes. Raise CorruptSnapshotError if they are not its state."""
    if serializer == PLAIN_TREE:
        return decode_tree(path, data)
    if serializer == RANDOM and kind not in _GENERATORS:
        raise CorruptSnapshotError(f"{path}: unknown random number generator {kind[:80]!r}")
    found: dict[str, Any] = decode_json(bytes(data), dict[str, Any], f"{path}: not the state of a {kind[:80]}")
    try:
        return _GENERATORS[kind][1](found) if serializer == RANDOM else _make_config(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptSnapshotError(f"{path}: not the state of a {kind[:80]}: {error}") from error
