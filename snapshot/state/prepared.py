"""The results of a prepare function, which may change a tensor's dtype but not its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from snapshot.errors import SnapshotError
from snapshot.state.sharded import Shards
from snapshot.tensors import composite
from snapshot.tensors.dtypes import NAMES

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
