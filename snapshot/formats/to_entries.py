"""Conversion of nested values in other libraries' pickles to entries, or to plain values."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import safe_pickle as p
from snapshot.formats import zip_archive
from snapshot.formats.pickled import INLINE, MODULE, make_refused_entry
from snapshot.formats.safe_pickle import expect_stored
from snapshot.manifest import entries as e
from snapshot.manifest import values as s
from snapshot.manifest.compounds import SEQUENCES
from snapshot.manifest.paths import encode_key, encode_text, find_tagged_keys
from snapshot.manifest.rank_view import DEEPEST
from snapshot.state import tensor_leaves
from snapshot.tensors.composite import find_stride_order
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, NAMES, contiguous_strides, measure_span
from snapshot.text import with_article

# Conversion of nested values in other libraries' pickles to entries, as flattening does for live state.


def limit_nodes(length: int) -> int:
    """Return the maximum number of values in a pickle of some length, which can repeat values."""
    return 50_000 + length


_SCALARS: dict[Any, type[s.Scalar]] = {
    int: s.IntEntry,
    bool: s.BoolEntry,
    float: s.FloatEntry,
    complex: s.ComplexEntry,
    bytes: s.BytesEntry,
    type(None): s.NoneEntry,
}
_READABLE = {float, complex}


class RebuiltTensor(msgspec.Struct, gc=False, frozen=True):
    """A tensor as a pickle describes it: a view into a storage."""

    storage: str
    """Archive member with the storage."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    subclass: str | None = None
    bits: str = ""
    """Lazy operations on the storage's elements whose result is the tensor: `conj+`, `neg+`, both, or none."""


def estimate_length(value: Any) -> int:
    """Return the approximate length of a number's or text's entry: each repetition has this cost."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return value.bit_length() // 4 if type(value) is int else 0


def make_scalar(value: Any) -> s.Scalar | None:
    """Return the entry of a value that is stored in the manifest itself; None for other values."""
    kind = type(value)
    if kind is str:
        escaped = encode_text(value)
        return s.StrEntry(value) if escaped is None else s.StrEntry(escaped, escaped=True)
    if kind in _SCALARS:
        entry = _SCALARS[kind]
        return entry(entry.write(value), str(value) if kind in _READABLE else None)
    if kind is p.Dtype:
        return s.DtypeEntry(value.name)
    try:
        if kind is p.Size:
            return s.SizeEntry(s.SizeEntry.write(torch.Size(value)))
        if isinstance(value, p.StandIn) and value.name == "torch.device":
            return s.DeviceEntry(s.DeviceEntry.write(torch.device(*value.arguments)))
    except (RuntimeError, TypeError, ValueError):
        pass  # torch cannot create it
    return None


_REBUILD = "torch._utils._rebuild_"


_ARGUMENTS = {"tensor": (4, 4), "tensor_v2": (6, 7), "tensor_v3": (7, 8)}
"""Numbers of arguments of torch's functions; a last one of the longer form is the tensor's metadata."""
_COMPLEX = frozenset(name for dtype, name in NAMES.items() if dtype.is_complex)
_SIGNED = _COMPLEX | {"float16", "bfloat16", "float32", "float64"}
"""Dtypes that support negative views."""


def rebuild_tensor(value: Any) -> RebuiltTensor | None:
    """Return the tensor of a stand-in; None if it is not a plain one, or has unknown parts."""
    if not isinstance(value, p.StandIn) or not value.name.startswith(_REBUILD) or value.state is not None:
        return None
    what, arguments = value.name.removeprefix(_REBUILD), value.arguments
    if what == "parameter" and 2 <= len(arguments) <= 3:
        data = rebuild_tensor(arguments[0])
        if data is None or type(arguments[1]) is not bool:
            return None
        return msgspec.structs.replace(data, requires_grad=arguments[1], subclass="torch.nn.parameter.Parameter")
    fewest, most = _ARGUMENTS.get(what, (1, 0))
    if len(arguments) > most:
        return None
    if len(arguments) < fewest:
        raise ValueError(f"a tensor with {len(arguments)} arguments")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, p.PickledStorage) or type(offset) is not int or offset < 0:
        raise ValueError("a tensor without a storage")
    dtype = storage.dtype
    if what == "tensor_v3":
        if not isinstance(arguments[6], p.Dtype):
            raise ValueError("a tensor without a dtype")
        dtype = arguments[6].name
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise ValueError("a tensor without a shape")
    if not all(type(each) is int and 0 <= each < 1 << 60 for each in (*shape, *strides)):
        raise ValueError(f"a tensor with invalid shape {p.show_value(shape)} or strides {p.show_value(strides)}")
    bits = _read_lazy_bits(arguments[most - 1] if what != "tensor" and len(arguments) == most else None, dtype)
    if bits is None:
        return None
    return RebuiltTensor(
        storage.key, dtype, tuple(shape), tuple(strides), offset, _read_flag(arguments[4:5]), bits=bits
    )


def _read_lazy_bits(metadata: Any, dtype: str) -> str | None:
    """Return the lazy operations in a tensor's metadata; None if it has anything else."""
    if not metadata:
        return ""
    if not isinstance(metadata, dict) or not all(type(flag) is bool for flag in metadata.values()):
        return None
    known = {"conj": _COMPLEX, "neg": _SIGNED}
    named = [name for name, flag in dict.items(metadata) if flag]
    if not all(dtype in known.get(name, ()) for name in named):
        return None
    return "".join(f"{name}+" for name in known if name in named)


def _read_flag(given: Sequence[Any]) -> bool:
    return bool(given) and given[0] is True


def make_extra(found: RebuiltTensor, *, view: bool = True) -> e.Extra | None:
    """Return the properties of a tensor in addition to its bytes, with its layout in the storage if `view`."""
    plain = found.strides == contiguous_strides(found.shape)
    order = None
    if not plain and 0 not in found.shape and math.prod(found.shape) < 1 << 50:
        order = find_stride_order(torch.empty_strided(found.shape, found.strides, device="meta"))
    if plain and not found.offset and not found.requires_grad and found.subclass is None:
        return None
    strides, offset = (found.strides, found.offset) if view and (not plain or found.offset) else (None, None)
    return e.Extra(order, found.subclass, found.requires_grad, strides, offset)


Stored = Callable[[str, RebuiltTensor], e.TensorEntry]
"""Function that returns a tensor's entry, depending on the format."""


class EntryTree:
    """Tree of values that become entries under paths."""

    def __init__(self, where: object, stored: Stored, length: int = 1 << 20) -> None:
        """Create an empty tree; `length` is that of the pickle with the values."""
        self._where = where
        self._stored = stored
        self.entries: dict[str, Any] = {}
        self.inline = bytearray()
        self._left = limit_nodes(length)
        self._room = 64 * self._left
        """Remaining bytes for names, texts and arrays."""
        self._above: set[int] = set()

    def add(self, path: str, value: Any, depth: int = 1) -> None:
        """Add entries for a value, and for everything in it."""
        try:
            self._add_value(path, value, depth)
        except RecursionError as error:
            raise CorruptSnapshotError(f"{self._where}: values in the pickle are nested too deeply") from error

    def _add_value(self, path: str, value: Any, depth: int) -> None:
        self._left -= 1
        self._room -= len(path) + estimate_length(value)
        if self._left < 0 or self._room < 0 or depth > DEEPEST:
            what = f"values nested more than {DEEPEST} deep" if depth > DEEPEST else "too many repeated values"
            raise CorruptSnapshotError(f"{self._where}: {what} in the pickle")
        entry = make_scalar(value)
        if entry is not None:
            self.entries[path] = entry
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self._add_container(path, value, depth)
        else:
            self.entries[path] = self._make_leaf(path, value)

    def _add_container(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._above:
            self.entries[path] = make_refused_entry(f"{_kind_name(value)} that contains itself")
            return
        made = make_container(value)
        if made is None:
            self.entries[path] = make_refused_entry(f"{_kind_name(value)} with an unsupported kind or keys")
            return
        entry, children = made
        self.entries[path] = entry
        self._above.add(id(value))
        for name, child in zip(entry.components(), children, strict=True):
            self._add_value(f"{path}/{name}", child, depth + 1)
        self._above.discard(id(value))

    def _make_leaf(self, path: str, value: Any) -> Any:
        try:
            tensor = rebuild_tensor(value)
            if tensor is not None:
                return self._stored(path, tensor)
            array = make_numpy_value(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise CorruptSnapshotError(f"{self._where}: {path}: {error}") from error
        if array is not None:
            return self._make_array(array)
        name = getattr(type(value), "name", "") or type(value).__name__  # an instance's name may be anything
        return make_refused_entry(f"{MODULE} {name}" if _is_module(value) else name)

    def _make_array(self, value: Any) -> Any:
        described = tensor_leaves.describe_array(value)
        if described is None:
            return make_refused_entry("numpy.ndarray of objects")
        descr, shape, order, tensor = described
        self._room -= tensor.nbytes
        if self._room < 0:
            raise CorruptSnapshotError(f"{self._where}: too many repeated values in the pickle")
        begin = -(-len(self.inline) // 16) * 16
        self.inline += bytes(begin - len(self.inline))
        self.inline += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        data = e.TensorEntry(INLINE, (begin, len(self.inline)), NAMES[tensor.dtype], tuple(tensor.shape))
        return e.NDArrayEntry(data, descr, shape, order, isinstance(value, np.generic))


def make_container(value: Any) -> tuple[e.Container, list[Any]] | None:
    """Return a container's entry, and its children in order; None if entries cannot represent it."""
    kind = type(value)
    if isinstance(value, dict):
        return _make_dict(value)
    children = list(value) if kind in SEQUENCES or kind is p.Deque else []
    if kind is p.Deque:
        longest = value.maxlen
        if longest is not None and (type(longest) is not int or longest < len(value)):
            return None
        return e.DequeEntry(len(children), maxlen=longest), children
    if kind not in SEQUENCES or (kind in (set, frozenset) and None in map(make_scalar, children)):
        return None
    return SEQUENCES[kind](len(children)), children


def _make_dict(value: dict[Any, Any]) -> tuple[e.Container, list[Any]] | None:
    items = list(dict.items(value))
    keys = [encode_key(key) for key, _ in items]
    if None in keys or type(value) not in _DICTS:
        return None
    tagged = find_tagged_keys(key for key, _ in items) or None
    more = _DICTS[type(value)](value)
    if more is None:
        return None
    kind, named = more
    entry = kind(keys, tagged, **named)  # type: ignore[arg-type]
    names = entry.components()
    return (entry, [child for _, child in items]) if len(set(names)) == len(names) else None


def _find_factory(value: Any) -> tuple[type[e.DictEntry], dict[str, Any]] | None:
    factory = vars(value).get("factory")
    named = "None" if factory is None else getattr(factory, "name", None) or getattr(factory, "__name__", "")
    name = str(named).rpartition(".")[2]
    try:
        e.DefaultdictEntry([], factory=name).check("")
    except UnsupportedFormatError:
        return None
    return e.DefaultdictEntry, {"factory": name}


_DICTS: dict[Any, Callable[[Any], tuple[type[e.DictEntry], dict[str, Any]] | None]] = {
    dict: lambda value: (e.DictEntry, {}),
    collections.OrderedDict: lambda value: (e.OrderedDictEntry, {"module_versions": _read_versions(value)}),
    p.Counter: lambda value: (e.CounterEntry, {}),
    p.DefaultDict: _find_factory,
}


def _read_versions(value: Any) -> dict[str, dict[str, Any]] | None:
    """Return the module versions of a state dict."""
    held = vars(value).get("_metadata")
    if not isinstance(held, dict):
        return None
    made = {}
    for name, versions in dict.items(held):
        if type(name) is not str or not isinstance(versions, dict):
            return None
        if not all(type(key) is str and type(each) in (int, str, bool) for key, each in versions.items()):
            return None
        made[name] = dict(versions)
    try:
        msgspec.json.encode(made)
    except (UnicodeError, OverflowError, ValueError):
        return None
    return made


def _kind_name(value: Any) -> str:
    return type(value).__name__.lower()


def _is_module(value: Any) -> bool:
    """Return True if a stand-in is a `torch.nn.Module`, which has these attributes in every version."""
    return isinstance(value, p.StandIn) and {"_parameters", "_modules"} <= p.read_fields(value).keys()


_MULTIARRAY = ("numpy.core.multiarray.", "numpy._core.multiarray.")


def make_numpy_value(value: Any) -> Any:
    """Return the NumPy array or scalar of a stand-in; None for any other value."""
    if not isinstance(value, p.StandIn) or not value.name.startswith(_MULTIARRAY):
        return None
    what = value.name.rpartition(".")[2]
    if what == "scalar" and len(value.arguments) == 2:
        dtype = _make_numpy_dtype(value.arguments[0])
        data = value.arguments[1]
        if dtype is None or not isinstance(data, bytes) or len(data) != dtype.itemsize:
            return None
        return np.frombuffer(data, dtype)[0]
    if what == "_reconstruct" and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, given, fortran, data = value.state
        dtype = _make_numpy_dtype(given) if _is_array(value.arguments[:1]) else None
        if dtype is None or not isinstance(data, bytes) or not isinstance(shape, tuple):
            return None
        if not all(type(size) is int and size >= 0 for size in shape) or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError("the array's size does not match its bytes")
        found = np.frombuffer(data, dtype) if data else np.empty(shape, dtype)
        found = found.astype(dtype.newbyteorder("="))  # as NumPy's own unpickling does
        return found.reshape(shape, order="F" if fortran else "C")
    return None


def _is_array(arguments: Sequence[Any]) -> bool:
    """Return True unless a pickle creates a subclass of NumPy's arrays."""
    kind = arguments[0] if arguments else None
    return isinstance(kind, type) and issubclass(kind, p.StandIn) and kind.name == "numpy.ndarray"


def _make_numpy_dtype(value: Any) -> np.dtype[Any] | None:
    if not isinstance(value, p.StandIn) or value.name != "numpy.dtype" or not value.arguments:
        return None
    text = value.arguments[0]
    if type(text) is not str or len(text) > 8 or text[:1] not in "biufcSU" or not text[1:].isdecimal():
        return None
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    dtype = np.dtype(text)
    return dtype.newbyteorder(">") if order == ">" else dtype


# Plain values from archives of other libraries that torch's `weights_only` reader refuses.
#
# That reader rejects NumPy arrays, which are in the states of random number generators and metrics.


class NotPlainError(Exception):
    """A value that only running a pickle could create."""


def read_plain_value(path: str, data: bytes | bytearray, stored: int | None = None) -> Any:
    """Return the value in a torch archive of containers, numbers, texts, arrays and tensors only.

    `stored` is the length of the archive on storage, if it was decompressed.
    """
    try:
        begin, end = zip_archive.find_directory(bytes(data[-zip_archive.TAIL :]), len(data))
        members = zip_archive.read_members(bytes(data[begin:end]), begin)
        held = {each.name.partition("/")[2]: each for each in members}
        content = _read_member(data, held["data.pkl"])
        length = expect_stored(len(content), len(data) if stored is None else stored, "its pickle")
        return _Builder(data, held, length).build_value(p.load_pickle(content, path, length), 0)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise NotPlainError(str(error)) from error


def _read_member(data: bytes | bytearray, member: zip_archive.ZipMember) -> bytes:
    at = member.header + zip_archive.find_data_begin(bytes(data[member.header : member.header + zip_archive.HEADER]))
    if member.method != zip_archive.STORED:
        raise ValueError("the archive is compressed")
    return bytes(data[at : at + member.size])


def read_pickle(data: bytes | bytearray) -> bytes:
    """Return the pickle in a torch archive."""
    begin, end = zip_archive.find_directory(bytes(data[-zip_archive.TAIL :]), len(data))
    found = {each.name.partition("/")[2]: each for each in zip_archive.read_members(bytes(data[begin:end]), begin)}
    return _read_member(data, found["data.pkl"])


class _Builder:
    """Builder of values from stand-ins."""

    def __init__(self, data: bytes | bytearray, members: dict[str, zip_archive.ZipMember], length: int) -> None:
        self._data = data
        self._members = members
        self._left = limit_nodes(length)
        self._room = (1 << 24) + 8 * len(data)
        """Remaining number of bytes to copy: repeated values and views can each be long."""

    def _find_member(self, name: str) -> bytes:
        member = self._members.get(name)
        return b"" if member is None else _read_member(self._data, member)

    def _spend(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise NotPlainError("too many repeated values")

    def build_value(self, value: Any, depth: int) -> Any:  # noqa: PLR0911 - one for each kind
        """Return the value of a stand-in, or of a container of stand-ins."""
        self._left -= 1
        if self._left < 0 or depth > 200:
            raise NotPlainError("too many repeated values, or nested too deeply")
        kind = type(value)
        if isinstance(value, dict):
            items = [(self._build_key(key), self.build_value(child, depth + 1)) for key, child in dict.items(value)]
            return _PLAIN_DICTS[kind](value, items) if kind in _PLAIN_DICTS else _refuse_value(value)
        if kind in (list, tuple, set, frozenset):
            return kind(self.build_value(child, depth + 1) for child in value)
        if kind is p.Deque:
            return collections.deque([self.build_value(child, depth + 1) for child in list(value)], value.maxlen)
        self._spend(estimate_length(value))
        entry = make_scalar(value)
        if entry is not None:
            return entry.value()
        tensor = rebuild_tensor(value)
        if tensor is not None:
            return self._build_tensor(tensor)
        array = make_numpy_value(value)
        if array is None:
            return _refuse_value(value)
        self._spend(array.nbytes)
        return array.copy()

    def _build_key(self, key: Any) -> Any:
        entry = make_scalar(key)
        return _refuse_value(key) if entry is None else entry.value()

    def _build_tensor(self, found: RebuiltTensor) -> torch.Tensor:
        data = self._find_member(f"data/{found.storage}")
        if found.dtype not in ITEMSIZE:
            return _refuse_value(found)  # type: ignore[no-any-return]
        self._spend(len(data) + math.prod(found.shape) * ITEMSIZE[found.dtype])
        reach = (found.offset + measure_span(found.shape, found.strides)) * ITEMSIZE[found.dtype]
        if reach > len(data) or 0 in found.strides or (self._find_member("byteorder") or b"little") != b"little":
            return _refuse_value(found)  # type: ignore[no-any-return]
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(BY_NAME[found.dtype]) if data else None
        if held is None:
            return torch.empty(found.shape, dtype=BY_NAME[found.dtype])
        made = held.as_strided(found.shape, found.strides, found.offset).clone()
        made = made.conj() if "conj" in found.bits else made
        made = (torch._neg_view(made) if "neg" in found.bits else made).resolve_neg().resolve_conj()
        return (
            torch.nn.Parameter(made, found.requires_grad)
            if found.subclass
            else made.requires_grad_(found.requires_grad)
        )


def _refuse_value(value: Any) -> Any:
    raise NotPlainError(with_article(getattr(value, "name", type(value).__name__)))


def _make_defaultdict(value: Any, items: list[tuple[Any, Any]]) -> Any:
    factory = vars(value).get("factory")
    name = str(getattr(factory, "name", getattr(factory, "__name__", ""))).rpartition(".")[2]
    known = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}
    if factory is not None and name not in known:
        _refuse_value(factory)
    return collections.defaultdict(known.get(name), items)


_PLAIN_DICTS: dict[Any, Callable[[Any, list[tuple[Any, Any]]], Any]] = {
    dict: lambda value, items: dict(items),
    collections.OrderedDict: lambda value, items: collections.OrderedDict(items),
    p.Counter: lambda value, items: collections.Counter(dict(items)),
    p.DefaultDict: _make_defaultdict,
}
