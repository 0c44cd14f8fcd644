"""The places of Lightning's training loaders in their epochs, which `SnapshotCallback` saves and restores.

Lightning makes the loaders of a `fit`, gives them samplers for several ranks, and begins to read them, all before the
hook `on_train_start`. In between it calls the strategy's `process_dataloader` for each of them, so they are tracked
there. What is tracked is a copy: the application may read its own loader meanwhile, as one for validation, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot_trainers.data_order import is_tracked, order_of
from snapshot_trainers.sampler_states import walk_samplers
from snapshot_trainers.torchdata import LoaderState

_CURE = "or pass data_order=False to SnapshotCallback, and the epoch begins again in another order"
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"
State = Mapping[str, Any]


class FitLoaders:
    """The places of the training loaders of one `fit`.

    Args:
        trainer: Lightning's trainer, before it makes its loaders.
        read: Returns this rank's places in the snapshot that the trainer resumes from, or None.
    """

    def __init__(self, trainer: Any, read: Callable[[], State | None]) -> None:
        self._trainer = trainer
        self._read: Callable[[], State | None] | None = read
        self._saved: State | None = None
        self._number = 0
        self._goes_on: list[bool] = []
        """For each loader, whether it goes on within the epoch."""
        self._strategy = trainer.strategy
        self._process = self._strategy.process_dataloader
        self._strategy.process_dataloader = self._track

    def detach(self) -> None:
        """Leave the loaders that the trainer makes from now on alone."""
        if vars(self._strategy).get("process_dataloader") == self._track:
            del self._strategy.process_dataloader

    def begin(self) -> None:
        """Note that the trainer has made its loaders. Those that it makes later begin with an epoch."""
        if self._goes_on and all(self._goes_on):
            warnings.filterwarnings("ignore", _NOT_RESUMABLE)  # Lightning does not know that they do
        self._read = self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the places of this rank's loaders."""
        loop = self._trainer.fit_loop
        ended = bool(loop.epoch_loop.batch_progress.is_last_batch)
        ahead = bool(getattr(loop._data_fetcher, "batches", None))  # noqa: SLF001 - fetched, and not trained on yet
        states = [_place_of(each, ended=ended, ahead=ahead) for each in loop._combined_loader.flattened]  # noqa: SLF001
        epoch = loop.epoch_progress.current.processed  # what samplers are told
        return {"ranks": self._trainer.world_size, "epoch": epoch, "ended": ended, "loaders": states}

    def _track(self, loader: Any) -> Any:
        """Track a loader if it is one for training, and let it go on from its place."""
        loader = self._process(loader)
        if not self._trainer.training:
            return loader
        if self._read is not None and not self._number:
            self._saved = self._read()
        number, self._number = self._number, self._number + 1
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return loader  # Lightning saves its state
        reason = _why_not(loader)
        if reason is None and not is_tracked(loader):
            loader = _copied(loader)
            order_of(loader)
        if self._saved is not None:
            self._goes_on.append(self._resume(number, loader, reason, self._saved))
        return loader

    def _resume(self, number: int, loader: Any, reason: str | None, saved: State) -> bool:
        """Let a loader go on from its place. Return False if it can only begin an epoch, and log why."""
        ended, world = saved["ended"], self._trainer.world_size
        held = saved["loaders"][number] if number < len(saved["loaders"]) else None
        if saved["ranks"] != world:
            reason = f"the number of ranks was {saved['ranks']}, and is {world} now"
        elif reason is None and held is None:
            reason = "the snapshot does not have its place"
        if reason is None:
            assert held is not None
            try:
                if not ended and held["batches"] != _length_of(loader):
                    raise ValueError(f"an epoch had {held['batches']} batches, and now has {_length_of(loader)}")
                LoaderState(loader).load_state_dict(held["state"])
            except ValueError as error:
                if not ended:
                    raise SnapshotError(
                        f"training loader {number} cannot go on within the epoch: {error}; resume with the loader that "
                        f"was saved, {_CURE}"
                    ) from error
                reason = str(error)
        if ended and isinstance(loader, DataLoader):
            for each in walk_samplers(loader.batch_sampler or loader.sampler):
                if callable(getattr(each, "set_epoch", None)):
                    each.set_epoch(saved["epoch"] + 1)  # workers begin before Lightning tells it
        if reason is not None and not ended and self._trainer.is_global_zero:
            log.warning(
                "training loader %d begins the epoch again, so samples may be trained on twice or not at all: %s",
                number,
                reason,
            )
        return reason is None and not ended


def _why_not(loader: Any) -> str | None:
    """Return why the place of a loader is not kept; None if it is."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is not a DataLoader of torch"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is iterable; give the loader state_dict() and load_state_dict(), as StatefulDataLoader has"
    if not getattr(loader, "in_order", True):
        return "in_order=False gives batches in an order that nothing can repeat"
    return None


def _place_of(loader: Any, *, ended: bool, ahead: bool) -> dict[str, Any] | None:
    """Return the state of a loader; None if its place is not known."""
    if not is_tracked(loader) or (ahead and not ended):
        return None
    if ended:
        order_of(loader).end_epoch()  # Lightning knows the number of batches, and does not ask for one more
    return {"batches": _length_of(loader), "state": LoaderState(loader).state_dict()}


def _copied(loader: Any) -> Any:
    """Return a loader with the same dataset and samplers."""
    made = object.__new__(type(loader))
    made.__dict__.update(loader.__dict__)
    return made


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
