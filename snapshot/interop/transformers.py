"""Hugging Face's Trainer with its optimizer, scheduler, scaler and random numbers in a snapshot.

The snapshot is in the Trainer's checkpoint folder. The model next to it is written by `save_pretrained`, so that
`from_pretrained` finds it. A callback cannot do this, since the Trainer saves and loads these itself. So a mixin
replaces those methods. Nothing of transformers is imported here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.snapshot import Snapshot
from snapshot.state.rng import RNGState

FOLDER = "trainer_snapshot"
"""Folder of the snapshot in a checkpoint folder."""
_HOOKS = (
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
)
_PARALLEL = ("NOT_PARALLEL", "NOT_DISTRIBUTED", "DISTRIBUTED")
_OLD = ("optimizer.pt", "optimizer.bin")


class SnapshotTrainerMixin:
    """Saves and loads the training state of a Trainer: `class MyTrainer(SnapshotTrainerMixin, Trainer)`.

    Everything else is unchanged: `save_steps`, `save_total_limit`, `train(resume_from_checkpoint=True)`.

    The mixin supports one process and `DistributedDataParallel`. State that is equal on all ranks is written once, by
    all of them together, and each rank stores its own random numbers. FSDP, DeepSpeed and TPUs have their own
    checkpoint formats, and are refused. Checkpoints that the Trainer wrote without the mixin are read by the Trainer.
    """

    snapshot_options: ClassVar[Mapping[str, Any]] = {}
    """More arguments of `Snapshot.take`: `{"durable": False}`."""

    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    args: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        _check_hooks(type(self))
        super().__init__(*args, **options)

    # In the order in which the Trainer calls them

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._refuse_what_is_not_ours()
        state = self._resumable()
        Snapshot.take(
            os.path.join(output_dir, FOLDER),
            {**state, "rng": RNGState()},
            replicated=[*state] if self.args.world_size > 1 else None,
            overwrite=True,
            **self.snapshot_options,
        )

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scaler is in the snapshot."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the state is in the snapshot, and no random numbers are drawn between the two calls."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._refuse_what_is_not_ours()
        snapshot = _snapshot_in(checkpoint)
        if snapshot is not None:
            snapshot.restore(self._resumable(), unused="ignore")
        elif any(os.path.isfile(os.path.join(checkpoint, name)) for name in _OLD):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            raise SnapshotNotFoundError(
                f"{checkpoint}: has neither {FOLDER!r} nor an optimizer's state, so training cannot resume there; "
                "to start a new training with its weights, load them with from_pretrained"
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _snapshot_in(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        snapshot = _snapshot_in(checkpoint)
        if snapshot is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            snapshot.restore({"rng": RNGState()}, unused="ignore")

    def _resumable(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        state = {"optimizer": optimizer, "scheduler": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        return state

    def _refuse_what_is_not_ours(self) -> None:
        others = {
            "FSDP": getattr(self, "is_fsdp_enabled", False),
            "DeepSpeed": getattr(self, "is_deepspeed_enabled", False),
            str(self.args.parallel_mode): getattr(self.args.parallel_mode, "name", "") not in _PARALLEL,
        }
        found = [name for name, is_there in others.items() if is_there]
        if found:
            raise SnapshotError(
                f"SnapshotTrainerMixin: training uses {found[0]}, which has its own checkpoint format; remove the "
                "mixin, or train in one process or with DistributedDataParallel"
            )


def _snapshot_in(checkpoint: str) -> Snapshot | None:
    snapshot = Snapshot(os.path.join(checkpoint, FOLDER))
    return snapshot if snapshot.exists() else None


def _check_hooks(kind: type) -> None:
    """Raise unless the mixin overrides the methods of this version's Trainer: by name, with one argument each."""
    order = kind.__mro__
    after = order[order.index(SnapshotTrainerMixin) + 1 :]
    before = [each for each in order if each not in after and not issubclass(each, SnapshotTrainerMixin)]
    for name in _HOOKS:
        hidden = [each for each in before if name in vars(each)]
        if hidden:
            raise TypeError(
                f"{kind.__name__}: {hidden[0].__name__} must come after SnapshotTrainerMixin, since it defines {name}; "
                f"write class {kind.__name__}(SnapshotTrainerMixin, {hidden[0].__name__})"
            )
        own = next((vars(each)[name] for each in after if name in vars(each)), None)
        if own is None or len(inspect.signature(own).parameters) != 2:
            raise SnapshotError(
                f"{kind.__name__}: the Trainer of this version of transformers has no method {name} with a "
                "folder argument to override; SnapshotTrainerMixin requires transformers 5"
            )
