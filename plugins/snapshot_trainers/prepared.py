"""Loaders that accelerate has prepared: what they add to the loader of torch that they hold.

A prepared loader reads a batch ahead of its loop, numbers the epochs itself (`iteration`), and shares the batches out:
each rank reads its own (`BatchSamplerShard`), or rank 0 reads all and sends them (`DataLoaderDispatcher`). Nothing of
accelerate is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

_MODULE = "accelerate.data_loader"


def _is_a(value: Any, name: str) -> bool:
    return any(each.__module__ == _MODULE and each.__name__ == name for each in type(value).__mro__)


def is_prepared(loader: Any) -> bool:
    """Return True for a loader that accelerate has prepared."""
    return _is_a(loader, "DataLoaderAdapter")


def is_dispatched(loader: Any) -> bool:
    """Return True if rank 0 reads all batches, and sends the others theirs."""
    return _is_a(loader, "DataLoaderDispatcher")


def is_shard(sampler: Any) -> bool:
    """Return True for a batch sampler that gives the batches of one rank, out of those of all."""
    return _is_a(sampler, "BatchSamplerShard")


def skips(loader: Any, inner: Any) -> bool:
    """Return True for a loader that `skip_first_batches` made."""
    return bool(getattr(loader, "skip_batches", 0)) or _is_a(inner, "SkipBatchSampler")


def place_of(loader: Any, inner: Any) -> tuple[int, int] | None:
    """Return the number of the replica that a prepared loader reads for, and of all; None if it has no share."""
    sharing = inner if is_shard(inner) else loader.dataset
    if is_shard(inner) or _is_a(sharing, "IterableDatasetShard"):
        return sharing.process_index, sharing.num_processes
    if is_dispatched(loader):
        return loader.state.process_index, loader.state.num_processes
    return None


def batches_in_round(loader: Any, inner: Any) -> int:
    """Return how many batches of all make one batch on each rank."""
    if is_shard(inner):
        return 1 if inner.split_batches else int(inner.num_processes)
    if is_dispatched(loader):
        return 1 if loader.split_batches else int(loader.state.num_processes)
    return 1


def is_plain(batch_sampler: Any) -> bool:
    """Return True if a batch sampler cuts the samples of its sampler into batches, as torch's and torchdata's do."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (
        isinstance(batch_sampler, BatchSampler) and kind.__module__.startswith("torchdata.")
    )


class Once:
    """What is left of a sampler or a batch sampler, to be read once. All but its order is that of `like`."""

    def __init__(self, left: Iterator[Any], like: Any) -> None:
        self._left = left
        self._like = like

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


def share(shard: Any, left: Iterator[Any], batch_size: int | None, kind: Any) -> Iterator[Any]:
    """Return the batches of one rank out of what is left: samples, if there is a batch size, or batches.

    `kind`: the class of the shard, which may be tracked.
    """
    whole = shard.batch_sampler
    alone = object.__new__(kind)
    alone.__dict__.update(vars(shard))
    if batch_size is None:
        alone.batch_sampler = Once(left, whole)
    else:
        alone.batch_sampler = BatchSampler(Once(left, whole.sampler), batch_size, whole.drop_last)
        alone.batch_size = batch_size
    return iter(alone)


def count_own(samples: int, batch_size: int, shard: Any) -> int:
    """Return how many of all samples one rank reads, but those that even out the last batches."""
    parts = shard.num_processes
    whole = batch_size if shard.split_batches else batch_size * parts
    own = whole // parts
    full, left = divmod(samples, whole)
    return int(full * own + min(max(left - shard.process_index * own, 0), own))
