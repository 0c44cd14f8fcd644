"""Reading of untrusted pickles without running anything: every name becomes an inert stand-in."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from snapshot.errors import CorruptSnapshotError, UnsafeObjectError, UnsupportedFormatError
from snapshot.manifest.compounds import MOST_COMPARISONS
from snapshot.manifest.paths import LONGEST_INT
from snapshot.tensors.memory import BY_NAME
from snapshot.text import with_article

# Scan of untrusted pickles before they are read.
#
# A pickle may not claim more memory than it has bytes, nor have an opcode that tensors do not need.

_KNOWN = [
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BINSTRING",
    "SHORT_BINSTRING",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "LIST",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "EMPTY_SET",
    "ADDITEMS",
    "FROZENSET",
    "BINGET",
    "LONG_BINGET",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "NEWOBJ",
    "BUILD",
    "BINPERSID",
]
_LENGTHS = {"BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8, "BINBYTES": 4, "SHORT_BINBYTES": 1}
_LENGTHS |= {"BINBYTES8": 8, "BINSTRING": 4, "SHORT_BINSTRING": 1, "LONG1": 1, "LONG4": 4}
_LONG, _TEXTS, _PUT, _STOP, _UNKNOWN, _TUPLE, _GET, _BINPUT, _MEMOIZE, _LEAVES = range(-1, -11, -1)
_WIDTHS = [_UNKNOWN] * 256
"""Length with argument by opcode, or a code for further checks."""
for _opcode in pickletools.opcodes:
    if _opcode.name in _KNOWN:
        _WIDTHS[ord(_opcode.code)] = 1 + (max(_opcode.arg.n, 0) if _opcode.arg is not None else 0)
    if _opcode.name in _LENGTHS:
        _WIDTHS[ord(_opcode.code)] = _LONG
for _codes, _kind in (
    (b"c", _TEXTS),
    (b"r", _PUT),
    (b".", _STOP),
    (b"t\x85\x86\x87", _TUPLE),
    (b"hj", _GET),
    (b"q", _BINPUT),
    (b"\x94", _MEMOIZE),
    (b"beu\x90\x9101", _LEAVES),
):
    for _code in _codes:
        _WIDTHS[_code] = _kind
_WEIGHTS = [8] * 256
"""Approximate memory of the created object by opcode, without bytes copied from the pickle."""
for _codes, _weight in (
    (b"\x8f\x91", 232),
    (b"R\x81Q", 160),
    (b"}d", 80),
    (b"]l", 72),
    (b"t\x85\x86\x87", 64),
    (b"J\x8a\x8bGX\x8c\x8dB\x8eTU", 56),
):
    for _code in _codes:
        _WEIGHTS[_code] = _weight
FREE = 64 << 20
"""Bytes of memory allowed for any pickle, with PER_BYTE more for each of its bytes."""
PER_BYTE = 32
INFLATED = 256 << 10
"""Bytes that any compressed pickle may have, with MOST_TIMES more for each stored byte.
Pickles of state dicts and optimizers compress about fivefold."""
MOST_TIMES = 32
_PUTS = b"qr\x94"
_CONSUMES = b"Rbas\x81Q."
"""Opcodes after a tuple that put it into something other than a tuple or a key."""
_ARGUMENTS = {ord(each.code): _LENGTHS[each.name] for each in pickletools.opcodes if each.name in _LENGTHS}
_INTS = {ord(each.code) for each in pickletools.opcodes if each.name in ("LONG1", "LONG4")}
_MODULUS = (1 << 61) - 1
"""Ints that differ by a multiple of this number have equal hashes."""
LOOSE = 30_000
"""Maximum number of tuples that may be nested or have equal hashes. Ten times as many would overflow the stack, or
take minutes."""
SHARED = 16
"""Maximum number of tuples fetched again, each in the next: hashing them takes at most 2 ** 16 steps."""


class ScanResult(NamedTuple):
    """Result of scanning a pickle."""

    end: int
    careful: bool
    """True if tuples may hash forever, or nest too deeply to be hashed. The interpreter's own unpickler would try
    that, in one step that cannot be interrupted."""


def expect_stored(length: int, stored: int, what: str) -> int:
    """Raise ValueError if a pickle is too long for the `stored` bytes that it was decompressed from.

    Return the length that limits on memory and time are based on.
    """
    if length > INFLATED + MOST_TIMES * stored:
        raise ValueError(f"{what} inflates too far: from {stored:,} stored bytes to {length:,}; store it uncompressed")
    return min(length, MOST_TIMES // 2 * stored)


def scan_pickle(  # noqa: PLR0912, PLR0915 - one fast loop over millions of opcodes
    data: bytes, where: object, length: int | None = None
) -> ScanResult:
    """Raise unless a pickle can be read in memory proportional to its length; see `expect_stored`."""
    widths, weights = _WIDTHS, _WEIGHTS
    counts_as = len(data) if length is None else length
    made = memo = puts = loose = shared = 0
    odd = False
    tuples: set[int] = set()
    position, count, length, ended = 0, 0, len(data), -1
    ints: set[bytes] = set()
    try:
        while True:
            code = data[position]
            width = widths[code]
            count += 1
            made += weights[code]
            if width > 0:
                position += width
            elif width == _LONG:
                size = _ARGUMENTS[code]
                begin = position + 1 + size
                position = begin + int.from_bytes(data[position + 1 : begin], "little")
                if position > length:
                    break
                if code in _INTS and position - begin >= 8:
                    ints.add(data[begin:position])
                    if position - begin > LONGEST_INT // 8:
                        raise UnsupportedFormatError(
                            f"{where}: a number in the pickle must have at most {LONGEST_INT // 8} bytes, got "
                            f"{position - begin:,}"
                        )
            elif width == _BINPUT:
                puts += 1
                position += 2
            elif width == _MEMOIZE:
                memo += 1
                position += 1
            elif width == _TUPLE:
                inner = code == 0x85 and position == ended
                position += 1
                while (following := data[position]) in _PUTS:
                    if following == 0x94:
                        tuples.add(memo)
                        memo += 1
                        position += 1
                    else:
                        stop = position + (2 if following == 0x71 else 5)
                        if (place := int.from_bytes(data[position + 1 : stop], "little")) > count:
                            raise CorruptSnapshotError(f"{where}: the pickle claims memory that it does not use")
                        tuples.add(place)
                        puts += 1
                        position = stop
                loose += following not in _CONSUMES
                if inner and following == 0x52:  # the sizes of a torch.Size, which millions of chunks have
                    loose -= 1
                ended = position
            elif width in (_LEAVES, _GET):
                if width == _GET:
                    stop = position + (2 if code == 0x68 else 5)
                    shared += int.from_bytes(data[position + 1 : stop], "little") in tuples
                    position = stop
                else:
                    odd = odd or code in b"01\x91"
                    position += 1
                odd = odd or data[position] in _PUTS
            elif width == _TEXTS:
                position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
            elif width == _PUT:
                if int.from_bytes(data[position + 1 : position + 5], "little") > count:
                    raise CorruptSnapshotError(f"{where}: the pickle claims memory that it does not use")
                puts += 1
                position += 5
            elif width == _STOP:
                if made > FREE + PER_BYTE * counts_as:
                    raise CorruptSnapshotError(
                        f"{where}: the pickle of {len(data):,} bytes would need {made:,} bytes of memory"
                    )
                _check_hashes(ints, where)
                return ScanResult(
                    position + 1, odd or shared > SHARED or loose > LOOSE or bool(memo and puts and tuples)
                )
            else:
                raise UnsafeObjectError(
                    f"{where}: the pickle has an opcode that tensors do not need, {bytes([code])!r} at {position}; "
                    "refusing to run it"
                )
    except (IndexError, ValueError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
    raise CorruptSnapshotError(f"{where}: the pickle ends too early")


def _check_hashes(ints: set[bytes], where: object) -> None:
    if len(ints) ** 2 <= MOST_COMPARISONS:
        return
    alike = collections.Counter(int.from_bytes(each, "little", signed=True) % _MODULUS for each in ints)
    if sum(many * many for many in alike.values()) > MOST_COMPARISONS:
        raise CorruptSnapshotError(f"{where}: too many numbers in the pickle have equal hashes; refusing it as hostile")


# Reading of untrusted pickles without running anything: every name becomes an inert stand-in.
#
# First each opcode is scanned (see `pickle_scan`). Then the interpreter's own unpickler creates containers, numbers,
# texts, and stand-ins.

MOST_NAMES = 10_000
"""Maximum number of classes and functions that one pickle may name."""
FEW = 200_000
"""Values that may be copied or hashed for any pickle, with FACTOR more for each of its bytes."""
FACTOR = 4
DEEPEST_KEY = 100


class _WorkLimit(threading.local):
    """Remaining number of copies and hashes for the pickle that this thread reads."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, count: int) -> None:
        """Reset the limit for a new pickle."""
        self.count = count
        self._seen: set[str] = set()
        self._alike: collections.Counter[int] = collections.Counter()
        self._compared = 0

    def spend(self, *copied: Any) -> None:
        """Count a new object and the items copied for it: a value that is fetched again can be long."""
        self.count -= 1 + sum(len(each) for each in copied if hasattr(each, "__len__"))
        if self.count < 0:
            raise pickle.UnpicklingError("too many repeated values")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Count keys; raise for keys that take too long to hash."""
        for key in keys:
            if not isinstance(key, tuple):
                continue
            rest = [(key, 1)]
            while rest:
                held, depth = rest.pop()
                self.spend(held)
                if depth > DEEPEST_KEY:
                    raise pickle.UnpicklingError("nested too deeply")
                rest += [(each, depth + 1) for each in held if isinstance(each, tuple)]
            self.check_key(key)

    def check_key(self, key: Any) -> None:
        """Count a key whose hash an attacker can choose; raise if too many different keys collide."""
        text = repr(key)
        if text not in self._seen:
            self._seen.add(text)
            self._compared += self._alike[hash(key)]
            self._alike[hash(key)] += 1
            if self._compared > MOST_COMPARISONS:
                raise pickle.UnpicklingError("too many hash collisions of keys; refusing a hostile pickle")


_work_limit = _WorkLimit()


class _Sealed(type):
    """Metaclass of classes that a pickle cannot change: a pickle can set attributes of any class that it names."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"the pickle sets {name} of a class")

    def __setstate__(cls, state: Any) -> None:
        raise pickle.UnpicklingError("the pickle sets the state of a class")


class StandIn(metaclass=_Sealed):
    """Stand-in for an object: its constructor arguments, and its later state."""

    __slots__ = ("arguments", "state")
    name = ""
    """Name of the class or function, with the module."""

    def __new__(cls, *arguments: Any) -> Any:
        _work_limit.spend(arguments)
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> Any:  # a pickle calls what `functools.partial` returns
        return type(self)(self, *arguments)

    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...

    def __repr__(self) -> str:
        return f"<{with_article(self.name)}>"


class PickledObject(metaclass=_Sealed):
    """Stand-in for an object of a class in DCP's metadata: a pickle sets its fields at once."""

    name = ""


_RECORDS = "torch.distributed.checkpoint."
_RECORD_NAMES = {
    "metadata.Metadata",
    "metadata.TensorStorageMetadata",
    "metadata.ChunkStorageMetadata",
    "metadata.MetadataIndex",
    "metadata.BytesStorageMetadata",
    "filesystem._StorageInfo",
}


def show_value(value: Any) -> str:
    """Return a value for a message: the full text of a value with repetitions could be endless."""
    if isinstance(value, tuple) and len(value) <= 8 and all(type(each) is int for each in value):
        return str(tuple(value))[:100]
    return repr(value)[:100] if type(value) in (str, int, float, bool) else with_article(type(value).__name__[:100])


def read_fields(value: Any) -> dict[str, Any]:
    """Return the attributes that a pickle sets on an object."""
    state = vars(value) if isinstance(value, PickledObject) else getattr(value, "state", None)
    if isinstance(state, tuple) and len(state) == 2:
        fields = all(each is None or isinstance(each, dict) for each in state)
        state = {**(state[0] or {}), **(state[1] or {})} if fields else None
    return state if isinstance(state, dict) else {}


class Dtype(metaclass=_Sealed):
    """Stand-in for a torch.dtype."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    name: str

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("the pickle sets an attribute of a dtype")

    def __setstate__(self, state: Any) -> None:  # without this, pickle would set the state past `__setattr__`
        raise pickle.UnpicklingError("the pickle sets the state of a dtype")


class StorageType(Dtype):
    """Stand-in for a storage class, by the dtype of its elements; bytes if it has none."""


class PickledStorage(metaclass=_Sealed):
    """Stand-in for a storage: the archive member with its bytes."""

    def __init__(self, key: str, dtype: str, numel: int) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "numel", numel)

    key: str
    dtype: str
    numel: int

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("the pickle sets an attribute of a storage")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the pickle sets the state of a storage")


class Size(tuple[int, ...], metaclass=_Sealed):
    """Stand-in for a torch.Size."""

    def __new__(cls, sizes: Any = ()) -> Size:
        _work_limit.spend(sizes)
        made = super().__new__(cls, sizes)
        if not all(type(each) is int for each in made):
            raise pickle.UnpicklingError("the pickle creates sizes from other values than ints")
        return made


class DefaultDict(dict[Any, Any], metaclass=_Sealed):
    """Stand-in for a defaultdict."""

    def __init__(self, factory: Any = None, *items: Any) -> None:
        super().__init__(_spend_items(*items))
        object.__setattr__(self, "factory", factory)

    factory: Any = None


class Counter(dict[Any, Any], metaclass=_Sealed):
    """Stand-in for a Counter, which a pickle creates from a dict."""

    def __init__(self, *items: Any) -> None:
        super().__init__(_spend_items(*items))


class Deque(list[Any], metaclass=_Sealed):
    """Stand-in for a deque."""

    def __init__(self, items: Any = (), maxlen: Any = None) -> None:
        _work_limit.spend(items)
        super().__init__(items)
        object.__setattr__(self, "maxlen", maxlen)

    maxlen: Any = None


def _spend_items(items: Any = ()) -> Any:
    """Return the items of a new dict, from another dict or from pairs."""
    _work_limit.spend(items)
    if not isinstance(items, dict):
        _work_limit.check_keys(key for key, _ in items)
    return items


def _find_maker(kind: Any) -> Callable[..., Any]:
    """Return a function that creates a container of hashed items, which a pickle cannot change."""

    def make(*items: Any) -> Any:
        if len(items) > 1:
            raise pickle.UnpicklingError(f"the pickle creates {with_article(kind.__name__)} from several arguments")
        if kind is collections.OrderedDict:
            return kind(_spend_items(*items))
        _work_limit.spend(*items, b"frozen" * 100 * (kind is frozenset))  # attackers can choose their hashes, too
        if items and not isinstance(items[0], (str, set, frozenset)):
            _work_limit.check_keys(items[0])
        return kind(*items)

    make.__name__ = kind.__name__
    return make


def _encode_text(text: str, encoding: str) -> bytes:
    _work_limit.spend(text)
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise pickle.UnpicklingError(f"the pickle encodes a text in {encoding!r}")
    return text.encode(encoding)


def _make_complex(*parts: Any) -> complex:
    made = complex(*parts)
    _work_limit.check_key(made)
    return made


def _make_attribute(holder: Any, *names: Any) -> Any:
    """Return the stand-in for an attribute of a class, which is a function or a class itself."""
    _work_limit.spend(b"class" * 20)
    name = names[0] if names and type(names[0]) is str else "attribute"
    return _make_stand_in(str(getattr(holder, "name", "builtins"))[:100], name)


class _Sized(metaclass=_Sealed):
    """Stand-in for the function that old pickles create bytes with."""

    def __new__(cls, *arguments: Any) -> Any:
        return _encode_text(*arguments)


class _NoBytes(metaclass=_Sealed):
    """Stand-in for `bytes`, which old pickles call to create empty bytes."""

    def __new__(cls, *arguments: Any) -> Any:
        if arguments:
            raise pickle.UnpicklingError("the pickle creates bytes from arguments")
        return b""


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
_REAL: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): DefaultDict,
    ("collections", "Counter"): Counter,
    ("collections", "deque"): Deque,
    ("builtins", "complex"): _make_complex,
    ("__builtin__", "complex"): _make_complex,
    ("builtins", "getattr"): _make_attribute,
    ("__builtin__", "getattr"): _make_attribute,
    ("torch", "Size"): Size,
    ("_codecs", "encode"): _Sized,
    ("__builtin__", "bytes"): _NoBytes,
    ("builtins", "bytes"): _NoBytes,
}
_MADE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
}


class _Names:
    """Stand-ins for the names in one pickle."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))  # type: ignore[call-arg]
        self._stands: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        found = _REAL.get(key) or self._stands.get(key)
        if found is None:
            if len(self._stands) >= MOST_NAMES:
                raise pickle.UnpicklingError(f"the pickle names more than {MOST_NAMES:,} classes")
            found = self._stands[key] = _find_maker(_MADE[key]) if key in _MADE else _make_stand_in(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageType)):
            raise pickle.UnpicklingError("invalid reference to a storage")
        _, kind, key, _, numel = pid
        if type(key) is not str or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("invalid reference to a storage")
        _work_limit.spend()
        return PickledStorage(key, kind.name, numel)


class _Unpickler(_Names, pickle.Unpickler): ...


_in_python: Any = pickle._Unpickler


class _Careful(_Names, _in_python):  # type: ignore[misc]
    """An unpickler that checks keys before they are hashed; many times slower."""

    dispatch: ClassVar[dict[int, Any]] = dict(_in_python.dispatch)

    def _setitem(self) -> None:
        _work_limit.check_keys(self.stack[-2:-1])
        _in_python.load_setitem(self)

    def _setitems(self) -> None:
        _work_limit.check_keys(self.stack[::2])
        _in_python.load_setitems(self)

    def _dict(self) -> None:
        _work_limit.check_keys(self.stack[::2])
        _in_python.load_dict(self)

    def _additems(self) -> None:
        _work_limit.check_keys(self.stack)
        _in_python.load_additems(self)

    def _frozenset(self) -> None:
        _work_limit.check_keys(self.stack)
        _work_limit.spend(b"frozen" * 100)
        _in_python.load_frozenset(self)

    dispatch |= {115: _setitem, 117: _setitems, 100: _dict, 144: _additems, 145: _frozenset}


def _make_stand_in(module: str, name: str) -> Any:
    if module == "torch" and name in BY_NAME:
        return Dtype(name)
    if module == "torch" and (found := _OLD.fullmatch(name)):
        return StorageType(_DTYPE_OF[found[1]])
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return StorageType("uint8")
    full = f"{module}.{name}"
    if full.removeprefix(_RECORDS) in _RECORD_NAMES and full.startswith(_RECORDS):
        return _Sealed(name, (PickledObject,), {"name": full})
    return _Sealed(name.rpartition(".")[2][:100], (StandIn,), {"name": full[:200], "__slots__": ()})


def load_pickle(data: bytes, where: object, length: int | None = None) -> Any:
    """Return the contents of a pickle: containers, numbers, texts, bytes, and stand-ins for all other objects.

    `length` is the length that limits are based on, if the pickle was compressed; see `expect_stored`.

    Raises:
        UnsafeObjectError: The pickle has opcodes that checkpoints do not need.
        CorruptSnapshotError: The data is not a pickle, or is a malicious one.
    """
    end, careful = scan_pickle(data, where, length)
    _work_limit.begin(FEW + FACTOR * (len(data) if length is None else length))
    try:
        return (_Careful if careful else _Unpickler)(data[:end]).load()
    except Exception as error:  # a foreign pickle may raise anything
        raise CorruptSnapshotError(f"{where}: cannot read the pickle: {type(error).__name__}: {error}") from error
