"""What flattening gives: tensors and bytes to be stored, under logical paths."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from snapshot.manifest import entries as e

Wrap = Callable[[str, e.TensorEntry | e.ChunkedTensorEntry], None]


class Leaf(msgspec.Struct, gc=False):
    """A tensor to be stored: plain, strided, of any device; its bytes are written in C order."""

    path: str
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    plain: bool = False
    """Whether its own memory is what will be written: contiguous, on the host, and neither conjugate nor negative."""
    wrap: Wrap | None = None
    """Called with the stored range's entry, where that is not itself the manifest's entry for `path`."""


class Blob(msgspec.Struct, gc=False):
    """Bytes to be stored as they are."""

    path: str
    data: bytes
    serializer: str
    obj_type: str
