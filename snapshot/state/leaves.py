"""Leaves of a flattened state: tensors and bytes to store, under logical paths."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from snapshot.errors import SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.values import Entry
from snapshot.state.sharded import Shards
from snapshot.tensors import composite
from snapshot.tensors.geometry import Box
from snapshot.tensors.memory import NAMES, is_plain

# The entries of dicts, by their type, with the details that restore each exactly.


def find_dict_maker(value: dict[Any, Any]) -> Callable[[list[Any], list[int] | None], e.DictEntry] | None:
    """Return a function that creates the entry of this type of dict; None if a factory cannot be recorded."""
    kind = type(value)
    if kind is dict:
        return e.DictEntry
    if kind is Counter:
        return e.CounterEntry
    if kind is defaultdict:
        factory = e.find_factory_name(value.default_factory)  # type: ignore[attr-defined]
        return None if factory is None else lambda keys, tagged: e.DefaultdictEntry(keys, tagged, factory=factory)
    versions = read_module_versions(getattr(value, "_metadata", None))
    return lambda keys, tagged: e.OrderedDictEntry(keys, tagged, module_versions=versions)


def read_module_versions(metadata: Any) -> dict[str, dict[str, Any]] | None:
    """Return a module's versions as plain values, without entries of hooks that JSON cannot represent."""
    if not isinstance(metadata, dict):
        return None
    plain = (str, int, float, bool, type(None))
    return {
        str(module): {str(name): value for name, value in versions.items() if isinstance(value, plain)}
        for module, versions in metadata.items()
        if isinstance(versions, dict)
    }


# Leaves of a flattened state: tensors and bytes to store, under logical paths.

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
