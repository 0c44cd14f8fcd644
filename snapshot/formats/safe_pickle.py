"""Evaluation of untrusted pickles: a restricted machine that imports nothing, calls nothing, and has limits."""

from __future__ import annotations

import collections
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, SnapshotError, UnsafeObjectError, UnsupportedFormatError
from snapshot.manifest.compounds import MOST_COMPARISONS
from snapshot.manifest.paths import LONGEST_INT
from snapshot.tensors.memory import BY_NAME
from snapshot.text import with_article

# Limits of an evaluation, in proportion to the bytes that are stored of a pickle.

FREE = 64 << 20
"""Bytes of memory allowed for any pickle, with PER_BYTE more for each of its bytes."""
PER_BYTE = 32
INFLATED = 256 << 10
"""Bytes that any compressed pickle may have, with MOST_TIMES more for each stored byte.
Pickles of state dicts and optimizers compress about fivefold."""
MOST_TIMES = 32
FEW = 200_000
"""Values that may be copied or hashed for any pickle, with FACTOR more for each of its bytes."""
FACTOR = 4
MOST_NAMES = 10_000
"""Maximum number of classes and functions that one pickle may name."""
DEEPEST_KEY = 100
RUN = 64 << 10
"""Bytes of a pickle that are evaluated between two looks at the limits."""
_MODULUS = (1 << 61) - 1
"""Ints that differ by a multiple of this number have equal hashes."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of one evaluation."""

    memory: int
    """Maximum number of bytes of the created objects, approximately."""
    steps: int
    """Maximum number of values that are copied or hashed."""
    opcodes: bytes = bytes(range(256))
    """Table of all opcodes, with zeros for those that the pickle may not have."""

    @staticmethod
    def of(length: int, opcodes: bytes = bytes(range(256))) -> Limits:
        """Return the limits of a pickle of some length; see `expect_stored`."""
        return Limits(FREE + PER_BYTE * length, FEW + FACTOR * length, opcodes)


def expect_stored(length: int, stored: int, what: str) -> int:
    """Raise ValueError if a pickle is too long for the `stored` bytes that it was decompressed from.

    Return the length that limits on memory and time are based on.
    """
    if length > INFLATED + MOST_TIMES * stored:
        raise ValueError(f"{what} inflates too far: from {stored:,} stored bytes to {length:,}; store it uncompressed")
    return min(length, MOST_TIMES // 2 * stored)


class InvalidPickleError(CorruptSnapshotError):
    """The bytes are within all limits, but are not a pickle of any value."""


class UnknownClassError(UnsupportedFormatError):
    """A pickle does something with a class that this reader does not know."""


class Work:
    """Remaining number of copies and hashes for one pickle, and the hashes that its author can choose."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._texts: set[str] = set()
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
            if not isinstance(key, tuple):
                continue
            rest = [(key, 1)]
            while rest:
                held, depth = rest.pop()
                self.spend(held)
                if depth > DEEPEST_KEY:
                    raise ValueError("nested too deeply")
                rest += [(each, depth + 1) for each in held if isinstance(each, tuple)]
            self.check_key(key)

    def check_key(self, key: Any) -> None:
        """Count a key whose hash an attacker can choose; raise if too many different keys collide."""
        text = repr(key)
        if text not in self._texts:
            self._texts.add(text)
            self._compared += self._alike[hash(key)]
            self._alike[hash(key)] += 1
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


def read_fields(value: Node) -> dict[str, Any]:
    """Return the attributes that a pickle sets on an object."""
    return _join_fields(value.state) or {} if type(value) is StandIn else {}


def _join_fields(state: Any) -> dict[str, Any] | None:
    """Return the attributes in a state; None if it is not one of attributes."""
    if isinstance(state, tuple) and len(state) == 2:
        fields = all(each is None or isinstance(each, dict) for each in state)
        state = {**(state[0] or {}), **(state[1] or {})} if fields else None
    return state if isinstance(state, dict) else None


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
    if not isinstance(items, dict):
        work.check_keys(key for key, _ in items)
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
        raise ValueError(f"the pickle encodes a text in {encoding!r}")
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
    if module == "torch" and name in BY_NAME:
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
        raise _NotKnownError(f"a storage of the class {kind.name}")
    if type(kind) is not StorageType or type(key) is not str or type(numel) is not int or numel < 0:
        raise ValueError("invalid reference to a storage")
    return PickledStorage(key, kind.name, numel)


# The machine. A pickle is a program for a stack; each opcode pushes, pops or changes values.


class _NotKnownError(Exception):
    """A pickle does something with a class that this reader does not know."""


class LimitError(Exception):
    """A pickle exceeds a limit, or ends too early."""


_ABSENT: Any = object()
"""Placeholder in the memo for a place that was not filled."""
_KEYWORDS = {0x4E: None, 0x88: True, 0x89: False}
_TEXTS: dict[int, tuple[struct.Struct, str]] = {
    0x58: (struct.Struct("<I"), "text"),  # BINUNICODE
    0x8C: (struct.Struct("<B"), "text"),  # SHORT_BINUNICODE
    0x8D: (struct.Struct("<Q"), "text"),  # BINUNICODE8
    0x42: (struct.Struct("<I"), "bytes"),  # BINBYTES
    0x43: (struct.Struct("<B"), "bytes"),  # SHORT_BINBYTES
    0x8E: (struct.Struct("<Q"), "bytes"),  # BINBYTES8
    0x54: (struct.Struct("<I"), "ascii"),  # BINSTRING
    0x55: (struct.Struct("<B"), "ascii"),  # SHORT_BINSTRING
    0x8A: (struct.Struct("<B"), "int"),  # LONG1
    0x8B: (struct.Struct("<I"), "int"),  # LONG4
}
"""Opcodes with a length and as many bytes."""
_read_uint = struct.Struct("<I").unpack_from
_read_int = struct.Struct("<i").unpack_from
_read_short = struct.Struct("<H").unpack_from
_read_long = struct.Struct("<Q").unpack_from
_read_float = struct.Struct(">d").unpack_from


def evaluate_pickle(
    data: bytes,
    where: object,
    limits: Limits | None = None,
    persistent: Callable[[Any], Node] = find_storage,
    names: Callable[[str, str], Node] = find_name,
) -> Node:
    """Return the contents of a pickle: containers, numbers, texts, bytes, and stand-ins for all other objects.

    Args:
        data: The pickle; bytes after its end are ignored.
        where: Place of the pickle, for messages.
        limits: Limits on memory and time; by default, those of the pickle's length.
        persistent: Function that returns the node of a reference to an object outside the pickle.
        names: Function that returns the node of a class or function, from its module and name.

    Raises:
        UnsafeObjectError: The pickle has opcodes that checkpoints do not need.
        UnsupportedFormatError: The pickle does something with a class that this reader does not know.
        CorruptSnapshotError: The data is not a pickle, or is a malicious one.
    """
    machine = _Machine(data, where, limits or Limits.of(len(data)), persistent, names)
    try:
        return machine.run()
    except SnapshotError:
        raise
    except LimitError as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    except _NotKnownError as error:
        raise UnknownClassError(f"{where}: the pickle has {error}, which cannot be read") from error
    except Exception as error:  # a foreign pickle may cause anything
        raise InvalidPickleError(f"{where}: cannot read the pickle: {type(error).__name__}: {error}") from error


class _Machine:
    """One evaluation: the pickle, its limits, and the names that it has used."""

    def __init__(
        self,
        data: bytes,
        where: object,
        limits: Limits,
        persistent: Callable[[Any], Node],
        names: Callable[[str, str], Node],
    ) -> None:
        self._data = data
        self._where = where
        self._limits = limits
        self._work = Work(limits.steps)
        self._persistent = persistent
        self._find_name = names
        self._names: dict[tuple[str, str], Node] = {}
        self._holes = False
        """True if the memo has places that were not filled."""

    def run(self) -> Node:  # noqa: PLR0912, PLR0915 - one fast loop over millions of opcodes
        """Return the value of the pickle."""
        data, work, length, opcodes = self._data, self._work, len(self._data), self._limits.opcodes
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: list[Any] = []
        position = count = weight = frame = 0
        stop = min(RUN, length)
        try:
            while True:
                while position < stop:
                    code = opcodes[data[position]]
                    count += 1
                    if code == 0x72:  # LONG_BINPUT
                        place = _read_uint(data, position + 1)[0]
                        position += 5
                        if place == len(memo):
                            memo.append(stack[-1])
                        else:
                            self._put(memo, place, stack[-1], count)
                    elif code == 0x4B:  # BININT1
                        stack.append(data[position + 1])
                        position += 2
                    elif code == 0x68:  # BINGET
                        if (value := memo[data[position + 1]]) is _ABSENT:
                            raise IndexError("a value that was not stored")
                        stack.append(value)
                        position += 2
                    elif code == 0x94:  # MEMOIZE
                        if self._holes:
                            raise ValueError("two ways to store values")
                        memo.append(stack[-1])
                        position += 1
                    elif code == 0x28:  # MARK
                        marks.append(stack)
                        stack = []
                        position += 1
                    elif code == 0x58 or code in _TEXTS:
                        weight += 48
                        width, kind = _TEXTS[code]
                        begin = position + 1 + width.size
                        position = begin + width.unpack_from(data, position + 1)[0]
                        if position > length:
                            raise IndexError
                        if kind == "text":
                            stack.append(str(data[begin:position], "utf-8", "surrogatepass"))
                        elif kind == "bytes":
                            stack.append(data[begin:position])
                        elif kind == "ascii":
                            stack.append(str(data[begin:position], "ascii"))
                        else:
                            stack.append(work.read_int(data[begin:position], self._where))
                    elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                        weight += 56
                        value = stack.pop()
                        if code == 0x86:
                            stack[-1] = stack[-1], value
                        elif code == 0x85:
                            stack.append((value,))
                        else:
                            second = stack.pop()
                            stack[-1] = stack[-1], second, value
                        position += 1
                    elif code == 0x74:  # TUPLE
                        weight += 56
                        items, stack = stack, marks.pop()
                        stack.append(tuple(items))
                        position += 1
                    elif code == 0x52:  # REDUCE
                        weight += 152
                        arguments = stack.pop()
                        function = stack[-1]
                        if not isinstance(arguments, tuple):
                            raise TypeError("arguments must be a tuple")
                        if type(function) is Name:
                            if function.make is None:
                                work.steps -= 1 + len(arguments)
                                stack[-1] = StandIn(function, arguments)
                            else:
                                stack[-1] = self._call(function, arguments)
                        else:
                            stack[-1] = self._call(function, arguments)
                        position += 1
                    elif code == 0x51:  # BINPERSID
                        weight += 152
                        work.steps -= 1
                        stack[-1] = self._persistent(stack[-1])
                        position += 1
                    elif code in _KEYWORDS:
                        stack.append(_KEYWORDS[code])
                        position += 1
                    elif code == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                        position += 1
                    elif code == 0x6A:  # LONG_BINGET
                        if (value := memo[_read_uint(data, position + 1)[0]]) is _ABSENT:
                            raise IndexError("a value that was not stored")
                        stack.append(value)
                        position += 5
                    elif code == 0x71:  # BINPUT
                        place = data[position + 1]
                        position += 2
                        if place == len(memo):
                            memo.append(stack[-1])
                        else:
                            self._put(memo, place, stack[-1], 255)
                    elif code == 0x4D:  # BININT2
                        stack.append(_read_short(data, position + 1)[0])
                        position += 3
                    elif code == 0x4A:  # BININT
                        weight += 48
                        stack.append(_read_int(data, position + 1)[0])
                        position += 5
                    elif code == 0x47:  # BINFLOAT
                        weight += 48
                        stack.append(_read_float(data, position + 1)[0])
                        position += 9
                    elif code == 0x7D:  # EMPTY_DICT
                        weight += 72
                        stack.append({})
                        position += 1
                    elif code == 0x5D:  # EMPTY_LIST
                        weight += 64
                        stack.append([])
                        position += 1
                    elif code in (0x75, 0x73):  # SETITEMS, SETITEM
                        if code == 0x75:
                            items, stack = stack, marks.pop()
                        else:
                            items = [stack[-2], stack[-1]]
                            del stack[-2:]
                        self._set_items(stack[-1], items)
                        position += 1
                    elif code in (0x65, 0x61):  # APPENDS, APPEND
                        if code == 0x65:
                            items, stack = stack, marks.pop()
                        else:
                            items = [stack.pop()]
                        self._extend(stack[-1], items)
                        position += 1
                    elif code == 0x62:  # BUILD
                        state = stack.pop()
                        if type(stack[-1]) is StandIn and not stack[-1].kind.is_record:
                            stack[-1].state = state
                        else:
                            self._build(stack[-1], state)
                        position += 1
                    elif code == 0x81:  # NEWOBJ
                        weight += 152
                        arguments = stack.pop()
                        stack[-1] = self._create(stack[-1], arguments)
                        position += 1
                    elif code == 0x63:  # GLOBAL
                        middle = data.find(b"\n", position)
                        end = data.find(b"\n", middle + 1)
                        if middle < 0 or end < 0:
                            raise LimitError("the pickle ends too early")
                        stack.append(self._name(*(str(data[position + 1 : end], "utf-8").split("\n"))))
                        position = end + 1
                    elif code == 0x93:  # STACK_GLOBAL
                        name = stack.pop()
                        stack[-1] = self._name(stack[-1], name)
                        position += 1
                    elif code == 0x2E:  # STOP
                        value = stack.pop()
                        if frame and frame != position + 1:
                            raise ValueError("a frame that does not end with the pickle")
                        self._check(weight + 8 * count)
                        return value
                    elif code == 0x80:  # PROTO
                        if data[position + 1] > 5:
                            raise ValueError(f"unsupported pickle protocol: {data[position + 1]}")
                        position += 2
                    elif code == 0x95:  # FRAME
                        if frame:
                            raise ValueError("a frame in a frame")
                        position += 9
                        frame = position + _read_long(data, position - 8)[0]
                        if frame > length:
                            raise ValueError("a frame that is longer than the pickle")
                        stop = min(position + RUN, frame)
                    elif code == 0x8F:  # EMPTY_SET
                        weight += 224
                        stack.append(set())
                        position += 1
                    elif code == 0x90:  # ADDITEMS
                        items, stack = stack, marks.pop()
                        if type(stack[-1]) is not set:
                            raise TypeError(f"items are added to {show_value(stack[-1])}")
                        work.check_keys(items)
                        stack[-1].update(items)
                        position += 1
                    elif code == 0x91:  # FROZENSET
                        weight += 224
                        items, stack = stack, marks.pop()
                        work.check_keys(items)
                        work.spend(b"frozen" * 100)
                        stack.append(frozenset(items))
                        position += 1
                    elif code == 0x6C:  # LIST
                        weight += 64
                        items, stack = stack, marks.pop()
                        stack.append(items)
                        position += 1
                    elif code == 0x64:  # DICT
                        weight += 72
                        items, stack = stack, marks.pop()
                        stack.append({})
                        self._set_items(stack[-1], items)
                        position += 1
                    elif code == 0x92:  # NEWOBJ_EX
                        weight += 152
                        named, arguments = stack.pop(), stack.pop()
                        stack[-1] = self._create(stack[-1], arguments, named)
                        position += 1
                    elif code == 0x30:  # POP
                        if stack:
                            stack.pop()
                        else:
                            stack = marks.pop()
                        position += 1
                    elif code == 0x31:  # POP_MARK
                        stack = marks.pop()
                        position += 1
                    else:
                        raise UnsafeObjectError(
                            f"{self._where}: the pickle has an opcode that tensors do not need, "
                            f"{data[position : position + 1]!r} at {position}; refusing to run it"
                        )
                if frame and position >= frame:
                    if position > frame:
                        raise ValueError("a frame that ends in an opcode")
                    frame = 0
                if position >= length:
                    raise LimitError("the pickle ends too early")
                self._check(weight + 8 * count)
                stop = min(position + RUN, frame or length)
        except (IndexError, struct.error) as error:
            cut = position > length or (position + 1 == length and data[position] in b"Khq\x80")
            if cut or isinstance(error, struct.error):
                raise LimitError("the pickle ends too early") from error
            raise

    def _check(self, memory: int) -> None:
        """Raise if the pickle exceeds its limits."""
        if memory > self._limits.memory:
            raise LimitError(f"the pickle of {len(self._data):,} bytes would need {memory:,} bytes of memory")
        if self._work.steps < 0:
            raise ValueError("too many repeated values")

    def _put(self, memo: list[Any], place: int, value: Node, most: int) -> None:
        """Store a value in another place of the memo than the next one."""
        if place > most:
            raise LimitError("the pickle claims memory that it does not use")
        if place < len(memo):
            memo[place] = value
            return
        self._holes = True
        memo += [_ABSENT] * (place - len(memo))
        memo.append(value)

    def _name(self, module: Any, name: Any) -> Node:
        if type(module) is not str or type(name) is not str or not module or not name:
            raise ValueError("a name must be a text")
        found = self._names.get((module, name))
        if found is None:
            if b"\0" in f"{module}.{name}".encode():
                raise ValueError("a name with a zero byte")
            if len(self._names) >= MOST_NAMES:
                raise ValueError(f"the pickle names more than {MOST_NAMES:,} classes")
            found = self._names[module, name] = self._find_name(module, name)
        return found

    def _call(self, function: Node, arguments: tuple[Any, ...]) -> Node:
        """Return the node of a call, for other functions than those that have no node of their own."""
        if type(function) is StandIn:  # a pickle calls what `functools.partial` returns
            self._work.spend(arguments, (function,))
            return StandIn(function.kind, (function, *arguments))
        if type(function) is not Name or function.make is None:
            raise TypeError(f"a call of {show_value(function)}")
        return function.make(self._work, function, arguments)

    def _create(self, kind: Node, arguments: Any, named: Any = None) -> Node:
        """Return the stand-in of an object that is created without a call of `__init__`."""
        if not isinstance(arguments, tuple) or not (named is None or isinstance(named, dict)):
            raise TypeError("arguments must be a tuple")
        if type(kind) is not Name or not kind.is_class:
            raise _NotKnownError(f"an object of {show_value(kind)} that is created without a call")
        self._work.spend(arguments)
        made = StandIn(kind, arguments) if kind.make is None else kind.make(self._work, kind, arguments)
        made.named = named or None
        return made

    def _set_items(self, target: Node, items: list[Any]) -> None:
        """Set items of a dict, from keys and values in turn."""
        if len(items) % 2:
            raise ValueError("a key without a value")
        keys = items[::2]
        self._work.check_keys(key for key in keys if type(key) is not str)
        if isinstance(target, dict):
            target.update(zip(keys, items[1::2], strict=True))
        elif type(target) is not StandIn:
            raise TypeError(f"items are set in {show_value(target)}")

    def _extend(self, target: Node, items: list[Any]) -> None:
        if isinstance(target, list):
            target += items
        elif type(target) is not StandIn:
            raise TypeError(f"items are appended to {show_value(target)}")

    def _build(self, target: Node, state: Any) -> None:
        """Set the state of an object that is not a plain stand-in."""
        if type(target) is StandIn:
            fields = {} if state is None else _join_fields(state)
            if fields is None:
                raise TypeError("the state of DCP's metadata must be fields")
            target.state = {**(target.state or {}), **fields}
        elif type(target) is collections.OrderedDict and isinstance(state, dict):
            if "_metadata" in state:  # the versions of the modules of a state dict
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        else:
            raise _NotKnownError(f"a state of {show_value(target)}")
