"""Nodes: the inert values that the evaluation of a pickle returns, and the calls that it computes."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.containers import MOST_COMPARISONS
from snapshot.manifest.paths import LONGEST_INT
from snapshot.tensors.dtypes import find_itemsize
from snapshot.text import with_article

# Work: what an evaluation may copy and hash.

DEEPEST_KEY = 100
"""Maximum depth of tuples and frozensets in a key."""
_MODULUS = (1 << 61) - 1
"""Ints that differ by a multiple of this number have equal hashes."""


class LimitError(Exception):
    """A pickle exceeds a limit, or ends too early."""


class NotKnownError(Exception):
    """A pickle does something with a class that this reader does not know."""


class Work:
    """Remaining number of copies and hashes for one pickle, and the hashes that its author can choose."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._keys: set[Any] = set()
        self._alike: collections.Counter[int] = collections.Counter()
        self._compared = 0
        self._ints: set[bytes] = set()
        self._alike_ints: collections.Counter[int] = collections.Counter()
        self._compared_ints = 0

    def spend(self, *copied: Any) -> None:
        """Count a new object and the items copied for it: a value that is fetched again can be long."""
        self.steps -= 1 + sum(len(each) for each in copied if hasattr(each, "__len__"))
        if self.steps < 0:
            raise ValueError("too many repeated values")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Count keys; raise for keys that take too long to hash. Texts and numbers have their own limits."""
        for key in keys:
            if isinstance(key, (tuple, frozenset)):
                self.check_key(key, self._measure_key(key))

    def _measure_key(self, key: Any) -> int:
        """Return the number of steps to hash a key or to compare it, after counting them."""
        before = self.steps
        rest = [(key, 1)]
        while rest:
            held, depth = rest.pop()
            self.spend(held)
            if depth > DEEPEST_KEY:
                raise ValueError("nested too deeply")
            for each in held:
                if isinstance(each, (tuple, frozenset)):
                    rest.append((each, depth + 1))
                elif isinstance(each, (list, dict, set)):
                    raise TypeError(f"a key with {show_value(each)}")
                elif type(each) in (str, bytes):
                    self.steps -= len(each) // 64
                elif type(each) is int:
                    self.steps -= each.bit_length() // 64
        return before - self.steps

    def check_key(self, key: Any, steps: int = 1) -> None:
        """Count a key whose hash an attacker can choose; raise if too many different keys collide.

        `steps` is the number of steps to compare it with another key.
        """
        place = hash(key)
        self.steps -= max(0, self._alike[place] - 1) * steps
        if self.steps < 0:
            raise ValueError("too many repeated values")
        if key not in self._keys:
            self._keys.add(key)
            self._compared += self._alike[place]
            self._alike[place] += 1
            if self._compared > MOST_COMPARISONS:
                raise ValueError("too many hash collisions of keys; refusing a hostile pickle")

    def read_int(self, data: bytes, where: object) -> int:
        """Return a long int; raise if it has too many digits, or if too many ints have equal hashes."""
        value = int.from_bytes(data, "little", signed=True)
        if len(data) >= 8 and data not in self._ints:
            if len(data) > LONGEST_INT // 8:
                raise UnsupportedFormatError(
                    f"{where}: a number in the pickle must have at most {LONGEST_INT // 8} bytes, got {len(data):,}"
                )
            self._ints.add(data)
            self._compared_ints += 2 * self._alike_ints[value % _MODULUS] + 1
            self._alike_ints[value % _MODULUS] += 1
            if self._compared_ints > MOST_COMPARISONS:
                raise CorruptSnapshotError(
                    f"{where}: too many numbers in the pickle have equal hashes; refusing it as hostile"
                )
        return value


# Nodes: the values that an evaluation returns.
#
# They are plain containers, numbers, texts and bytes, and inert stand-ins for all else.

Node = Any
"""Value of a pickle, without any object of a class that the pickle names."""
Make = Callable[["Work", "Name", tuple[Any, ...]], Any]
"""Function that returns the node of a call."""


class Name(msgspec.Struct, eq=False, frozen=True):
    """Stand-in for a class or function that a pickle names."""

    name: str
    """Its name, with the module."""
    make: Make | None = None
    """Function that returns the node of a call; by default, the node is a `StandIn`."""
    is_class: bool = True
    """True if the pickle may create an object of it without a call of `__init__`."""
    is_record: bool = False
    """True for a class of DCP's metadata: a pickle sets its fields at once."""


REBUILD_TYPED = "torch._tensor._rebuild_from_type_v2"
"""The function that rebuilds tensors of other classes, from a function, the class, its arguments, and a state."""


class StandIn(msgspec.Struct, eq=False):
    """Stand-in for an object: its class or the function that returned it, the arguments, and its later state."""

    kind: Name
    arguments: tuple[Any, ...]
    state: Any = None
    named: Any = None
    """Arguments by name, if there are any."""

    @property
    def name(self) -> str:
        """Name of the class or function, with the module."""
        return self.kind.name

    @property
    def class_name(self) -> str:
        """Name of the object's class, also if torch rebuilds it; that of the function if the class is not known."""
        typed = self.name == REBUILD_TYPED and len(self.arguments) == 4 and isinstance(self.arguments[1], Name)
        return self.arguments[1].name if typed else self.name

    def __repr__(self) -> str:
        return f"<{with_article(self.name)}>"


class Dtype(msgspec.Struct, eq=False, frozen=True, gc=False):
    """Stand-in for a torch.dtype."""

    name: str


class StorageType(Dtype, eq=False, frozen=True, gc=False):
    """Stand-in for a storage class, by the dtype of its elements; bytes if it has none."""


class PickledStorage(msgspec.Struct, eq=False, frozen=True, gc=False):
    """Stand-in for a storage: the archive member with its bytes."""

    key: str
    dtype: str
    numel: int


class Size(tuple[int, ...]):
    """Stand-in for a torch.Size."""

    __slots__ = ()


class DefaultDict(dict[Any, Any]):
    """Stand-in for a defaultdict."""

    factory: Any = None


class Counter(dict[Any, Any]):
    """Stand-in for a Counter, which a pickle creates from a dict."""


class Deque(list[Any]):
    """Stand-in for a deque."""

    maxlen: Any = None


def show_value(value: Node) -> str:
    """Return a value for a message: the full text of a value with repetitions could be endless."""
    if isinstance(value, tuple) and len(value) <= 8 and all(type(each) is int for each in value):
        return str(tuple(value))[:100]
    if isinstance(value, (StandIn, Name)):
        return with_article(value.name.rpartition(".")[2][:100])
    return repr(value)[:100] if type(value) in (str, int, float, bool) else with_article(type(value).__name__[:100])


def read_fields(value: Node) -> Mapping[str, Any]:
    """Return the attributes that a pickle sets on an object."""
    return join_fields(value.state) or {} if type(value) is StandIn else {}


def join_fields(state: Any) -> Mapping[str, Any] | None:
    """Return the attributes in a state, without a copy; None if it is not one of attributes."""
    if isinstance(state, tuple) and len(state) == 2:
        fields = all(each is None or isinstance(each, dict) for each in state)
        return collections.ChainMap(state[1] or {}, state[0] or {}) if fields else None
    return state if isinstance(state, dict) else None


def expect_dict(value: Node) -> dict[Any, Any]:
    """Return a dict; raise for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, got {show_value(value)}")
    return value


def expect_list(value: Node) -> list[Any]:
    """Return a list, also for a tuple; raise for any other value."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {show_value(value)}")
    return value if isinstance(value, list) else list(value)


def expect_name(value: Node) -> str:
    """Return a name; raise for any other value."""
    if type(value) is not str:
        raise ValueError(f"a name must be a str, got {show_value(value)}")
    return value


# Calls that have a node of their own.


def _make_size(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Size:
    work.spend(*arguments)
    made = Size(*arguments)
    if not all(type(each) is int for each in made):
        raise ValueError("the pickle creates sizes from other values than ints")
    return made


def _spend_items(work: Work, items: Any = ()) -> Any:
    """Return the items of a new dict, from another dict or from pairs."""
    work.spend(items)
    work.check_keys(items if isinstance(items, dict) else (key for key, _ in items))
    return items


def _make_ordered(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Any:
    return collections.OrderedDict(_spend_items(work, *arguments))


def _make_default(work: Work, kind: Name, arguments: tuple[Any, ...]) -> DefaultDict:
    made = DefaultDict(_spend_items(work, *arguments[1:]))
    made.factory = arguments[0] if arguments else None
    return made


def _make_counter(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Counter:
    return Counter(_spend_items(work, *arguments))


def _make_deque(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Deque:
    if len(arguments) > 2:
        raise TypeError("too many arguments")
    items = arguments[0] if arguments else ()
    work.spend(items)
    made = Deque(items)
    made.maxlen = arguments[1] if len(arguments) > 1 else None
    return made


def _make_set(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Any:
    frozen = kind.name.endswith("frozenset")
    work.spend(*arguments, b"frozen" * 100 * frozen)  # attackers can choose their hashes, too
    if arguments and not isinstance(arguments[0], (str, set, frozenset)):
        work.check_keys(arguments[0])
    return (frozenset if frozen else set)(*arguments)


def _encode_text(work: Work, kind: Name, arguments: tuple[Any, ...]) -> bytes:
    """Return bytes that old pickles encode from a text."""
    text, encoding = arguments
    work.spend(text)
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise ValueError(f"the pickle encodes a text in {show_value(encoding)}")
    return text.encode(encoding)  # type: ignore[no-any-return]


def _make_bytes(work: Work, kind: Name, arguments: tuple[Any, ...]) -> bytes:
    """Return the empty bytes of old pickles."""
    if arguments:
        raise ValueError("the pickle creates bytes from arguments")
    return b""


def _make_complex(work: Work, kind: Name, arguments: tuple[Any, ...]) -> complex:
    made = complex(*arguments)
    work.check_key(made)
    return made


def _make_attribute(work: Work, kind: Name, arguments: tuple[Any, ...]) -> Any:
    """Return the stand-in for an attribute of a class, which is a function or a class itself."""
    work.spend(b"class" * 20)
    holder, *names = arguments
    name = names[0] if names and type(names[0]) is str else "attribute"
    return _find_class(str(getattr(holder, "name", "builtins"))[:100], name)


def _make_record(work: Work, kind: Name, arguments: tuple[Any, ...]) -> StandIn:
    work.spend()
    if arguments:
        raise TypeError("a pickle sets its fields, and has no arguments")
    return StandIn(kind, ())


_DTYPE_OF = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
_OLD = re.compile(f"({'|'.join(_DTYPE_OF)})Storage")
_MAKERS: dict[str, Make] = {
    "collections.defaultdict": _make_default,
    "collections.Counter": _make_counter,
    "collections.deque": _make_deque,
    "collections.OrderedDict": _make_ordered,
    "torch.Size": _make_size,
    "_codecs.encode": _encode_text,
}
for _module in ("builtins", "__builtin__"):
    _MAKERS |= {
        f"{_module}.complex": _make_complex,
        f"{_module}.getattr": _make_attribute,
        f"{_module}.bytes": _make_bytes,
        f"{_module}.set": _make_set,
        f"{_module}.frozenset": _make_set,
    }
_RECORDS = "torch.distributed.checkpoint."
_RECORD_NAMES = {
    "metadata.Metadata",
    "metadata.TensorStorageMetadata",
    "metadata.ChunkStorageMetadata",
    "metadata.MetadataIndex",
    "metadata.BytesStorageMetadata",
    "filesystem._StorageInfo",
}


def find_name(module: str, name: str) -> Node:
    """Return the node of a class or function that a pickle names."""
    full = f"{module}.{name}"
    if full in _MAKERS and "." not in name:
        return Name(full, _MAKERS[full], is_class=False)
    return _find_class(module, name)


def _find_class(module: str, name: str) -> Node:
    """Return the node of a name, unless a call of it has a node of its own."""
    if module == "torch" and find_itemsize(name) is not None:
        return Dtype(name)
    if module == "torch" and (found := _OLD.fullmatch(name)):
        return StorageType(_DTYPE_OF[found[1]])
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return StorageType("uint8")
    full = f"{module}.{name}"
    if full.startswith(_RECORDS) and full.removeprefix(_RECORDS) in _RECORD_NAMES:
        return Name(full, _make_record, is_record=True)
    return Name(full[:200])


def find_storage(reference: Any) -> PickledStorage:
    """Return the stand-in of a storage that is not in the pickle, from torch's reference to it."""
    if not (isinstance(reference, tuple) and len(reference) == 5 and reference[0] == "storage"):
        raise ValueError("invalid reference to a storage")
    _, kind, key, _, numel = reference
    if type(kind) is Name:
        raise NotKnownError(f"a storage of the class {kind.name}")
    if type(kind) is not StorageType or type(key) is not str or type(numel) is not int or numel < 0:
        raise ValueError("invalid reference to a storage")
    return PickledStorage(key, kind.name, numel)
