"""Flattening: nested containers become entries, tensors become leaves under logical paths.

This is the hottest Python of a take: a snapshot of 10,000 small tensors spends more here than in system calls. So
there is one dispatch by exact type, and a plain tensor costs one small struct.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.errors import SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.entry import Entry
from snapshot.manifest.paths import component, component_of, encode_key, tagged_keys
from snapshot.manifest.scalars import scalar_entry
from snapshot.state import arrays
from snapshot.state.dicts import dict_maker
from snapshot.state.leaves import Blob, Leaf
from snapshot.state.live import live_leaves
from snapshot.state.once import Once
from snapshot.state.replay import LOW, remember, replay
from snapshot.state.shards import Sharded, Shards, sharded
from snapshot.tensors import composite
from snapshot.tensors.dtypes import NAMES
from snapshot.tensors.memory import is_plain

DEEPEST = 500
_COMPLEX = frozenset(("complex32", "complex64", "complex128"))
_SIMPLE = {dtype: name for dtype, name in NAMES.items() if name not in _COMPLEX}
_ONLY_BYTES = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""Dtypes that torch can only hold: it cannot copy them into another order."""
_OF_MODULES = frozenset(("persistent", "_is_buffer", "_is_param"))
"""Attributes with which torch marks what a module holds; it gives them anew."""

Prepare = Callable[[str, torch.Tensor, bool], torch.Tensor]


class Flattened:
    """What an app state holds. `entries` is in order; a leaf's stands as None until it has been written.

    `excluded` says of a path whether it is left out, with all beneath it: nothing of that is looked at."""

    def __init__(self, prepare: Prepare | None = None, excluded: Callable[[str], bool] | None = None) -> None:
        self.entries: dict[str, Entry | None] = {}
        self.leaves: list[Leaf] = []
        self.blobs: list[Blob] = []
        self.shards: dict[str, Shards] = {}
        """Tensors of which this process may hold only some boxes."""
        self.ties: dict[str, str] = {}
        """Path -> the path of the leaf that is the very same memory, seen the same way."""
        self.pickled: list[str] = []
        self.lossy: list[str] = []
        """Tensors with attributes of Python, which are not stored."""
        self.excluded: list[str] = []
        self.once: set[str] = set()
        """What this rank gives for all: see `Once`."""
        self._excluded = excluded
        self._prepare = prepare
        self._prepared_of: dict[int, list[tuple[torch.Tensor, str]]] = {}
        self._arrays: dict[Any, tuple[str, Any]] = {}
        self.seen: dict[int, Leaf | list[Leaf]] = {}
        """Address -> the leaf, or the leaves, whose memory begins there."""
        self._boxes: dict[Any, str] = {}
        self._shapes: dict[torch.Size, tuple[int, ...]] = {}

    def add(self, path: str, value: Any) -> None:
        """Flatten a value below `path`."""
        if self._excluded is not None and self._excluded(path):
            self._leave_out(path, value)
            return
        plain = self._prepare is None and self._excluded is None
        if plain and replay(path, value, self):
            return
        before = len(self.entries), len(self.leaves), len(self.blobs), len(self.pickled), len(self.shards)
        try:
            self._visit(path, value, 0)
        except RecursionError as error:
            raise SnapshotError(f"{path}: nested deeper than Python's stack allows here, or holds itself") from error
        if plain and not self.once:
            remember(path, value, self, before)

    def _leave_out(self, path: str, value: Any) -> None:
        """Note the names of what is left out, so that no glob that matches them is said to match nothing."""
        self.excluded.append(path)
        with contextlib.suppress(RecursionError):
            self.excluded.extend(live_leaves(path, value))

    def _visit(self, path: str, value: Any, depth: int) -> None:
        """Flatten a value of any type; those that are looked up by their exact type come here only from `add`."""
        visitor = _VISITORS.get(type(value))
        if visitor is not None:
            visitor(self, path, value, depth)
        elif isinstance(value, torch.Tensor):
            self._tensor_like(path, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(path, value, depth)
        elif type(value) is Once:
            before = len(self.entries)
            _VISITORS.get(type(value.value), Flattened._visit)(self, path, value.value, depth)
            self.once.update(islice(self.entries, before, None))
        else:
            self._object(path, value)

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int = 0) -> None:
        """A plain tensor in the fewest attribute reads: each costs as much as all the rest of a line of Python."""
        if self._prepare is not None:
            if self._prepared_before(path, tensor):
                return
            tensor = self._prepared(path, tensor)
        dtype = NAMES.get(tensor.dtype)
        if not tensor.is_cpu or dtype is None or tensor.layout is not torch.strided or tensor.is_nested:
            self._unusual(path, tensor, dtype)
            return
        if not tensor.is_contiguous() or tensor.requires_grad:
            self._described(path, tensor, dtype, None)
            return
        size = tensor.shape
        shape = self._shapes.get(size)
        if shape is None:
            shape = self._shapes[size] = tuple(size)
        nbytes = tensor.nbytes
        plain = not tensor.is_neg() and not (dtype in _COMPLEX and tensor.is_conj())
        address = tensor.data_ptr() if nbytes else 0
        leaf = Leaf(path, tensor, dtype, shape, nbytes, address, plain)
        self.entries[path] = None
        if nbytes:
            if address < LOW:
                _refuse_freed(path, tensor)
            if address in self.seen:
                if self._tied(leaf, address):
                    return
            else:
                self.seen[address] = leaf
        self.leaves.append(leaf)

    def _unusual(self, path: str, tensor: torch.Tensor, dtype: str | None) -> None:
        """On another device, of another layout, or of a dtype that is stored in parts."""
        if dtype is None or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            self._composite(path, tensor)
        else:
            self._described(path, tensor, dtype, None)

    def _tied(self, leaf: Leaf, address: int) -> bool:
        """Whether the very same memory is a leaf already, seen in the same way; if so, note it."""
        others = self.seen.get(address)
        if others is None:
            self.seen[address] = leaf
            return False
        if isinstance(others, Leaf):
            others = self.seen[address] = [others]
        tensor = leaf.tensor
        for other in others:
            if composite.seen_alike(other.tensor, tensor):
                self.ties[leaf.path] = other.path
                return True
        others.append(leaf)
        return False

    def _described(self, path: str, tensor: torch.Tensor, dtype: str, subclass: str | None) -> None:
        """A tensor of which more is to be said than its bytes: how it lies in memory, its class, `requires_grad`."""
        if dtype in _ONLY_BYTES and not tensor.is_contiguous():
            raise SnapshotError(f"{path}: torch cannot copy a {tensor.dtype}, so it can be saved only in C order")
        self.entries[path] = None
        order = composite.stride_order(tensor)
        requires_grad = tensor.requires_grad
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            _refuse_freed(path, tensor)
        extra, note = None, ""
        if order is not None or subclass is not None or requires_grad:
            extra, note = e.Extra(order, subclass, requires_grad), f"{order} {subclass} {requires_grad}"
        address = tensor.data_ptr() if nbytes else 0
        leaf = Leaf(path, tensor, dtype, tuple(tensor.shape), nbytes, address, is_plain(tensor), extra, note)
        if nbytes and self._tied(leaf, address):
            return
        self.leaves.append(leaf)

    def _parameter(self, path: str, tensor: torch.Tensor, depth: int = 0) -> None:
        self._tensor_like(path, tensor)

    def _tensor_like(self, path: str, tensor: torch.Tensor) -> None:
        """A subclass of Tensor: stored as its data with the name of its class, if data is all that it is."""
        if type(tensor) is not torch.nn.Parameter and self._sharded(path, tensor):
            return
        subclass = composite.plain_subclass(tensor)
        if subclass is None:
            self._object(path, tensor)
            return
        if type(tensor) is not torch.nn.Parameter:
            lost = [name for name in getattr(tensor, "__dict__", ()) if name not in _OF_MODULES]
            self.lossy.extend([f"{path} ({subclass}: {', '.join(lost)})"] if lost else [])
        if self._prepare is not None and not isinstance(tensor, UninitializedTensorMixin):
            if self._prepared_before(path, tensor):
                return
            tensor = self._prepared(path, tensor)
        if isinstance(tensor, UninitializedTensorMixin):
            raise SnapshotError(f"{path}: is not initialised yet, so there is nothing to save; run the module once")
        dtype = NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
            if tensor.layout is torch.strided:
                plain = tensor.as_subclass(torch.Tensor)
            else:  # which has no storage that a view could share
                plain = tensor.detach().requires_grad_(tensor.requires_grad)
            self._composite(path, plain, subclass)
            return
        self._described(path, tensor, dtype, subclass)

    def _sharded(self, path: str, value: Any) -> bool:
        """Whether a value is a part of a tensor that other ranks hold the rest of; if so, it is described."""
        shards = sharded(path, value)
        if shards is None:
            return False
        if self._prepare is not None:
            shards = self._prepared_shards(path, value, shards)
        self.entries[path] = None
        self.shards[path] = shards
        places = tuple(
            (piece.box, piece.tensor.data_ptr(), piece.tensor.stride(), piece.tensor.device)
            for piece in shards.pieces
            if piece.tensor.numel()
        )
        if places and not shards.open:
            owner = self._boxes.setdefault((shards.kind, shards.layout, shards.dtype, shards.shape, places), path)
            if owner != path:
                self.ties[path] = owner
        return True

    def _prepared_shards(self, path: str, value: Any, shards: Shards) -> Shards:
        if isinstance(value, Sharded):
            tensor = self._prepared(path, value.tensor)
            return sharded(path, Sharded(tensor, value.global_shape, value.offsets, value.replica)) or shards
        if not isinstance(value, torch.Tensor):
            return shards
        prepared = sharded(path, self._prepared(path, value))
        if prepared is None:
            raise SnapshotError(f"{path}: is sharded, and _custom_tensor_prepare_func made a plain tensor of it")
        return prepared

    def _prepared_before(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether the very same tensor was prepared under another name; if so, this is a tie of that."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
            return False
        others = self._prepared_of.setdefault(tensor.data_ptr(), [])
        for twin, owner in others:
            if composite.seen_alike(twin, tensor):
                self.entries[path] = None
                self.ties[path] = self.ties.get(owner, owner)
                return True
        others.append((tensor, path))
        return False

    def _prepared(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        assert self._prepare is not None
        made = self._prepare(path, tensor, False)
        if not isinstance(made, torch.Tensor) or made.shape != tensor.shape:
            raise ValueError(
                f"{path}: the prepare function returned "
                f"{list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__} for a tensor of shape "
                f"{list(tensor.shape)}; it may change the dtype, not the shape"
            )
        return made

    def _composite(self, path: str, tensor: torch.Tensor, subclass: str | None = None) -> None:
        if tensor.is_meta:
            raise SnapshotError(f"{path}: is on the meta device, so it has no data to save")
        if tensor.is_quantized and tensor.numel():
            _refuse_freed(path, tensor)
        taken = composite.take_apart(tensor)
        if taken is None:
            self._object(path, tensor)
            return
        kind, parts, params = taken
        params |= {"requires_grad": True} if tensor.requires_grad else {}
        params |= {"subclass": subclass} if subclass else {}
        entry = e.TensorPartsEntry(kind, {}, params)
        self.entries[path] = entry
        for name, part in parts.items():
            self._part(path, name, part, entry.parts, f"{kind} {params}")

    def _part(
        self,
        path: str,
        name: str,
        tensor: torch.Tensor,
        into: dict[str, e.TensorEntry | e.ChunkedTensorEntry],
        note: str,
    ) -> None:
        tensor = tensor.detach()
        if tensor.numel():
            _refuse_freed(path, tensor)
        dtype = NAMES[tensor.dtype]

        def wrap(_: str, stored: e.TensorEntry | e.ChunkedTensorEntry) -> None:
            into[name] = stored

        shape, nbytes, plain = tuple(tensor.shape), tensor.nbytes, is_plain(tensor)
        address = tensor.data_ptr() if nbytes else 0
        below = f"{path}%[{name}]"
        self.leaves.append(Leaf(below, tensor, dtype, shape, nbytes, address, plain, None, note, wrap, splits=False))

    def _array(self, path: str, value: np.ndarray[Any, Any] | np.generic, depth: int) -> None:
        described = arrays.describe(value)
        if described is None:
            self._object(path, value)
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

    def _sequence(self, path: str, value: Any, depth: int) -> None:
        self._deeper(path, depth)
        if type(value) is deque:
            self.entries[path] = e.DequeEntry(len(value), maxlen=value.maxlen)
        else:
            self.entries[path] = _SEQUENCES[type(value)](len(value))
        visitors, excluded = _VISITORS, self._excluded
        for i, child in enumerate(value):
            if excluded is not None and excluded(f"{path}/{i}"):
                raise ValueError(f"exclude: {path}/{i} cannot be left out, since it is an element of a sequence")
            visitors.get(type(child), Flattened._visit)(self, f"{path}/{i}", child, depth + 1)

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        self._deeper(path, depth)
        make = dict_maker(value)
        keys = list(value)
        strings = all(type(key) is str for key in keys)
        recorded = keys if strings and all(map(str.isascii, keys)) else [encode_key(key) for key in keys]
        if make is None or None in recorded:
            self._object(path, value)
            return
        tagged = () if strings else tagged_keys(keys)
        self.entries[path] = entry = make(recorded, list(tagged) or None)
        if self._excluded is not None:
            self._some_of(path, entry, value, depth, self._excluded)
            return
        prefix = path + "/"
        visitors = _VISITORS
        if strings:
            self._named(prefix, value, depth)
            return
        for i, (key, child) in enumerate(zip(recorded, value.values(), strict=True)):
            below = prefix + component_of(key, i in tagged)
            visitors.get(type(child), Flattened._visit)(self, below, child, depth + 1)

    def _some_of(
        self, path: str, entry: e.DictEntry, value: dict[Any, Any], depth: int, excluded: Callable[[str], bool]
    ) -> None:
        """The values of a dict, less those that are left out."""
        gone = []
        for text, child in zip(entry.components(), value.values(), strict=True):
            below = f"{path}/{text}"
            gone.append(excluded(below))
            if gone[-1]:
                self._leave_out(below, child)
            else:
                _VISITORS.get(type(child), Flattened._visit)(self, below, child, depth + 1)
        self.entries[path] = entry.without(gone)

    def _named(self, prefix: str, value: dict[str, Any], depth: int) -> None:
        """The values of a dict whose keys are all strings. What `_tensor` does for a plain tensor stands here once
        more, without calls: models have tens of thousands of them, and this loop is what a take of small tensors
        costs."""
        tensor_type, strided, prepare = torch.Tensor, torch.strided, self._prepare
        entries, leaves, seen, shapes, visitors = self.entries, self.leaves, self.seen, self._shapes, _VISITORS
        for key, child in value.items():
            path = prefix + (key if key.isascii() and "/" not in key and "%" not in key else component(key))
            if type(child) is not tensor_type or prepare is not None:
                visitors.get(type(child), Flattened._visit)(self, path, child, depth + 1)
                continue
            dtype = _SIMPLE.get(child.dtype)
            if (
                dtype is None
                or not child.is_cpu
                or child.layout is not strided
                or child.is_nested
                or child.requires_grad
                or child.is_neg()
                or not child.is_contiguous()
                or not (nbytes := child.nbytes)
                or (address := child.data_ptr()) in seen
                or (address < LOW and composite.is_freed(child))
            ):
                self._tensor(path, child)
                continue
            size = child.shape
            shape = shapes.get(size)
            if shape is None:
                shape = shapes[size] = tuple(size)
            entries[path] = None
            seen[address] = leaf = Leaf(path, child, dtype, shape, nbytes, address, True)
            leaves.append(leaf)

    def _deeper(self, path: str, depth: int) -> None:
        if depth > DEEPEST:
            raise SnapshotError(f"{path[:200]}...: nested more than {DEEPEST} deep, or holds itself")

    def _scalar(self, path: str, value: Any, depth: int) -> None:
        entry = scalar_entry(value)
        if entry is not None:
            self.entries[path] = entry
            return
        text = type(value) is str
        data = value.encode("utf-8", "surrogatepass") if text else bytes(value)  # a bytearray may change
        self._blob(path, data, "utf8" if text else type(value).__name__, type(value))

    def _blob(self, path: str, data: bytes, serializer: str, kind: type) -> None:
        self.entries[path] = None
        self.blobs.append(Blob(path, data, serializer, _name(kind)))

    def _object(self, path: str, value: Any) -> None:
        """What nothing else can hold is pickled, and named in a warning."""
        if self._sharded(path, value):
            return
        held = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(value, held)
        except Exception as error:
            raise SnapshotError(
                f"{path}: a {_name(type(value))} can be stored in no way, not even pickled: {error}"
            ) from error
        self.pickled.append(f"{path} ({_name(type(value))})")
        self._blob(path, held.getvalue(), "torch_save", type(value))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_freed(path: str, tensor: torch.Tensor) -> None:
    if composite.is_freed(tensor):
        raise SnapshotError(f"{path}: its memory was freed, so it has no data to save")


_SEQUENCES: dict[type, Callable[[int], Entry]] = {
    list: e.ListEntry,
    tuple: e.TupleEntry,
    set: e.SetEntry,
    frozenset: e.FrozensetEntry,
}


_Visitor = Callable[[Flattened, str, Any, int], None]
_VISITORS: dict[type, _Visitor] = {
    torch.Tensor: Flattened._tensor,
    torch.nn.Parameter: Flattened._parameter,
    np.ndarray: Flattened._array,
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), Flattened._dict),
    **dict.fromkeys((list, tuple, set, frozenset, deque), Flattened._sequence),
    **dict.fromkeys(
        (int, str, bool, bytes, bytearray, float, complex, type(None), torch.dtype, torch.device, torch.Size),
        Flattened._scalar,
    ),
}
