"""Entries of objects whose classes every reader knows: namespaces, random number generators, configurations.

They store their parts like a dict its values. The class follows from the type of the entry, never from a name in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.compounds import Compound
from snapshot.saved import SavedObject

Items = list[tuple[Any, Any]]


class KnownObject(Compound):
    """An object of a known class: its parts by name."""


class NamespaceEntry(KnownObject, tag="Namespace"):
    """An argparse.Namespace."""

    def make(self, items: Items) -> Any:
        made = argparse.Namespace()
        vars(made).update(items)
        return made


class SimpleNamespaceEntry(KnownObject, tag="SimpleNamespace"):
    """A types.SimpleNamespace."""

    def make(self, items: Items) -> Any:
        made = types.SimpleNamespace()
        vars(made).update(items)
        return made


# Random number generators

_BITS: dict[str, type[np.random.BitGenerator]] = {
    each.__name__: each
    for each in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
_MOST_WORDS = 64
"""Maximum length of the parts of a seed, and of its pool: a seed from a file must not take much memory or time."""


def _read_generator(value: np.random.Generator) -> dict[str, Any] | None:
    bits = value.bit_generator
    if _BITS.get(type(bits).__name__) is not type(bits):
        return None
    seed = bits.seed_seq
    if type(seed) is not np.random.SeedSequence:
        return None
    held = {name: list(each) if isinstance(each, tuple) else each for name, each in seed.state.items()}
    if not _is_modest(held):
        return None
    return {"bits": bits.state, "seed": held}


def _is_modest(seed: Mapping[str, Any]) -> bool:
    """Return True if a seed can be stored: numbers of a usual size."""
    entropy, pool = seed.get("entropy"), seed.get("pool_size")
    words = [*(entropy if isinstance(entropy, list) else [entropy]), *seed.get("spawn_key", ())]
    counts = [pool, seed.get("n_children_spawned")]
    return (
        len(words) <= _MOST_WORDS
        and all(type(each) is int and 0 <= each < 1 << 1024 for each in words)
        and all(type(each) is int and 0 <= each < 1 << 32 for each in counts)
        and 4 <= int(pool or 0) <= _MOST_WORDS
    )


def _make_bits(parts: Mapping[str, Any]) -> np.random.BitGenerator:
    seed, bits = parts["seed"], parts["bits"]
    if not _is_modest(seed):
        raise ValueError("its seed is too long")
    sequence = np.random.SeedSequence(
        seed["entropy"],
        spawn_key=seed["spawn_key"],
        pool_size=seed["pool_size"],
        n_children_spawned=seed["n_children_spawned"],
    )
    made: Any = _BITS[bits["bit_generator"]](sequence)
    made.state = bits
    return made  # type: ignore[no-any-return]


def _make_generator(parts: Mapping[str, Any], live: Any) -> Any:
    bits = _make_bits(parts)
    if live is None:
        return np.random.Generator(bits)
    live.__init__(bits)  # how NumPy's own __setstate__ replaces the bit generator
    return live


def _read_random_state(value: np.random.RandomState) -> dict[str, Any] | None:
    state: Any = value.get_state(legacy=False)
    return {"bits": state} if state.get("bit_generator") in _BITS else None


def _make_random_state(parts: Mapping[str, Any], live: Any) -> Any:
    bits = parts["bits"]
    kind = _BITS[bits["bit_generator"]]
    made = np.random.RandomState(kind(0))
    made.set_state(bits)
    if live is None:
        return made
    if live.get_state(legacy=False)["bit_generator"] != bits["bit_generator"]:
        live.__init__(kind(0))
    live.set_state(bits)
    return live


def _read_python_random(value: random.Random) -> dict[str, Any] | None:
    version, words, normal = value.getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32), "normal": normal}


def _make_python_random(parts: Mapping[str, Any], live: Any) -> Any:
    state = parts["version"], tuple(map(int, parts["words"])), parts["normal"]
    made = random.Random(0)  # noqa: S311 - not for secrets
    made.setstate(state)
    if live is None:
        return made
    live.setstate(state)
    return live


_Reader = Callable[[Any], dict[str, Any] | None]
_Maker = Callable[[Mapping[str, Any], Any], Any]
_GENERATORS: dict[str, tuple[type, _Reader, _Maker]] = {
    "numpy.random.Generator": (np.random.Generator, _read_generator, _make_generator),
    "numpy.random.RandomState": (np.random.RandomState, _read_random_state, _make_random_state),
    "random.Random": (random.Random, _read_python_random, _make_python_random),
}


class RandomEntry(KnownObject, tag="random"):
    """A random number generator of NumPy or Python: `kind`, and its state."""

    kind: str = ""

    @property
    def described(self) -> str:
        return self.kind

    def check(self, path: str) -> None:
        super().check(path)
        if self.kind not in _GENERATORS:
            raise CorruptSnapshotError(f"{path}: unknown random number generator {self.kind[:80]!r}")

    def make(self, items: Items) -> Any:
        return self.fill(None, dict(items))

    def fits(self, live: Any) -> bool:
        """Return True if a live object is a generator of this kind."""
        return self.kind in _GENERATORS and type(live) is _GENERATORS[self.kind][0]

    def fill(self, live: Any, parts: Mapping[str, Any]) -> Any:
        """Return a generator with a state: the live one, or a new one if that is None."""
        try:
            return _GENERATORS[self.kind][2](parts, live)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptSnapshotError(f"not the state of a {self.kind[:80]}: {error}") from error


class LiveRandom(RandomEntry):
    """A generator that the application has, and that is filled in place."""

    live: Any = None

    def make(self, items: Items) -> Any:
        return self.fill(self.live, dict(items))


# Configurations

CONFIG = "OmegaConf"
"""Kind of a `SavedObject` for a configuration, if omegaconf is not installed."""


class ConfigEntry(KnownObject, tag="OmegaConf"):
    """A configuration of OmegaConf: its plain container, with interpolations as texts, and its flags."""

    def make(self, items: Items) -> Any:
        parts = dict(items)
        content, flags = parts.get("content"), parts.get("flags")
        if type(content) not in (dict, list) or type(flags) is not dict:
            raise CorruptSnapshotError("a configuration must have a content and flags")
        try:
            from omegaconf import OmegaConf
        except ImportError:
            return SavedObject(CONFIG, "omegaconf.OmegaConf", {"content": content, "flags": flags})
        try:
            return OmegaConf.create(content, flags=flags)
        except Exception as error:
            raise CorruptSnapshotError(f"not the content of a configuration: {error}") from error


def _read_config(value: Any) -> dict[str, Any] | None:
    """Return the parts of a configuration; None if they would not make an equal one."""
    omegaconf: Any = sys.modules["omegaconf"]
    if vars(value)["_parent"] is not None:  # its interpolations may need the whole tree
        return None
    try:
        content = omegaconf.OmegaConf.to_container(value, resolve=False)
        flags = dict(_settings_of(value)["flags"] or {})
        made = omegaconf.OmegaConf.create(content, flags=flags)
        same = _same_nodes(value, made)
    except Exception:  # noqa: BLE001 - such as one that is missing as a whole
        return None
    return {"content": content, "flags": flags} if same else None


def _same_nodes(a: Any, b: Any) -> bool:
    """Return True if two nodes of configurations have the same type, settings and values."""
    if type(a) is not type(b) or _settings_of(a) != _settings_of(b):
        return False
    held, other = vars(a).get("_content"), vars(b).get("_content")
    if isinstance(held, dict) and isinstance(other, dict):
        return list(held) == list(other) and all(_same_nodes(each, other[key]) for key, each in held.items())
    if isinstance(held, list) and isinstance(other, list):
        return len(held) == len(other) and all(map(_same_nodes, held, other))
    return bool(held == other and vars(a).get("_val") == vars(b).get("_val"))


def _settings_of(node: Any) -> dict[str, Any]:
    return {**vars(vars(node)["_metadata"]), "key": None, "resolver_cache": None}


# Taking live objects apart


def _make_reader(kind: str) -> Callable[[Any], tuple[KnownObject, dict[str, Any]] | None]:
    def read(value: Any) -> tuple[KnownObject, dict[str, Any]] | None:
        parts = _GENERATORS[kind][1](value)
        return None if parts is None else (RandomEntry([], kind=kind), parts)

    return read


_READERS: dict[type, Callable[[Any], tuple[KnownObject, dict[str, Any]] | None]] = {
    argparse.Namespace: lambda value: (NamespaceEntry([]), vars(value)),
    types.SimpleNamespace: lambda value: (SimpleNamespaceEntry([]), vars(value)),
    **{kind: _make_reader(name) for name, (kind, _, _) in _GENERATORS.items()},
}
"""Exact types -> a function that returns an entry without keys, and the parts of a value."""
KNOWN_TYPES = tuple(_READERS)


def read_known_object(value: Any) -> tuple[KnownObject, dict[str, Any]] | None:
    """Return an entry without keys and the parts of a value; None for a value that has no such entry."""
    reader = _READERS.get(type(value))
    if reader is not None:
        return reader(value)
    if isinstance(value, SavedObject) and value.kind == CONFIG:
        return ConfigEntry([]), dict(value)
    parts = _read_config(value) if is_config(value) else None
    return None if parts is None or _holds_enum(parts) else (ConfigEntry([]), parts)


def is_config(value: Any) -> bool:
    """Return True for a configuration of OmegaConf."""
    omegaconf: Any = sys.modules.get("omegaconf")
    return omegaconf is not None and type(value) in (
        getattr(omegaconf, "DictConfig", None),
        getattr(omegaconf, "ListConfig", None),
    )


def _holds_enum(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_enum(each) for pair in value.items() for each in pair)
    return any(map(_holds_enum, value)) if isinstance(value, list) else isinstance(value, Enum)
