"""Leaves of a flattened state: tensors and bytes to store, under logical paths."""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add, attrgetter, eq, le
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.values import Entry
from snapshot.state.compound import is_wrapped_local
from snapshot.state.foreign_parts import refuse_empty
from snapshot.state.sharded import Shards, describes_parts, find_shards, wait_for_tensor
from snapshot.tensors import composite
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.geometry import Box
from snapshot.tensors.memory import BY_NAME, NAMES, is_plain, measure_span

# Leaves of a flattened state

Wrap = Callable[[str, e.TensorEntry | e.ChunkedTensorEntry], None]


class Leaf(msgspec.Struct, gc=False):
    """A tensor to store: plain, strided, on any device; its bytes are written in C order."""

    path: str
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    address: int = 0
    """The address; 0 if it has no bytes."""
    plain: bool = False
    """True if its own memory can be written: contiguous, on the host, neither conjugate nor negative."""
    extra: e.Extra | None = None
    """Properties in its entry, in addition to dtype and shape."""
    note: str = ""
    """Properties in addition to dtype, shape and bytes: they are equal in replicas."""
    wrap: Wrap | None = None
    """Called with the stored range's entry, if the manifest's entry for `path` is another one."""
    splits: bool = True
    """True if several ranks may write parts of it."""
    origin: tuple[int, ...] | None = None
    """Offsets in the tensor that it is a box of; None if it is a whole tensor."""
    whole: Leaf | None = None
    """The tensor that it is a box of."""

    @property
    def entry(self) -> str:
        """The path of the entry that it belongs to: several leaves can form one tensor."""
        return self.path.partition("%[")[0]

    def copy_for(self, path: str) -> Leaf:
        """Return a leaf of the same tensor under another path, stored separately."""
        return msgspec.structs.replace(self, path=path)

    def take_box(self, box: Box) -> Leaf:
        """Return a box of the leaf, to store separately."""
        whole, origin = self.whole or self, self.origin or (0,) * len(box.offsets)
        return Leaf.box_of(whole, box.moved_by(origin), self.tensor.detach()[box.slices()])

    @staticmethod
    def box_of(whole: Leaf, box: Box, tensor: torch.Tensor) -> Leaf:
        """Return a leaf for a box of a tensor; `tensor` holds the box."""
        address, plain = tensor.data_ptr(), is_plain(tensor)
        return Leaf(
            whole.path, tensor, whole.dtype, box.sizes, tensor.nbytes, address, plain, origin=box.offsets, whole=whole
        )


class Blob(msgspec.Struct, gc=False):
    """Bytes to store unchanged."""

    path: str
    data: bytes
    serializer: str
    obj_type: str


@dataclass(frozen=True, slots=True, eq=False)
class FromOneRank:
    """A value, with everything beneath it, that is stored once for all ranks.

    Only one rank may provide it: no other may have a value under the same path.
    """

    value: Any


# The result of flattening: entries in order, leaves and blobs by path, and shared memory.

LOW = 1 << 40
"""Ordinary addresses are above it; offsets of views into freed memory are below."""


class FlatState:
    """A flattened app state. `entries` is in order; a leaf's entry is None until the leaf was written."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry | None] = {}
        self.leaves: list[Leaf] = []
        self.blobs: list[Blob] = []
        self.shards: dict[str, Shards] = {}
        """Tensors with boxes that other processes may hold."""
        self.ties: dict[str, str] = {}
        """Path -> the path of the leaf that is the same view of the same memory."""
        self.pickled: list[str] = []
        self.lossy: list[str] = []
        """Tensors with attributes of Python, which are not stored."""
        self.excluded: list[str] = []
        self.once: set[str] = set()
        """Paths that this rank stores for all: see `FromOneRank`."""
        self.seen: dict[int, Leaf | list[Leaf]] = {}
        """Address -> the leaf, or leaves, whose memory begins there."""
        self.memory: list[torch.UntypedStorage] = []
        """The memory of the leaves, which is read by address."""


# The results of a prepare function, which may change a tensor's dtype but not its shape.

Prepare = Callable[[str, torch.Tensor, bool], torch.Tensor]


def prepare_tensor(prepare: Prepare, path: str, tensor: torch.Tensor, *, tracing: bool = False) -> torch.Tensor:
    """Return the function's result for a tensor; raise ValueError unless it is a tensor of the same shape."""
    made = prepare(path, tensor, tracing)
    if not isinstance(made, torch.Tensor) or made.shape != tensor.shape:
        raise ValueError(
            f"{path}: the prepare function returned "
            f"{list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__} for a tensor of shape "
            f"{list(tensor.shape)}; it may change the dtype, not the shape"
        )
    return made


def prepare_shards(prepare: Prepare, path: str, shards: Shards) -> Shards:
    """Prepare this rank's pieces of a sharded tensor, one by one.

    A rank without pieces calls the function with an empty tensor, and `tracing`: all ranks must store one dtype.
    """
    pieces = [
        dataclasses.replace(piece, tensor=_expect_plain(path, prepare_tensor(prepare, path, piece.tensor)))
        for piece in shards.pieces
    ]
    dtypes = {piece.tensor.dtype for piece in pieces}
    if not pieces:
        empty = torch.zeros((0,) * len(shards.shape), dtype=shards.dtype, device="cpu")
        dtypes = {_expect_plain(path, prepare_tensor(prepare, path, empty, tracing=True)).dtype}
    if len(dtypes) > 1:
        raise ValueError(
            f"{path}: the prepare function returned several dtypes for parts of one tensor: "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    (dtype,) = dtypes
    layout = shards.layout and f"{shards.layout}, stored as {dtype}"
    return dataclasses.replace(shards, dtype=dtype, pieces=pieces, layout=layout)


def _expect_plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if composite.plain_subclass_name(tensor) is None or tensor.layout is not torch.strided or tensor.dtype not in NAMES:
        raise SnapshotError(
            f"{path}: the prepare function must return a plain, dense tensor for a part of a sharded one, got a "
            f"{type(tensor).__name__} of {tensor.dtype} and layout {tensor.layout}"
        )
    return tensor.detach()


# NumPy arrays and scalars as tensors over the same memory, and back.

Array = np.ndarray[Any, Any]


_UTF_32: str = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_UTF_32_SWAPPED = "utf-32-be" if sys.byteorder == "little" else "utf-32-le"
RECORD = "record"
"""Marks a dtype whose scalars are `np.record`, and not `np.void`: [RECORD, NumPy's text for it]."""


def describe_array(value: Array | np.generic) -> tuple[Any, tuple[int, ...], str, torch.Tensor] | None:
    """Return (NumPy's text for the dtype, shape, order, tensor over the bytes); None if a pickle is needed."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return None
    dtype = value.dtype
    descr = _describe_dtype(dtype)
    if descr is None or (isinstance(value, np.generic) and type(value) is not dtype.type):
        return None
    if type(value) in _TEXTS:  # NumPy's arrays have no empty texts, and cut those that end in zeros
        raw = np.frombuffer(_TEXTS[type(value)](value), np.uint8)
        return descr, (), "C", wrap_array(raw)
    array: Array = np.asarray(value)
    order = "F" if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    plain = np.ascontiguousarray(array).reshape(array.shape)
    return descr, tuple(array.shape), order, wrap_array(plain)


def _describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return NumPy's text for a dtype in JSON; None if it is incomplete."""
    if dtype.hasobject or dtype.metadata:
        return None
    try:
        descr = _to_json(np.lib.format.dtype_to_descr(dtype))
        again = np.lib.format.descr_to_dtype(_to_tuples(descr))
    except (TypeError, ValueError):
        return None
    if again != dtype:
        return None
    return [RECORD, descr] if dtype.type is np.record else descr


_TEXTS: dict[type, Callable[[Any], bytes]] = {
    np.bytes_: bytes,
    np.str_: lambda value: str.encode(value, _UTF_32, "surrogatepass"),  # `str(value)` cuts zeros off
}


def wrap_array(array: Array) -> torch.Tensor:
    """Return a tensor over a C-ordered array's memory, which it keeps alive.

    Its dtype is the array's if torch has it; otherwise the tensor holds bytes.
    """
    name = array.dtype.name
    dtype = BY_NAME.get(name) if array.dtype.isnative and array.dtype.kind in "biufc" else None
    if array.nbytes == 0:
        shape = array.shape if dtype is not None else (0,)
        return torch.empty(shape, dtype=dtype or torch.uint8, device="cpu")
    memory = view_memory(array.__array_interface__["data"][0], array.nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype or torch.uint8)
    tensor = tensor.view(array.shape) if dtype is not None else tensor
    tensor._owner = array  # type: ignore[attr-defined]
    return tensor


def rebuild_array(
    path: str, tensor: torch.Tensor, dtype: Any, shape: tuple[int, ...], *, order: str, scalar: bool
) -> Any:
    """Return the array (or scalar) whose bytes are in a contiguous CPU tensor, over the same memory."""
    made = read_dtype(path, dtype)
    nbytes = tensor.numel() * tensor.element_size()
    if scalar and not shape and made.type in _TEXTS:
        return _rebuild_text(path, tensor, made, nbytes)
    expected = math.prod(shape) * made.itemsize
    if any(size < 0 for size in shape) or (scalar and shape):
        raise CorruptSnapshotError(f"{path}: invalid shape {list(shape)} of {'a scalar' if scalar else 'an array'}")
    if nbytes != expected:
        raise CorruptSnapshotError(f"{path}: an array {made}{list(shape)} must have {expected} bytes, got {nbytes}")
    try:
        if expected:
            array: Array = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(made).reshape(shape)
        else:  # without memory, for any shape: elements of some dtypes take no bytes
            array = np.ndarray(shape, made, b"" if made.itemsize == 0 else None)
    except Exception as error:  # NumPy raises many kinds of exceptions
        raise CorruptSnapshotError(f"{path}: cannot create an array {made}{list(shape)}: {error}") from error
    if order == "F":
        array = np.asfortranarray(array)
    return array[()] if scalar else array


def _rebuild_text(path: str, tensor: torch.Tensor, dtype: np.dtype[Any], nbytes: int) -> np.str_ | np.bytes_:
    """Return the text of exactly its number of characters. Earlier versions stored an empty one as a zero."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if not dtype.itemsize and nbytes == np.dtype(f"{dtype.kind}1").itemsize and not any(raw):
        raw = b""
    if len(raw) != dtype.itemsize:
        raise CorruptSnapshotError(f"{path}: a text {dtype} must have {dtype.itemsize} bytes, got {nbytes}")
    if dtype.kind == "S":
        return np.bytes_(raw)
    try:
        return np.str_(raw.decode(_UTF_32 if dtype.isnative else _UTF_32_SWAPPED, "surrogatepass"))
    except UnicodeDecodeError as error:
        raise CorruptSnapshotError(f"{path}: is not a text: {error}") from error


def read_dtype(path: str, descr: Any) -> np.dtype[Any]:
    """Return a dtype from NumPy's text for it."""
    record = isinstance(descr, list) and len(descr) == 2 and descr[0] == RECORD
    try:
        made = np.lib.format.descr_to_dtype(_to_tuples(descr[1] if record else descr))
        made = np.dtype((np.record, made)) if record else made
    except Exception as error:  # what it reads such texts with raises many kinds at nonsense
        raise CorruptSnapshotError(f"{path}: {str(descr)[:80]!r} is not a NumPy dtype") from error
    if made.hasobject:
        raise CorruptSnapshotError(f"{path}: an array of Python objects cannot be read from bytes")
    return made


def _to_json(descr: Any) -> Any:
    if isinstance(descr, (list, tuple)):
        return [_to_json(item) for item in descr]
    if type(descr) not in (str, int):
        raise TypeError(f"{descr!r} must be a text or a number")  # the title of a field may be anything
    return descr


def _to_tuples(descr: Any) -> Any:
    """Return a dtype's JSON text with the tuples that NumPy expects.

    A dtype is a text or a list of fields. A field is (name, dtype) or (name, dtype, shape), and its name may be
    (title, name).
    """
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _to_tuples(dtype), *map(tuple, shape))
        for name, dtype, *shape in descr
    ]


# Flattening of tensors and arrays to leaves.
#
# A plain tensor costs as few attribute reads as possible: a snapshot of 10,000 small tensors spends more time here
# than in system calls.

_COMPLEX = frozenset(name for dtype, name in NAMES.items() if dtype.is_complex)
SIMPLE = {dtype: name for dtype, name in NAMES.items() if name not in _COMPLEX}
_ONLY_BYTES = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""Dtypes that torch cannot copy into another order."""
_OF_MODULES = frozenset(("persistent", "_is_buffer", "_is_param"))
"""Attributes with which torch marks a module's tensors; torch sets them again."""


FEW, AT_ONCE = 8, 256
"""The fewest values of a dict that are looked at together, and the most."""
_TENSOR = {torch.Tensor}
_plain, _address = attrgetter("plain"), attrgetter("address")
_dtype, _shape, _nbytes = attrgetter("dtype"), attrgetter("shape"), attrgetter("nbytes")
_on_host, _requires_grad, _attributes = attrgetter("is_cpu"), attrgetter("requires_grad"), attrgetter("__dict__")


class _KnownShapes(dict[torch.Size, tuple[int, ...]]):
    """Shapes as tuples: one object for each shape."""

    def __missing__(self, size: torch.Size) -> tuple[int, ...]:
        shape = self[size] = tuple(size)
        return shape


class TensorLeaves(FlatState, ABC):
    """The leaves of an app state, as they are found."""

    def __init__(
        self,
        prepare: Prepare | None = None,
        excluded: Callable[[str], bool] | None = None,
        *,
        classes: bool = True,
        fits_tree: Callable[[str, Any], bool] | None = None,
    ) -> None:
        """Create an empty state.

        With `classes`, objects with a class of their own are taken apart, and their readers need live objects.
        Otherwise they are pickled.
        """
        super().__init__()
        self._excluded = excluded
        self._classes = classes
        self._fits_tree = fits_tree
        self._within = False
        """True inside an object that is known not to contain itself."""
        self._prepare = prepare
        self._prepared_of: dict[int, list[tuple[torch.Tensor, str]]] = {}
        self._arrays: dict[Any, tuple[str, Any]] = {}
        self._boxes: dict[Any, str] = {}
        self._shapes = _KnownShapes()

    def _add_plain_tensors(self, paths: Sequence[str], values: Sequence[Any]) -> bool:
        """Add values that are all plain tensors with memory of their own. Return False, and add nothing, for others.

        A model can have tens of thousands of small tensors, and reading one property of one dominates the cost of a
        take. So `map` reads each property of all of them.
        """
        if self._prepare is not None or set(map(type, values)) != _TENSOR or any(map(_attributes, values)):
            return False
        try:
            addresses = list(map(torch.Tensor.data_ptr, values))  # raises, unless all are strided
            shapes = list(map(self._shapes.__getitem__, map(_shape, values)))  # raises for what is nested
        except RuntimeError:
            return False
        dtypes, sizes = list(map(SIMPLE.get, map(_dtype, values))), list(map(_nbytes, values))
        if (
            None in dtypes
            or not all(sizes)
            or not all(map(_on_host, values))
            or not all(map(torch.Tensor.is_contiguous, values))
            or any(map(_requires_grad, values))
            or any(map(torch.Tensor.is_neg, values))
            or min(addresses) < LOW  # it may have been freed
            or len(set(addresses)) < len(addresses)
            or not self.seen.keys().isdisjoint(addresses)
        ):
            return False
        leaves = list(map(Leaf, paths, values, dtypes, shapes, sizes, addresses, repeat(True)))
        self.entries.update(dict.fromkeys(paths))
        self.seen.update(zip(addresses, leaves, strict=True))
        self.leaves += leaves
        return True

    def _add_tensor(self, path: str, tensor: torch.Tensor, depth: int = 0) -> None:
        """Add a plain tensor in the fewest attribute reads, which dominate the cost."""
        if describes_parts(tensor) and self._add_sharded(path, tensor):
            return
        if self._prepare is not None:
            if self._note_prepared(path, tensor):
                return
            tensor = self._prepare_tensor(path, tensor)
        dtype = NAMES.get(tensor.dtype)
        if not tensor.is_cpu or dtype is None or tensor.layout is not torch.strided or tensor.is_nested:
            self._add_unusual(path, tensor, dtype)
            return
        if not tensor.is_contiguous() or tensor.requires_grad:
            self._add_described(path, tensor, dtype, None)
            return
        shape = self._shapes[tensor.shape]
        nbytes = tensor.nbytes
        plain = not tensor.is_neg() and not (dtype in _COMPLEX and tensor.is_conj())
        address = tensor.data_ptr() if nbytes else 0
        leaf = Leaf(path, tensor, dtype, shape, nbytes, address, plain)
        self.entries[path] = None
        if nbytes:
            if address < LOW:
                refuse_freed(path, tensor)
            if address in self.seen:
                if self._note_tie(leaf, address):
                    return
            else:
                self.seen[address] = leaf
        self.leaves.append(leaf)

    def _add_unusual(self, path: str, tensor: torch.Tensor, dtype: str | None) -> None:
        """Add a tensor on another device, of another layout, or of a dtype that is stored in parts."""
        if dtype is None or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            self._add_composite(path, tensor)
        else:
            self._add_described(path, tensor, dtype, None)

    def _note_tie(self, leaf: Leaf, address: int) -> bool:
        """Record a tie and return True if a leaf is the same view of the same memory."""
        others = self.seen.get(address)
        if others is None:
            self.seen[address] = leaf
            return False
        if isinstance(others, Leaf):
            others = self.seen[address] = [others]
        tensor = leaf.tensor
        for other in others:
            if composite.is_same_view(other.tensor, tensor):
                self.ties[leaf.path] = other.path
                return True
        others.append(leaf)
        return False

    def _add_described(self, path: str, tensor: torch.Tensor, dtype: str, subclass: str | None) -> None:
        """Add a tensor with its memory order, its class and `requires_grad`."""
        if dtype in _ONLY_BYTES and not tensor.is_contiguous():
            raise SnapshotError(f"{path}: torch cannot copy a {tensor.dtype}, so it can be saved only in C order")
        self.entries[path] = None
        order = composite.find_stride_order(tensor)
        requires_grad = tensor.requires_grad
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            refuse_freed(path, tensor)
        extra, note = None, ""
        if order is not None or subclass is not None or requires_grad:
            extra, note = e.Extra(order, subclass, requires_grad), f"{order} {subclass} {requires_grad}"
        address = tensor.data_ptr() if nbytes else 0
        leaf = Leaf(path, tensor, dtype, tuple(tensor.shape), nbytes, address, is_plain(tensor), extra, note)
        if nbytes and self._note_tie(leaf, address):
            return
        self.leaves.append(leaf)

    def _add_parameter(self, path: str, tensor: torch.Tensor, depth: int = 0) -> None:
        self._add_tensor_like(path, tensor)

    def _add_tensor_like(self, path: str, tensor: torch.Tensor) -> None:
        """Add a subclass of Tensor: stored as its data with the name of its class, if it has no other state."""
        tensor = wait_for_tensor(tensor)
        if type(tensor) is torch.nn.Parameter and not tensor.numel():
            refuse_empty([(path, tensor)])
        is_parameter = type(tensor) is torch.nn.Parameter and not describes_parts(tensor)
        if not is_parameter and not is_wrapped_local(tensor) and self._add_sharded(path, tensor):
            return
        subclass = composite.plain_subclass_name(tensor)
        if subclass is None:
            if not self._add_wrapped(path, tensor):
                self._add_object(path, tensor)
            return
        if type(tensor) is not torch.nn.Parameter:
            lost = [name for name in getattr(tensor, "__dict__", ()) if name not in _OF_MODULES]
            self.lossy.extend([f"{path} ({subclass}: {', '.join(lost)})"] if lost else [])
        if self._prepare is not None and not isinstance(tensor, UninitializedTensorMixin):
            if self._note_prepared(path, tensor):
                return
            tensor = self._prepare_tensor(path, tensor)
        if isinstance(tensor, UninitializedTensorMixin):
            raise SnapshotError(f"{path}: is not initialised yet, so there is nothing to save; run the module once")
        dtype = NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
            if tensor.layout is torch.strided:
                plain = tensor.as_subclass(torch.Tensor)
            else:  # which has no storage that a view could share
                plain = tensor.detach().requires_grad_(tensor.requires_grad)
            self._add_composite(path, plain, subclass)
            return
        self._add_described(path, tensor, dtype, subclass)

    def _add_sharded(self, path: str, value: Any) -> bool:
        """Add a value that is sharded over ranks; return False for any other value."""
        shards = find_shards(path, value)
        if shards is None:
            return False
        self.entries[path] = None
        places = tuple(
            (piece.box, piece.tensor.data_ptr(), piece.tensor.stride(), piece.tensor.device)
            for piece in shards.pieces
            if piece.tensor.numel()
        )
        if places and not shards.is_open:
            owner = self._boxes.setdefault((shards.kind, shards.layout, shards.dtype, shards.shape, places), path)
            if owner != path:
                self.ties[path] = owner
                self.shards[path] = self.shards[owner]
                return True
        self.shards[path] = shards if self._prepare is None else prepare_shards(self._prepare, path, shards)
        return True

    def _note_prepared(self, path: str, tensor: torch.Tensor) -> bool:
        """Record a tie and return True if the same tensor was prepared under another name."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
            return False
        others = self._prepared_of.setdefault(tensor.data_ptr(), [])
        for twin, owner in others:
            if composite.is_same_view(twin, tensor):
                self.entries[path] = None
                self.ties[path] = self.ties.get(owner, owner)
                return True
        others.append((tensor, path))
        return False

    def _prepare_tensor(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        assert self._prepare is not None
        return prepare_tensor(self._prepare, path, tensor)

    def _add_composite(self, path: str, tensor: torch.Tensor, subclass: str | None = None) -> None:
        if tensor.is_meta:
            raise SnapshotError(f"{path}: is on the meta device, so it has no data to save")
        if tensor.is_quantized and tensor.numel():
            refuse_freed(path, tensor)
        taken = composite.decompose_tensor(tensor)
        if taken is None:
            self._add_object(path, tensor)
            return
        kind, parts, params = taken
        params |= {"requires_grad": True} if tensor.requires_grad else {}
        params |= {"subclass": subclass} if subclass else {}
        entry = e.TensorPartsEntry(kind, {}, params)
        self.entries[path] = entry
        for name, part in parts.items():
            self._add_part(path, name, part, entry.parts, f"{kind} {params}")

    def _add_part(
        self,
        path: str,
        name: str,
        tensor: torch.Tensor,
        into: dict[str, e.TensorEntry | e.ChunkedTensorEntry],
        note: str,
    ) -> None:
        tensor = tensor.detach()
        if tensor.numel():
            refuse_freed(path, tensor)
        dtype = NAMES[tensor.dtype]

        def wrap(_: str, stored: e.TensorEntry | e.ChunkedTensorEntry) -> None:
            into[name] = stored

        shape, nbytes, plain = tuple(tensor.shape), tensor.nbytes, is_plain(tensor)
        address = tensor.data_ptr() if nbytes else 0
        below = f"{path}%[{name}]"
        self.leaves.append(Leaf(below, tensor, dtype, shape, nbytes, address, plain, None, note, wrap, splits=False))

    def _add_array(self, path: str, value: np.ndarray[Any, Any] | np.generic, depth: int) -> None:
        described = describe_array(value)
        if described is None:
            self._add_object(path, value)
            return
        dtype, shape, order, tensor = described
        self.entries[path] = None
        if isinstance(value, np.ndarray) and value.nbytes:
            memory = value.__array_interface__["data"][0], value.dtype, value.shape, value.strides
            owner, _ = self._arrays.setdefault(memory, (path, value))
            if owner != path:
                self.ties[path] = owner
                return

        entries = self.entries  # a leaf that led back here would never be collected: the collector sees no leaves

        def wrap(path: str, stored: e.TensorEntry | e.ChunkedTensorEntry) -> None:
            entries[path] = e.NDArrayEntry(stored, dtype, shape, order, isinstance(value, np.generic))

        dtype_name, size, address = NAMES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
        note = f"{type(value).__name__} {dtype} {shape} {order}"
        self.leaves.append(
            Leaf(path, tensor, dtype_name, size, tensor.nbytes, address, True, None, note, wrap, splits=False)
        )

    @abstractmethod
    def _add_object(self, path: str, value: Any) -> None:
        """Store an object that has no other representation."""

    @abstractmethod
    def _add_wrapped(self, path: str, tensor: torch.Tensor) -> bool:
        """Flatten a tensor that wraps others; False for any other tensor."""


def refuse_freed(path: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor has no memory, or lost it."""
    if tensor._is_zerotensor():
        raise SnapshotError(f"{path}: is a zero tensor of autograd, which has no memory; save tensor.clone() instead")
    if composite.is_freed(tensor):
        raise SnapshotError(f"{path}: its memory was freed, so it has no data to save")


def hold_memory(leaves: Sequence[Leaf]) -> list[torch.UntypedStorage]:
    """Return the storages of leaves: while they are kept, the leaves' addresses can be read.

    Another thread may give a tensor another memory at any time. Raise if that happened since its address was recorded.
    """
    held = [leaf for leaf in leaves if leaf.address]
    tensors = [leaf.tensor for leaf in held]
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    limits = map(add, map(torch.UntypedStorage.data_ptr, storages), map(torch.UntypedStorage.nbytes, storages))
    ends = map(add, map(torch.Tensor.data_ptr, tensors), map(_nbytes, held))
    as_known = map(eq, map(torch.Tensor.data_ptr, tensors), map(_address, held))
    if all(map(_plain, held)) and all(as_known) and all(map(le, ends, limits)):
        return storages
    limits = map(add, map(torch.UntypedStorage.data_ptr, storages), map(torch.UntypedStorage.nbytes, storages))
    for leaf, address, end in zip(held, map(torch.Tensor.data_ptr, tensors), limits, strict=True):
        if address != leaf.address:
            raise SnapshotError(
                f"{leaf.path}: its memory was replaced while the state was collected, by another thread or another "
                "state_dict(); return a clone of the tensor, or take the snapshot when nothing replaces it"
            )
        span = (
            leaf.nbytes if leaf.plain else measure_span(leaf.shape, leaf.tensor.stride()) * leaf.tensor.element_size()
        )
        if address + span > end:
            raise SnapshotError(f"{leaf.path}: its storage was shrunk, so it has only a part of its data")
    return storages
