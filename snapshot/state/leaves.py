"""Leaves of a flattened state: tensors and bytes to store, under logical paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from snapshot.manifest import entries as e
from snapshot.tensors.addresses import is_plain
from snapshot.tensors.geometry import Box

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
