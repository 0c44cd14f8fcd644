"""Entries with children, and of objects whose class a reader knows or has a name for."""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Union

import msgspec
import numpy as np
from msgspec import field

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.paths import are_components, decode_key, decode_keys, find_tagged_keys, key_component
from snapshot.manifest.plain_tree import PLAIN_TREE, decode_tree
from snapshot.manifest.values import AnyValue, Entry, Scalar, check_class_name
from snapshot.saved import SavedObject
from snapshot.text import counted

# Record of an optimizer in a manifest, in addition to its state.


class OptimizerRecord(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """The class of an optimizer, or of several with one state dict, and the dtypes of their parameters."""

    classes: tuple[str, ...]
    """Module and name, such as `torch.optim.adamw.AdamW`. Never imported: only compared and shown."""
    dtypes: tuple[str, ...] = ()
    """Dtypes in the order of the parameters in `param_groups`; a single one if all are equal."""


# Entries with children: sequences, sets and dicts, each restored with its exact type.

Key = str | int | dict[str, str]
"""A dict's key as an item of `keys`: strings and ints unchanged, other types tagged to restore them exactly."""


MOST_COMPARISONS = 20_000_000
"""Maximum number of comparisons of keys with equal hashes, which take a dict about a second."""


class Container(Entry):
    """An entry with children, under paths one component longer than its own."""

    is_container = True
    is_hashable = False

    def describe(self) -> tuple[str, str]:
        return self.type, "empty"  # others are not listed

    def build(self, children: Sequence[Any]) -> Any:
        """Return the container itself, from its children in order."""
        return list(children)

    def without_children(self, gone: Iterable[bool]) -> Container:
        """Return the container without some of its children."""
        return self

    def check(self, path: str) -> None:
        """Raise CorruptSnapshotError if the container cannot be built with any children."""


class _Sequence(Container):
    length: int
    replicated: bool = False
    make: ClassVar[Callable[[Sequence[Any]], Any]]

    @property
    def width(self) -> int:
        return self.length

    def check(self, path: str) -> None:
        if self.length < 0:
            raise CorruptSnapshotError(f"{path}: length must be at least 0, got {self.length}")

    def build(self, children: Sequence[Any]) -> Any:
        return type(self).make(children)

    def components(self) -> list[str]:
        return list(map(str, range(self.length)))


class ListEntry(_Sequence, tag="list"):
    """A list."""

    make = list


class TupleEntry(_Sequence, tag="tuple"):
    """A tuple."""

    is_hashable = True
    make = tuple


class SetEntry(_Sequence, tag="set"):
    """A set."""

    make = set


class FrozensetEntry(_Sequence, tag="frozenset"):
    """A frozenset."""

    is_hashable = True
    make = frozenset


class SliceEntry(_Sequence, tag="slice"):
    """A slice, as a sequence of its start, stop and step."""

    is_hashable = True

    def build(self, children: Sequence[Any]) -> Any:
        return slice(*children)

    def check(self, path: str) -> None:
        if self.length != 3:
            raise CorruptSnapshotError(f"{path}: a slice must have 3 parts, got {self.length}")


class DequeEntry(_Sequence, tag="deque"):
    """A deque, with its `maxlen`."""

    maxlen: int | None = None

    def check(self, path: str) -> None:
        super().check(path)
        if self.maxlen is not None and not self.length <= self.maxlen < 1 << 63:
            raise CorruptSnapshotError(
                f"{path}: a deque must have at most {counted(self.maxlen, 'element')}, got {self.length}"
            )

    def build(self, children: Sequence[Any]) -> Any:
        return collections.deque(children, self.maxlen)


class DictEntry(Container, tag="dict"):
    """A dict: its keys in order. `components` returns the path components, which may differ from the keys' texts."""

    is_keyed = True
    keys: list[Key]
    tagged: list[int] | None = None
    """Positions of keys with a tagged component, since another key of this dict has the same text."""
    replicated: bool = False
    optimizer: OptimizerRecord | None = None
    """Optimizer's record, for an optimizer's state dict."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        """Return the dict from its items."""
        return dict(items)

    def build(self, children: Sequence[Any]) -> Any:
        return self.make(list(zip(decode_keys(self.keys), children, strict=True)))

    @property
    def width(self) -> int:
        return len(self.keys)

    def check(self, path: str) -> None:
        if dict not in set(map(type, self.keys)):
            return
        alike = collections.Counter(hash(decode_key(key)) for key in self.keys if type(key) is dict)
        if sum(count * count for count in alike.values()) > MOST_COMPARISONS:
            raise CorruptSnapshotError(f"{path}: too many hash collisions of keys; refusing a hostile manifest")

    def without_children(self, gone: Iterable[bool]) -> Container:
        kept = [i for i, away in enumerate(gone) if not away]
        tagged = [new for new, old in enumerate(kept) if old in (self.tagged or ())]
        return msgspec.structs.replace(self, keys=[self.keys[i] for i in kept], tagged=tagged or None)

    def with_keys(self, keys: list[Key]) -> Any:
        """Return the dict with keys of other names."""
        return msgspec.structs.replace(self, keys=keys, tagged=find_tagged_keys(map(decode_key, keys)) or None)

    def components(self) -> list[str]:
        if not self.tagged and are_components(self.keys):
            return list(self.keys)  # type: ignore[arg-type]
        tagged = set(self.tagged or ())
        return [key_component(key, i in tagged) for i, key in enumerate(self.keys)]


class OrderedDictEntry(DictEntry, tag="OrderedDict"):
    """An OrderedDict. A module's state dict has the versions of its modules."""

    module_versions: dict[str, dict[str, Any]] | None = None

    def with_keys(self, keys: list[Key]) -> Any:
        return msgspec.structs.replace(super().with_keys(keys), module_versions=None)  # they are under the old names

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        made: Any = collections.OrderedDict(items)
        if self.module_versions is not None:
            made._metadata = collections.OrderedDict((name, dict(v)) for name, v in self.module_versions.items())
        return made


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, str, bool, collections.OrderedDict, collections.deque)
} | {"None": None}


class DefaultdictEntry(DictEntry, tag="defaultdict"):
    """A defaultdict whose factory is a builtin type, or None."""

    factory: str = "None"

    def check(self, path: str) -> None:
        super().check(path)
        if self.factory not in _FACTORIES:
            raise UnsupportedFormatError(f"{path}: unknown factory of a defaultdict: {self.factory!r}")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return collections.defaultdict(_FACTORIES[self.factory], items)


class CounterEntry(DictEntry, tag="Counter"):
    """A Counter."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        made: collections.Counter[Any] = collections.Counter()
        dict.update(made, items)
        return made


def find_factory_name(factory: Callable[[], Any] | None) -> str | None:
    """Return the recorded name of a defaultdict's factory; None if it cannot be recorded."""
    return next((name for name, known in _FACTORIES.items() if known is factory), None)


SEQUENCES: dict[type, type[_Sequence]] = {
    list: ListEntry,
    tuple: TupleEntry,
    set: SetEntry,
    frozenset: FrozensetEntry,
}
"""Types of Python's sequences and sets that need only their length, and their entries."""


# Entries of objects with their own class: dataclasses, named tuples, and tensors that wrap tensors.
#
# They store their fields, or their inner tensors, like a dict its values, and only name the class.

DEEPEST_CONTEXT = 50


class Compound(DictEntry):
    """An object of a class that the manifest only names."""

    is_hashable = True
    obj_type: str = ""

    def list_names(self) -> list[str]:
        """Return the names of its fields."""
        return [str(decode_key(key)) for key in self.keys]

    @property
    def described(self) -> str:
        """The class, for messages."""
        return self.obj_type or self.type

    def check(self, path: str) -> None:
        super().check(path)
        check_class_name(self.obj_type)
        names = decode_keys(self.keys)
        if not all(type(name) is str for name in names) or len(set(names)) < len(names) or self.tagged:
            raise CorruptSnapshotError(f"{path}: field names must be distinct strings")


class RecordEntry(Compound, tag="dataclass"):
    """An instance of a dataclass: its attributes by name."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return SavedObject("dataclass", self.obj_type, dict(items))


class NamedTupleEntry(Compound, tag="namedtuple"):
    """A named tuple: its fields by name."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return SavedObject("namedtuple", self.obj_type, dict(items))


class OpaqueEntry(Scalar, tag="opaque"):
    """An object with only its class known: the class name is `serialized_value`."""

    def value(self) -> Any:
        return SavedObject("opaque", self.serialized_value, {})


PlainEntry = Union[  # noqa: UP007 - msgspec wants one union, and mypy one spelling of it
    ListEntry,
    TupleEntry,
    SetEntry,
    FrozensetEntry,
    DequeEntry,
    DictEntry,
    OrderedDictEntry,
    DefaultdictEntry,
    CounterEntry,
    SliceEntry,
    RecordEntry,
    OpaqueEntry,
    AnyValue,
]
"""Entries that are stored in the manifest alone."""


class SubclassEntry(Compound, tag="TensorSubclass"):
    """A tensor of a class that wraps tensors: its inner tensors, and the context of the class."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Outer shape; -1 for a size that is not a number."""
    requires_grad: bool = False
    context: dict[str, PlainEntry] = field(default_factory=dict)
    """The class's context, as entries under paths that are relative to an empty root path."""

    def check(self, path: str) -> None:
        super().check(path)
        context = self.context
        widths = sum(max(0, each.width) for each in context.values())
        if widths + 1 != len(context) or any(name.count("/") > DEEPEST_CONTEXT for name in context):
            raise CorruptSnapshotError(f"{path}: the context must be one tree of at most {DEEPEST_CONTEXT} levels")
        for name, each in context.items():
            if isinstance(each, Container):
                each.check(f"{path}: context{name}")
                if any(f"{name}/{below}" not in context for below in each.components()):
                    raise CorruptSnapshotError(f"{path}: the context lacks the contents of {name or 'the root'}")

    def context_value(self) -> Any:
        """Return the context of the class, as far as it is known."""
        self.check(self.obj_type)
        return _inflate_entries(self.context, "")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        known = {"shape": self.shape, "dtype": self.dtype, "context": self.context_value()}
        return SavedObject("TensorSubclass", self.obj_type, {**known, **dict(items)}, self)


def _inflate_entries(entries: Mapping[str, Any], path: str) -> Any:
    entry = entries[path]
    if entry.is_value:
        return entry.value()
    children = [_inflate_entries(entries, f"{path}/{name}") for name in entry.components()]
    try:
        return entry.build(children)
    except TypeError as error:
        raise CorruptSnapshotError(f"{path}: {error}") from error


# Objects whose classes every reader knows: namespaces, random number generators, configurations.
#
# A namespace has an entry like a dict. The others are leaves: their whole state is a text in JSON, so that no glob
# and no change of ranks can take a part of it. The class follows from the type or the serializer, never from a name
# in a file.

Items = list[tuple[Any, Any]]
RANDOM = "random"
"""Serializer of random number generators."""
CONFIG = "OmegaConf"
"""Serializer of configurations, and kind of a `SavedObject` if omegaconf is not installed."""
NEW_SERIALIZERS = frozenset((RANDOM, CONFIG, PLAIN_TREE))


class NamespaceEntry(Compound, tag="Namespace"):
    """An argparse.Namespace."""

    def make(self, items: Items) -> Any:
        made = argparse.Namespace()
        vars(made).update(items)
        return made


class SimpleNamespaceEntry(Compound, tag="SimpleNamespace"):
    """A types.SimpleNamespace."""

    def make(self, items: Items) -> Any:
        made = types.SimpleNamespace()
        vars(made).update(items)
        return made


NAMESPACES: dict[type, type[Compound]] = {
    argparse.Namespace: NamespaceEntry,
    types.SimpleNamespace: SimpleNamespaceEntry,
}
"""Exact types -> the types of their entries."""


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
