"""Conversion of other libraries' pickles to entries, and of such entries to plain values."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.pickled_objects import INLINE, MODULE, make_refused_entry
from snapshot.formats.safe_pickle import PickleLimits, evaluate_pickle, expect_stored
from snapshot.formats.zip_archive import STORED, ZipArchive
from snapshot.manifest import entries as e
from snapshot.manifest import values as s
from snapshot.manifest.containers import (
    SEQUENCES,
    Container,
    CounterEntry,
    DefaultdictEntry,
    DequeEntry,
    DictEntry,
    OrderedDictEntry,
)
from snapshot.manifest.paths import encode_key, encode_text, find_tagged_keys
from snapshot.manifest.rank_view import DEEPEST
from snapshot.state import leaves
from snapshot.state.flatten import inflate_tree
from snapshot.tensors.composite import find_stride_order
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, NAMES, contiguous_strides, measure_span
from snapshot.text import counted, with_article

# Conversion of the nodes of a pickle to entries, as flattening does for live state.


def limit_nodes(length: int) -> int:
    """Return the maximum number of values in a pickle of some length, which can repeat values."""
    return 50_000 + length


DEEPEST_VALUE = 200
"""Maximum depth of a value that is created as a whole."""
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
        if isinstance(value, p.StandIn) and value.name == "torch.device" and not value.named:
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
    value = _drop_attributes(value)
    if (
        not isinstance(value, p.StandIn)
        or not value.name.startswith(_REBUILD)
        or value.state is not None
        or value.named
    ):
        return None
    what, arguments = value.name.removeprefix(_REBUILD), value.arguments
    if what == "parameter" and 2 <= len(arguments) <= 3:
        if isinstance(arguments[0], p.StandIn) and arguments[0].name == value.name:
            raise CorruptSnapshotError("a parameter in a parameter")
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


_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_PLAIN_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter"}


def _drop_attributes(value: Any) -> Any:
    """Return a tensor or parameter without the attributes that its program has set on it."""
    if not isinstance(value, p.StandIn) or value.state is not None or value.named or len(value.arguments) != 4:
        return value
    if value.name == _WITH_STATE:
        return p.StandIn(p.Name(f"{_REBUILD}parameter"), value.arguments[:3])
    function, kind, arguments, _ = value.arguments
    known = value.name == p.REBUILD_TYPED and isinstance(kind, p.Name) and kind.name in _PLAIN_TYPES
    if known and isinstance(function, p.Name) and isinstance(arguments, tuple):
        return p.StandIn(function, arguments)
    return value


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


def make_tensor_entry(found: RebuiltTensor, archive: ZipArchive) -> Any:
    """Return the entry of a tensor in an archive, whose location is the name of a member."""
    itemsize = ITEMSIZE.get(found.dtype)
    if itemsize is None:
        return make_refused_entry(f"tensor of {found.dtype}")
    name = f"data/{found.storage}"
    member, numel = archive.named.get(name), math.prod(found.shape)
    if member is None and numel:
        raise ValueError(f"the storage {name[:105]} is missing")
    reach = (found.offset + measure_span(found.shape, found.strides)) * itemsize
    if member is None or not numel:
        return e.TensorEntry(INLINE, (0, 0), found.dtype, found.shape, extra=make_extra(found, view=False))
    if reach > member.size:
        raise ValueError(f"the tensor ends at byte {reach:,}, but its storage has {counted(member.size, 'byte')}")
    packed = f"{found.bits}zip"
    return e.TensorEntry(name, (0, member.size), found.dtype, found.shape, serializer=packed, extra=make_extra(found))


Stored = Callable[[str, RebuiltTensor], Any]
"""Function that returns a tensor's entry, depending on the format."""


def make_entries(
    items: Mapping[str, p.Node],
    where: object,
    stored: Stored,
    length: int,
    *,
    inline: bytearray,
    depth: int = 1,
    plain: bool = False,
) -> dict[str, Any]:
    """Return the entries of nodes, and of everything in them, by path.

    Args:
        items: The nodes by their paths.
        where: Place of the pickle, for messages.
        stored: Function that returns a tensor's entry.
        length: Length of the pickle, which limits how often it can repeat values.
        inline: Bytes of the location `INLINE`, to which those of arrays are added.
        depth: Depth of the nodes below the root of the document.
        plain: True for the values of objects. Their sets may have tuples and frozensets, but their defaultdicts must
            not create OrderedDicts.
    """
    tree = _Tree(where, stored, length, inline, plain)
    try:
        for path, node in items.items():
            tree.add(path, node, depth)
    except RecursionError as error:
        raise CorruptSnapshotError(f"{where}: values in the pickle are nested too deeply") from error
    return tree.entries


class _Tree:
    """Entries by path, and the limits on them."""

    def __init__(self, where: object, stored: Stored, length: int, inline: bytearray, plain: bool) -> None:
        self._where = where
        self._stored = stored
        self.entries: dict[str, Any] = {}
        self._inline = inline
        self._plain = plain
        self._left = limit_nodes(length)
        self._room = 64 * self._left
        """Remaining bytes for names, texts and arrays."""
        self._above: set[int] = set()
        self._shards: Any = None

    def _spend(self, values: int, nbytes: int) -> None:
        """Count values, and the bytes of names, texts and arrays; raise if there are too many."""
        self._left -= values
        self._room -= nbytes
        if self._left < 0 or self._room < 0:
            raise CorruptSnapshotError(f"{self._where}: too many repeated values in the pickle")

    def _expect_shallow(self, depth: int) -> None:
        if depth > DEEPEST:
            raise CorruptSnapshotError(f"{self._where}: values nested more than {DEEPEST} deep in the pickle")

    def _is_item(self, value: Any) -> bool:
        """Return True if entries can represent an element of a set. A repeated tuple or frozenset counts each time."""
        rest = [(value, 1)]
        while rest:
            each, depth = rest.pop()
            if self._plain and type(each) in (tuple, frozenset):
                self._spend(len(each), sum(map(estimate_length, each)))
                self._expect_shallow(depth)
                rest += [(below, depth + 1) for below in each]
            elif make_scalar(each) is None:
                return False
        return True

    def _spend_versions(self, value: Any) -> None:
        """Count the module versions of a state dict: many can share one long dict."""
        held = vars(value).get("_metadata") if type(value) is collections.OrderedDict else None
        for name, versions in dict.items(held) if isinstance(held, dict) else ():
            self._spend(1, estimate_length(name))
            if isinstance(versions, dict):
                self._spend(len(versions), _measure_versions(versions))

    def add(self, path: str, value: p.Node, depth: int) -> None:
        """Add entries for a node, and for everything in it."""
        self._expect_shallow(depth)
        self._spend(1, len(path) + estimate_length(value))
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
        self._spend_versions(value)
        made = None if self._plain and _creates_ordered(value) else make_container(value, self._is_item)
        if made is None:
            self._spend(len(value), sum(map(estimate_length, value)))  # nothing below it counts for this one
            self.entries[path] = make_refused_entry(f"{_kind_name(value)} with an unsupported kind or keys")
            return
        entry, children = made
        self.entries[path] = entry
        self._above.add(id(value))
        for name, child in zip(entry.components(), children, strict=True):
            self.add(f"{path}/{name}", child, depth + 1)
        self._above.discard(id(value))

    def _make_leaf(self, path: str, value: p.Node) -> Any:
        try:
            tensor = rebuild_tensor(value)
            if tensor is not None:
                return self._stored(path, tensor)
            array = make_numpy_value(value)
            shards = self._read_shards(value) if array is None and isinstance(value, p.StandIn) else None
            if shards is not None:
                return self._make_sharded(path, shards)
        except p.NotKnownError as error:
            return make_refused_entry(str(error))
        except (ValueError, TypeError, OverflowError) as error:
            raise CorruptSnapshotError(f"{self._where}: {path}: {error}") from error
        if array is not None:
            return self._make_array(array)
        if isinstance(value, p.StandIn):
            name = value.class_name
            return make_refused_entry(f"{MODULE} {name}" if _is_module(value) else name)
        return make_refused_entry(type(value).__name__)

    def _read_shards(self, value: p.StandIn) -> Any:
        """Return the boxes of a sharded tensor; None for any other value."""
        if self._shards is None:
            from snapshot.formats.pickled_shards import ShardReader  # few pickles have sharded tensors

            self._shards = ShardReader(rebuild_tensor)
        return self._shards.read(value)

    def _make_sharded(self, path: str, found: Any) -> Any:
        """Return the entry of a sharded tensor, with the boxes that this file has."""
        self._spend(len(found.parts), 0)
        shards = []
        for box, tensor in found.parts:
            stored = self._stored(path, tensor)
            if not isinstance(stored, e.TensorEntry):
                return stored  # of a dtype that is not known
            shards.append(e.Shard(box.offsets, box.sizes, stored))
        if found.placements is None:
            return e.ShardedTensorEntry(found.dtype, found.shape, shards, found.mesh)
        return e.DTensorEntry(found.dtype, found.shape, shards, found.mesh, found.placements)

    def _make_array(self, value: Any) -> Any:
        described = leaves.describe_array(value)
        if described is None:
            return make_refused_entry("numpy.ndarray of objects")
        descr, shape, order, tensor = described
        self._spend(0, tensor.nbytes)
        inline = self._inline
        begin = -(-len(inline) // 16) * 16
        inline += bytes(begin - len(inline))
        inline += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        data = e.TensorEntry(INLINE, (begin, len(inline)), NAMES[tensor.dtype], tuple(tensor.shape))
        return e.NDArrayEntry(data, descr, shape, order, isinstance(value, np.generic))


def _is_scalar(value: Any) -> bool:
    return make_scalar(value) is not None


def make_container(value: Any, is_item: Callable[[Any], bool] = _is_scalar) -> tuple[Container, list[Any]] | None:
    """Return a container's entry, and its children in order; None if entries cannot represent it.

    `is_item` returns True for the possible elements of sets.
    """
    kind = type(value)
    if isinstance(value, dict):
        return _make_dict(value)
    children = list(value) if kind in SEQUENCES or kind is p.Deque else []
    if kind is p.Deque:
        longest = value.maxlen
        if longest is not None and (type(longest) is not int or longest < len(value)):
            return None
        return DequeEntry(len(children), maxlen=longest), children
    if kind not in SEQUENCES or (kind in (set, frozenset) and not all(map(is_item, children))):
        return None
    return SEQUENCES[kind](len(children)), children


def _make_dict(value: dict[Any, Any]) -> tuple[Container, list[Any]] | None:
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


_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool", "OrderedDict")


def _find_factory(value: Any) -> tuple[type[DictEntry], dict[str, Any]] | None:
    if value.factory is None:
        return DefaultdictEntry, {"factory": "None"}
    name = getattr(value.factory, "name", "").rpartition(".")[2]
    return (DefaultdictEntry, {"factory": name}) if name in _FACTORIES else None


def _creates_ordered(value: Any) -> bool:
    """Return True for a defaultdict whose missing values are OrderedDicts."""
    return type(value) is p.DefaultDict and getattr(value.factory, "name", "").endswith("OrderedDict")


_DICTS: dict[Any, Callable[[Any], tuple[type[DictEntry], dict[str, Any]] | None]] = {
    dict: lambda value: (DictEntry, {}),
    collections.OrderedDict: lambda value: (OrderedDictEntry, {"module_versions": _read_versions(value)}),
    p.Counter: lambda value: (CounterEntry, {}),
    p.DefaultDict: _find_factory,
}


MOST_VERSIONS = 1 << 20
"""Maximum number of module versions of a state dict, and of bytes of texts in them."""


def _measure_versions(versions: dict[Any, Any]) -> int:
    """Return the approximate length of the texts and numbers in a module's versions."""
    return sum(estimate_length(key) + estimate_length(each) for key, each in dict.items(versions))


def _read_versions(value: Any) -> dict[str, dict[str, Any]] | None:
    """Return the module versions of a state dict."""
    held = vars(value).get("_metadata")
    if not isinstance(held, dict):
        return None
    made = {}
    room = MOST_VERSIONS
    for name, versions in dict.items(held):
        if type(name) is not str or not isinstance(versions, dict):
            return None
        if not all(type(key) is str and type(each) in (int, str, bool) for key, each in versions.items()):
            return None
        room -= 1 + len(versions) + _measure_versions(versions)
        if room < 0:
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
    fields = p.read_fields(value)
    return "_parameters" in fields and "_modules" in fields


_MULTIARRAY = ("numpy.core.multiarray.", "numpy._core.multiarray.")


def make_numpy_value(value: Any) -> Any:
    """Return the NumPy array or scalar of a stand-in; None for any other value."""
    if not isinstance(value, p.StandIn) or not value.name.startswith(_MULTIARRAY) or value.named:
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
    return isinstance(kind, p.Name) and kind.name == "numpy.ndarray"


def _make_numpy_dtype(value: Any) -> np.dtype[Any] | None:
    if not isinstance(value, p.StandIn) or value.name != "numpy.dtype" or not value.arguments or value.named:
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
        archive = ZipArchive.parse(data, len(data))
        content = read_pickle(data, archive)
        length = expect_stored(len(content), len(data) if stored is None else stored, "its pickle")
        node = evaluate_pickle(content, path, PickleLimits.of(length))
    except (ValueError, KeyError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise NotPlainError(str(error)) from error
    try:
        return make_value(path, node, _Storages(data, archive), length)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise NotPlainError(str(error)) from error


def read_pickle(data: bytes | bytearray, archive: ZipArchive | None = None) -> bytes:
    """Return the pickle in a torch archive."""
    archive = archive or ZipArchive.parse(data, len(data))
    member = archive.named["data.pkl"]
    if member.method != STORED:
        raise ValueError("the archive is compressed")
    return archive.read(member, data)


class _Storages:
    """The bytes of tensors in an archive, and the limit on values that are created from them."""

    def __init__(self, data: bytes | bytearray, archive: ZipArchive) -> None:
        self._data = data
        self.archive = archive
        order = archive.named.get("byteorder")
        self._swapped = order is not None and archive.read(order, data) not in (b"", b"little")
        self._room = (1 << 24) + 8 * len(data)
        """Remaining number of bytes to copy: repeated values and views can each be long."""

    def spend(self, nbytes: int) -> None:
        """Raise if values with more bytes are created than the archive accounts for."""
        self._room -= nbytes
        if self._room < 0:
            raise NotPlainError("too many repeated values")

    def is_readable(self, storage: str) -> bool:
        """Return True if the bytes of a storage are those of its elements."""
        member = self.archive.named.get(f"data/{storage}")
        if member is not None:
            self.archive.locate(member, self._data)
        return not self._swapped and (member is None or member.method == STORED)

    def read(self, name: str) -> bytes:
        """Return the bytes of a storage, by the name of its member."""
        member = self.archive.named[name]
        self.spend(member.size)
        return self.archive.read(member, self._data)


def make_value(path: str, node: p.Node, storages: _Storages, length: int) -> Any:
    """Return the value of a node: that of its entries.

    Raises:
        NotPlainError: Only running the pickle could create a part of it.
    """

    def describe(_: str, found: RebuiltTensor) -> Any:
        if 0 in found.strides or not storages.is_readable(found.storage):
            raise ValueError("a tensor that repeats its elements, is compressed, or is in the other byte order")
        return make_tensor_entry(found, storages.archive)

    inline = bytearray()
    depth = DEEPEST - DEEPEST_VALUE
    entries = make_entries({path: node}, path, describe, length, inline=inline, depth=depth, plain=True)
    values = {
        below: _make_leaf_value(below, entry, inline, storages)
        for below, entry in entries.items()
        if not entry.is_container
    }
    return inflate_tree(path, entries, values)


def _make_leaf_value(path: str, entry: Any, inline: bytearray, storages: _Storages) -> Any:
    if isinstance(entry, e.TensorEntry):
        storages.spend(math.prod(entry.shape) * ITEMSIZE[entry.dtype])
        return _make_tensor(entry, b"" if entry.location == INLINE else storages.read(entry.location))
    if isinstance(entry, e.NDArrayEntry):
        begin, end = entry.data.pieces()[0][1].byte_range
        storages.spend(end - begin)
        held = torch.frombuffer(inline[begin:end], dtype=torch.uint8) if end > begin else torch.empty(0)
        return leaves.rebuild_array(path, held, entry.dtype, entry.shape, order=entry.order, scalar=entry.scalar)
    if entry.is_object:
        raise NotPlainError(with_article(entry.obj_type))
    value = entry.value()
    storages.spend(estimate_length(value))
    return value


def _make_tensor(entry: e.TensorEntry, data: bytes) -> torch.Tensor:
    """Return a tensor, from the bytes of its storage."""
    extra, dtype = entry.extra or e.PLAIN, BY_NAME[entry.dtype]
    strides = extra.strides or contiguous_strides(entry.shape)
    if data:
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        made = held.as_strided(entry.shape, strides, extra.storage_offset or 0).clone()
    else:
        made = torch.empty(entry.shape, dtype=dtype)
    made = made.conj() if "conj" in entry.serializer else made
    made = (torch._neg_view(made) if "neg" in entry.serializer else made).resolve_neg().resolve_conj()
    if extra.subclass is not None:
        return torch.nn.Parameter(made, extra.requires_grad)
    return made.requires_grad_(extra.requires_grad)
