"""Operations on the tensors of checkpoints, apart from any application: load them, merge them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from snapshot.events import emit
from snapshot.plan.renaming import Rename
from snapshot.progress import Meter, ProgressArgument
from snapshot.runtime.loop import refuse_on_loop, run
from snapshot.runtime.session import Session
from snapshot.url import URL

if TYPE_CHECKING:
    from snapshot.verbs.wanted_parts import LoadPlan


def load(
    url: str | os.PathLike[str],
    *,
    device: torch.device | str | int = "cpu",
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    plan: LoadPlan | None = None,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    memory_budget_bytes: int | None = None,
    allow_pickle: bool = False,
    progress: ProgressArgument = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a checkpoint of any format into new memory of a device.

    The names are those of an export to safetensors: the parts of a path are joined with dots, without the first one
    if all entries share it. Everything that is not a dense tensor is left out. Tied weights share memory. Gradients
    are not required, and parameters are plain tensors.

    Args:
        url: A snapshot, a safetensors file, a folder as Hugging Face has it, or anything else that `Snapshot` opens.
        device: The device of the tensors. On `"meta"` they have no data, and none is read.
        select: Globs over `<key>/<logical path>` to load; all by default.
        exclude: Globs to leave out.
        rename: Names there -> names here, as paths: a dict, or a function.
        dtype: Cast floating-point tensors to this dtype.
        plan: The part of each tensor to load; the whole tensor by default. Only the bytes of the parts are read. A
            dict of names or globs with slices and ints, as they index a tensor. Or a function of a name and a shape
            that returns such slices, or None for the whole tensor. Or a `DeviceMesh` with a dict of names or globs and
            placements: each rank reads its own part of a DTensor. Tensors without a placement are replicated. Globs
            match names, and the first match counts.
        verify: Verify the digests of the bytes that are read, and the checksums of other libraries' archives.
        storage_options: Options for the storage plugin.
        memory_budget_bytes: Host memory for reads that cannot go to their destination directly. The default is 64 MiB
            for files and 256 MiB for other storages.
        allow_pickle: Also load tensors that only a pickle can create.
        progress: True for a progress bar, or a function that is called with `Progress`.

    Raises:
        SnapshotNotFoundError: No checkpoint exists at the URL.
        RestoreError: A selection, a name or the plan does not fit; no data was read.
        CorruptSnapshotError: Bytes that were read do not match their digests.

    >>> import torch
    >>> import snapshot
    >>> taken = snapshot.Snapshot.take("memory://docs/load", {"model": snapshot.StateDict(weight=torch.arange(6.0))})
    >>> snapshot.load("memory://docs/load", plan={"weight": slice(2, 4)})
    {'weight': tensor([2., 3.])}
    """
    from snapshot.verbs.to_snapshot import Selection  # training jobs do not pay for these imports
    from snapshot.verbs.to_tensors import load_tensors

    refuse_on_loop()
    began = time.perf_counter()
    choice = Selection(select, exclude, rename, dtype, verify, allow_pickle)
    parsed, where = URL.parse(os.fspath(url)), torch.device(device)
    session = Session(parsed, storage_options, budget=memory_budget_bytes)
    meter = Meter("load", progress)
    try:
        loaded = load_tensors(session, choice, plan, where, meter)
    except BaseException as error:
        emit("failed", "load", str(parsed), error=error)
        raise
    finally:
        run(session.close())
        meter.close()
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    emit("loaded", "load", str(parsed), bytes=nbytes, seconds=round(time.perf_counter() - began, 3))
    return loaded
