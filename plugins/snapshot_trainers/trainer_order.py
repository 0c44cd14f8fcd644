"""The data order of Hugging Face's Trainer: an epoch that was interrupted goes on, also on another number of ranks.

The Trainer finds its place by the number of steps, and lets `skip_first_batches` leave out as many batches. With other
ranks, or another batch size, a step has other samples. So the place is that of the loader (`data_order.py`), and the
numbers that the Trainer counts with follow from what is left.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from snapshot.decoding import decode_json_of_python
from snapshot.errors import RestoreError, SnapshotError
from snapshot.events import log
from snapshot.interop.weight_digests import STATE
from snapshot_trainers.data_order import is_tracked
from snapshot_trainers.prepared import is_prepared
from snapshot_trainers.torchdata import LoaderState
from snapshot_trainers.trainer_folders import snapshot_in

_RUN_EPOCH = frozenset(
    (
        "epoch",
        "epochs_trained",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "resume_from_checkpoint",
        "steps_trained_in_current_epoch",
    )
)


class _Place(NamedTuple):
    """Where training goes on: the epoch, and in it the steps (batches of one rank) and the updates."""

    epoch: int
    steps_done: int
    steps: int
    updates: int


class TrainerOrder:
    """The part of `SnapshotTrainerMixin` that saves and restores the place in the epoch."""

    args: Any
    _load_rng_state: Any
    _loader: LoaderState | None = None
    _resumes_from: str | None = None
    """The checkpoint that training resumes from."""
    _place: _Place | None = None
    """Where it goes on, until that epoch runs."""
    _has_random_numbers = False
    """True if the random numbers were restored before the first batch, and not after it."""

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any, **options: Any) -> Any:
        """Return the numbers of epochs and steps that the Trainer counts with, for what is left of the run."""
        values = super().set_initial_training_values(args, dataloader, *others, **options)  # type: ignore[misc]
        self._place = self._loader = None
        if not self._keeps_order(dataloader):
            log.warning(
                "the place in the epoch is not saved, so an interrupted epoch will lose and repeat samples: the "
                "training loader must be one that accelerate prepared, got %s",
                type(dataloader).__name__,
            )
            return values
        self._loader = loader = LoaderState(dataloader)
        if self._resumes_from is None or args.ignore_data_skip or not _restore(loader, self._resumes_from):
            return values
        epochs, updates, examples, samples, batch, steps, most = values
        order, every = loader.order, args.gradient_accumulation_steps
        left = order.count_left()
        if left == 0:  # it was saved after the last batch: that epoch ends here
            for _ in dataloader:
                pass
            left = steps
        epoch = dataloader.iteration
        if left is None:  # an iterable dataset: its epochs have as many steps as it has batches
            self._place = _Place(epoch, order.batches, steps, updates)
            return values
        updates_left = math.ceil(left / every)
        done = updates - updates_left
        self._place = _Place(epoch, done * every, done * every + left, updates)
        with open(os.path.join(self._resumes_from, STATE), "rb") as file:
            step = decode_json_of_python(file.read(), STATE)["global_step"]
        if args.max_steps > 0:
            epochs = epoch + 1 + max(math.ceil((most - step - updates_left) / updates), 0)
        elif (last := step + most - (epoch * updates + done)) != most:
            log.warning(
                "the ranks or the batch size changed: %d steps are left, so training and its scheduler end at step %d",
                last - step,
                last,
            )
            most = last
        return epochs, updates, examples, samples, batch, steps, most

    def _keeps_order(self, dataloader: Any) -> bool:
        run = set(inspect.signature(super()._run_epoch).parameters) if hasattr(super(), "_run_epoch") else set()  # type: ignore[misc]
        several = getattr(self, "get_sp_size", lambda: 1)() > 1  # ranks that share a sequence, by another loader
        return is_prepared(dataloader) and hasattr(dataloader, "iteration") and run >= _RUN_EPOCH and not several

    def _init_training_state(self, *args: Any, **options: Any) -> Any:
        found = super()._init_training_state(*args, **options)  # type: ignore[misc]
        return found if self._place is None else (self._place.epoch, self._place.steps_done)

    def _run_epoch(self, **options: Any) -> Any:
        place, self._place = self._place, None
        first = options["resume_from_checkpoint"] is not None and options["epoch"] == options["epochs_trained"]
        if place is None and first and options["steps_trained_in_current_epoch"]:
            # The checkpoint has no place, and the Trainer skips batches in another loader. So those that are saved in
            # this epoch have none, either.
            loader, self._loader = self._loader, None
            try:
                return super()._run_epoch(**options)  # type: ignore[misc]
            finally:
                self._loader = loader
        if place is None or place.epoch != options["epoch"]:
            return super()._run_epoch(**options)  # type: ignore[misc]
        # The Trainer restores them after the first batches, for loaders that draw a new order.
        self._load_rng_state(options["resume_from_checkpoint"])
        self._has_random_numbers = True
        with _loader_goes_on_by_itself():
            return super()._run_epoch(  # type: ignore[misc]
                **{**options, "steps_in_epoch": place.steps, "num_update_steps_per_epoch": place.updates}
            )


@contextmanager
def _loader_goes_on_by_itself() -> Iterator[None]:
    """Let the Trainer skip no batches of a loader that goes on after a restore."""
    module: Any = sys.modules["transformers.trainer"]
    skip = module.skip_first_batches

    def keep(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if is_tracked(dataloader) else skip(dataloader, num_batches)

    module.skip_first_batches = keep
    try:
        yield
    finally:
        module.skip_first_batches = skip


def _restore(loader: LoaderState, checkpoint: str) -> bool:
    """Restore the place in the epoch. Return False if the checkpoint has none."""
    snapshot = snapshot_in(checkpoint)
    if snapshot is None or "0/loader" not in snapshot.get_manifest():
        return False
    try:
        snapshot.restore({"loader": loader}, unused="ignore")
    except (ValueError, RestoreError) as error:
        raise SnapshotError(
            f"{checkpoint}: the epoch cannot go on: {error}; to begin it again, pass ignore_data_skip=True"
        ) from error
    return True
