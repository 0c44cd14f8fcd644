"""Operations on the tensors of checkpoints, apart from any application: load them, merge them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from snapshot.distributed.operation import operation
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.names import Rename
from snapshot.progress import ProgressArgument
from snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from snapshot.transform.load import Parts


def load(
    source: str | os.PathLike[str] | Snapshot,
    *,
    device: torch.device | str | int = "cpu",
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    map: TensorMap | None = None,
    dtype: torch.dtype | None = None,
    parts: Parts | None = None,
    verify: bool = True,
    memory_budget_bytes: int | None = None,
    progress: ProgressArgument = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a checkpoint of any format into new memory of a device.

    The names are those of an export to safetensors: the parts of a path are joined with dots, without the first one
    if all entries share it. Everything that is not a dense tensor is left out. Tied weights share memory. Gradients
    are not required, and parameters are plain tensors.

    Args:
        source: The path of a snapshot, a safetensors file, a folder as Hugging Face has it, or anything else that
            `Snapshot` opens. Or a `Snapshot`, with the storage options, the key and `allow_pickle` that it was given.
        device: The device of the tensors. On `"meta"` they have no data, and none is read.
        select: Globs over `<key>/<logical path>` to load; all by default.
        exclude: Globs to leave out.
        rename: Names there -> names here, as paths: a dict, or a function.
        map: Recipes that turn the tensors into others: other names, splits, stacks and transpositions. All other
            arguments refer to the new names.
        dtype: Cast floating-point tensors to this dtype.
        parts: The part of each tensor to load; the whole tensor by default. Only the bytes of the parts are read. A
            dict of names or globs with slices and ints, as they index a tensor. Or a function of a name and a shape
            that returns such slices, or None for the whole tensor. Or a `DeviceMesh` with a dict of names or globs and
            placements: each rank reads its own part of a DTensor. Tensors without a placement are replicated. Globs
            match names, and the first match counts.
        verify: Verify the digests of the bytes that are read, and the checksums of other libraries' archives.
        memory_budget_bytes: Host memory for reads that cannot go to their destination directly. The default is 64 MiB
            for files, and 256 MiB for other storages or with a GPU.
        progress: True for a progress bar, or a function that is called with `Progress`.

    Raises:
        SnapshotNotFoundError: No checkpoint exists at the URL.
        RestoreError: A selection, a name or the parts do not fit; no data was read.
        CorruptSnapshotError: Bytes that were read do not match their digests.

    >>> import torch
    >>> import snapshot
    >>> taken = snapshot.Snapshot.take("memory://docs/load", {"model": snapshot.StateDict(weight=torch.arange(6.0))})
    >>> snapshot.load("memory://docs/load", parts={"weight": slice(2, 4)})
    {'weight': tensor([2., 3.])}
    """
    from snapshot.transform.load import load_tensors
    from snapshot.transform.target import Selection  # training jobs do not pay for these imports

    opened, where = Snapshot.of(source), torch.device(device)
    choice = Selection(select, exclude, rename, dtype, verify, opened.allow_pickle, map)
    with operation("load", opened.location.url, budget=memory_budget_bytes, progress=progress) as op:
        return load_tensors(op, opened.location, choice, parts, where)
