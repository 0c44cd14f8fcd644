"""The places of loaders that keep them themselves: iterators of Grain, and litData's `StreamingDataLoader`.

Their states are saved as they are. What is here tells which of them mean something on another number of replicas, and
hands those on. Neither library is imported.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from snapshot.events import log

ELASTIC = ("global_next_index",)
"""Keys of the state of Grain's `ElasticIterator`, which is the same on all shards."""
_MODE, _DIVIDED = "resume_mode", "elastic"
"""What litData's state has if the samples that were left were divided anew in its epoch."""
_WITH_ADDRESS = re.compile(rb" object at 0x[0-9a-f]+>")


class GrainIterator:
    """An iterator of Grain: that of its `DataLoader`, or of a dataset."""

    kind = "an iterator of Grain"

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        state = self.state_dict()
        if isinstance(state, bytes) and _WITH_ADDRESS.search(state) and getattr(iterator, "_validate_state", True):
            raise ValueError(
                "the data source or the sampler of a Grain DataLoader must have a __repr__ of its own: Grain compares "
                "it when it goes on, and the one of object has an address that differs in each process"
            )

    def state_dict(self) -> Any:
        """Return Grain's state: bytes, or a dict."""
        return self._iterator.get_state()

    def load_state_dict(self, state: Any, replicas: int) -> None:
        """Go on from a state."""
        self._iterator.set_state(state)

    def reshard(self, states: Sequence[Any], replicas: int) -> Any:
        """Return the state of one of other replicas than those that saved these states."""
        first = states[0]
        if not isinstance(first, Mapping) or tuple(first) != ELASTIC:
            raise ValueError(
                f"Grain's {type(self._iterator).__name__}: the state of each of {len(states)} shards counts in an "
                f"order of its own, which {replicas} cannot go on with; read the data with "
                "grain.experimental.ElasticIterator, whose state any number of shards can load, or restore with as "
                "many replicas, or exclude the loader to begin a new epoch"
            )
        _expect_equal([each[ELASTIC[0]] for each in states], "sample")
        return first


class LitDataLoader:
    """A `StreamingDataLoader` of litData, which redistributes the samples itself."""

    kind = "a StreamingDataLoader of litData"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._divided: int | None = None
        """The epoch in which litData has divided the samples that were left."""

    def state_dict(self) -> Any:
        """Return litData's state."""
        state = copy.deepcopy(self._loader.state_dict())  # litData goes on to change it
        if self._divided is not None and state["current_epoch"] == self._divided:
            state["dataset"][_MODE] = _DIVIDED  # which litData itself forgets if it has workers
        return state

    def load_state_dict(self, state: Any, replicas: int) -> None:
        """Go on from a state, and log how many samples litData reads again."""
        state = copy.deepcopy(state)
        saved, self._divided = state["dataset"], None
        if _is_of_one(saved):
            if self._is_changed(saved, replicas):
                self._expect_divisible(saved)
                self._divided = state["current_epoch"]
                batch = replicas * self._loader.batch_size
                again = saved["sample_in_epoch"] % batch
                if again:
                    log.warning(
                        "litData goes on at a whole batch of all ranks, so %d samples that were seen are read again; "
                        "save after a number of samples that %d divides",
                        again,
                        batch,
                    )
            elif saved.get(_MODE) == _DIVIDED:
                self._divided = state["current_epoch"]
                # The samples are divided anew from this place. litData would go on from where it divided them before,
                # and not count in its next state what was seen since.
                saved["num_samples_yielded"] = 0
        self._loader.load_state_dict(state)

    def reshard(self, states: Sequence[Any], replicas: int) -> Any:
        """Return the state of one of other replicas than those that saved these states."""
        first = states[0]
        saved = first["dataset"]
        if not _is_of_one(saved):
            raise ValueError(
                f"litData's {type(self._loader.dataset).__name__} cannot go on with {replicas} replicas instead of "
                f"{len(states)}: use one StreamingDataset, or restore with as many replicas, or exclude the loader to "
                "begin a new epoch"
            )
        self._expect_divisible(saved)
        _expect_equal([each["dataset"]["sample_in_epoch"] for each in states], "sample")
        if saved["sample_in_epoch"] < sum(end - begin for begin, end in saved["region_of_interest"]):
            return first
        # All was seen: what litData would divide is an empty epoch, and this begins the next one.
        dataset = {**saved, **self._shape(replicas), "num_samples_yielded": 0, "sample_in_epoch": 0}
        dataset.pop(_MODE, None)
        return {**first, "dataset": dataset, "num_samples_yielded": 0, "latest_worker_idx": -1}

    def _shape(self, replicas: int) -> dict[str, int]:
        """Return what litData's order of the samples depends on, beside the data."""
        loader = self._loader
        return {"world_size": replicas, "num_workers": max(1, loader.num_workers), "batch_size": loader.batch_size}

    def _is_changed(self, saved: Mapping[str, Any], replicas: int) -> bool:
        return any(saved[name] != value for name, value in self._shape(replicas).items())

    def _expect_divisible(self, saved: Mapping[str, Any]) -> None:
        """Raise unless litData can divide what is left."""
        dataset = self._loader.dataset
        if saved["drop_last"] != dataset.drop_last:
            raise ValueError(
                f"litData's drop_last was {saved['drop_last']}, now {dataset.drop_last}: its default depends on the "
                "number of ranks; pass drop_last to StreamingDataset or StreamingDataLoader, in each job"
            )
        if saved["shuffle"] and getattr(getattr(dataset, "posix_fast", None), "window_shuffle", False):
            raise ValueError(
                "litData divides whole chunks only in its window shuffle, which it uses on file systems such as NFS, "
                "and would leave out the rest of those that were begun; set LITDATA_POSIX_FAST=0 in each job, "
                "or restore with as many ranks, workers, and samples in a batch as before"
            )


Stream = GrainIterator | LitDataLoader


def stream_of(loader: Any) -> Stream | None:
    """Return the loader or iterator as one that keeps its place itself; None for those of torch and torchdata."""
    if all(hasattr(loader, name) for name in ("get_state", "set_state", "__next__")):
        return GrainIterator(loader)
    classes = [(each.__module__.partition(".")[0], each.__name__) for each in type(loader).__mro__]
    return LitDataLoader(loader) if ("litdata", "StreamingDataLoader") in classes else None


def _is_of_one(saved: Mapping[str, Any]) -> bool:
    """Return True for the state of one StreamingDataset, and not of several that are combined."""
    return "sample_in_epoch" in saved


def _expect_equal(places: Sequence[int], unit: str) -> None:
    if len(set(places)) > 1:
        raise ValueError(
            f"the replicas must be at the same {unit}, got {' and '.join(map(str, sorted(set(places))[:3]))}; save "
            "when all are at the same step"
        )
