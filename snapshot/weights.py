"""Operations on the tensors of checkpoints, apart from any application: load them, merge them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from snapshot.distributed.operation import operation
from snapshot.maps.tensor_map import TensorMap
from snapshot.options import moved_names
from snapshot.plan.names import Rename
from snapshot.progress import ProgressArgument
from snapshot.reports import ConvertReport
from snapshot.snapshot import TO_TARGET, Snapshot

if TYPE_CHECKING:
    from snapshot.transform.load import Parts
    from snapshot.transform.target import Target


SOURCE = "Snapshot(path, storage_options=..., allow_pickle=..., key=...) as the source"


@moved_names({"url": "source", "plan": "parts=", **dict.fromkeys(("storage_options", "allow_pickle", "key"), SOURCE)})
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


@moved_names(
    {
        **TO_TARGET,
        **dict.fromkeys(("source_options", "allow_pickle", "key"), SOURCE),
        **dict.fromkeys(("lora", "map"), "it to merge_lora(base, adapter, target)"),
    },
    2,
    "Target(url, to) as the target",
)
def merge(
    sources: Sequence[str | os.PathLike[str] | Snapshot],
    target: str | os.PathLike[str] | Target,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    others: str = "equal",
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    verify: bool = True,
    memory_budget_bytes: int | None = None,
    progress: ProgressArgument = None,
    ranks: bool = False,
) -> ConvertReport:
    """Merge checkpoints into one, within the memory budget: their average, a weighted sum, or a moving average.

    The sources may have different formats, storages, splits and shards. The result has the structure of the first
    one, with its values that are not tensors. Its tensors must exist in every source, with the same shapes. Paths
    match, and so do names that are joined with dots, with or without the first component. Without `select` and
    `exclude`, no source may have more tensors than the first one.

    Floating-point tensors are added in float32, or float64 if a source has float64, in the order of the sources. Each
    operation rounds once. The result is rounded to the dtype of the first source. NaN and infinity behave as in
    arithmetic on tensors. Complex tensors are treated alike.

    Args:
        sources: The checkpoints: paths of anything that `Snapshot` opens, or `Snapshot` objects. For `ema`, in order of
            time. Values that are not tensors are read from the first one, whose `allow_pickle` counts.
        target: The destination: a path whose suffix tells the format, or a `Target` with its format and options.
        weights: A finite factor for each source. They are used as given. A warning is logged unless their sum is 1.
            The default is the average: the sum, divided by the number of sources.
        ema: The decay of an exponential moving average: `average = ema * average + (1 - ema) * next`, beginning with
            the first source.
        others: `"equal"`: integer, bool, sparse and quantised tensors must be equal in all sources. `"first"`: those of
            the first source are kept, and the report lists the ones that differ.
        select: Globs over `<key>/<logical path>` of the first source to merge; all by default.
        exclude: Globs to leave out.
        dtype: Cast floating-point tensors of the result to this dtype, instead of the first source's dtype.
        verify: Verify every digest, and the checksums of other libraries' formats.
        memory_budget_bytes: Host memory: a quarter for reading, a quarter for mixing, and half for writing.
        progress: True for a progress bar, or a function that is called with `Progress`.
        ranks: Share the work with all ranks of the first source's `pg`, or of the default process group; every rank
            calls. By default this process works alone, even if several ranks run.

    Raises:
        RestoreError: The sources do not fit. `mismatches` lists every reason; nothing was written.
        SnapshotExistsError: The destination exists; nothing was written.
        CorruptSnapshotError: A source is damaged; nothing was committed.
        UnsupportedFormatError: The format cannot hold a tensor; nothing was written.

    >>> import torch
    >>> import snapshot
    >>> for number in (1, 2):
    ...     state = snapshot.StateDict(weight=torch.full((3,), float(number)))
    ...     taken = snapshot.Snapshot.take(f"memory://docs/run-{number}", {"model": state})
    >>> snapshot.merge(["memory://docs/run-1", "memory://docs/run-2"], "memory://docs/soup").tensors
    1
    >>> snapshot.load("memory://docs/soup")
    {'weight': tensor([1.5000, 1.5000, 1.5000])}
    """
    from snapshot_merge.merge import Mix, merge_checkpoints
    from snapshot.transform.target import Selection, Target  # training jobs do not pay for these imports

    paths = [] if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable) else list(sources)
    if len(paths) < 2 or not all(isinstance(each, (str, os.PathLike, Snapshot)) for each in paths):
        raise ValueError(f"sources must be paths of at least 2 checkpoints, or Snapshot objects, got {sources!r}")
    if weights is not None and ema is not None:
        raise ValueError("weights and ema exclude each other: pass one of them")
    count = len(paths)
    mix = Mix.average(count)
    if weights is not None:
        mix = Mix.weighted(weights, count)
    elif ema is not None:
        mix = Mix.moving_average(ema, count)
    origins, made = [Snapshot.of(each) for each in paths], Target.of(target)
    choice = Selection(select, exclude, None, dtype, verify, origins[0].allow_pickle)
    url = made.place.url
    with operation("merge", url, pg=origins[0].pg, ranks=ranks, budget=memory_budget_bytes, progress=progress) as op:
        return merge_checkpoints(op, [each.location for each in origins], made, choice, mix=mix, others=others)


def merge_lora(
    base: str | os.PathLike[str] | Snapshot,
    adapter: str | os.PathLike[str] | Snapshot,
    target: str | os.PathLike[str] | Target,
    *,
    map: TensorMap | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    verify: bool = True,
    memory_budget_bytes: int | None = None,
    progress: ProgressArgument = None,
    ranks: bool = False,
) -> ConvertReport:
    """Add a LoRA of PEFT to the weights of its base model, within the memory budget.

    The result has the structure of the base model. docs/weights.md describes the arithmetic, and what is refused.

    Args:
        base: The base model: the path of anything that `Snapshot` opens, or a `Snapshot`.
        adapter: The folder of the adapter, or a `Snapshot` of it.
        target: The destination: a path whose suffix tells the format, or a `Target` with its format and options.
        map: A map for the base model, such as one that dequantises its weights. The adapter has the new names.
        select: Globs over `<key>/<logical path>` of the base model to keep; all by default.
        exclude: Globs to leave out.
        dtype: Cast floating-point tensors of the result to this dtype, instead of the base model's dtype.
        verify: Verify every digest, and the checksums of other libraries' formats.
        memory_budget_bytes: Host memory: a quarter for reading, a quarter for mixing, and half for writing.
        progress: True for a progress bar, or a function that is called with `Progress`.
        ranks: Share the work with all ranks of the base's `pg`, or of the default process group; every rank calls.

    Raises:
        RestoreError: The adapter does not fit. `mismatches` lists every reason; nothing was written.
        SnapshotExistsError: The destination exists; nothing was written.
        CorruptSnapshotError: A source is damaged; nothing was committed.
        UnsupportedFormatError: The format cannot hold a tensor, or the adapter is of a kind that cannot be merged;
            nothing was written.
    """
    from snapshot_merge.lora import add_adapter
    from snapshot.transform.target import Selection, Target  # training jobs do not pay for these imports

    model, made = Snapshot.of(base), Target.of(target)
    choice = Selection(select, exclude, None, dtype, verify, model.allow_pickle, map)
    url = made.place.url
    with operation("merge", url, pg=model.pg, ranks=ranks, budget=memory_budget_bytes, progress=progress) as op:
        return add_adapter(op, (model.location, Snapshot.of(adapter).location), made, choice)
