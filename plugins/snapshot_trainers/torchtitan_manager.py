"""torchtitan's checkpoint manager as a class for configurations. Tested with version 0.3, and with its main branch.

    from snapshot_trainers.torchtitan_manager import SnapshotCheckpointManager

    checkpoint = SnapshotCheckpointManager.Config(interval=500, keep_latest_k=3, async_mode="async")

It has all settings of torchtitan's own `CheckpointManager`. The checkpoints are those of `use_snapshots`, and these are
read as well. It adds what a resume needs: each rank's random numbers, a fallback to the step before a damaged one, and
retention that counts committed steps only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from snapshot.errors import CorruptSnapshotError, MissingExtraError, SnapshotError
from snapshot.events import log
from snapshot.interop.framework_checks import expect_parameters
from snapshot.io.loop import LoopFuture, finish_before_exit, in_own_thread, run, start
from snapshot.io.url import URL
from snapshot.manager.policies import KeepLatest
from snapshot.manager.retention import remove_unkept
from snapshot.manager.root import Root
from snapshot.snapshot import Snapshot
from snapshot.state.rng import RNGState
from snapshot_trainers.torchtitan import KNOWN, METHODS, finding_snapshots, loading_snapshots, saving_snapshots

try:
    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
except ImportError as error:
    raise MissingExtraError(
        f"SnapshotCheckpointManager requires torchtitan 0.3, which cannot be imported: {error}; pip install torchtitan"
    ) from error

expect_parameters(
    CheckpointManager,
    {
        **METHODS,
        "_load": ("step",),
        "_states_to_load": ("model_only",),
        "_flattened_model_states_sd": ("state_dict",),
        "_purge_stale_checkpoints": (),
        "_create_checkpoint_id": ("step", "folder"),
    },
    KNOWN,
)
for hook in ("_save", "_load", "_maybe_wait_for_staging", "_wait_for_saving", "_close"):
    if not hasattr(BaseCheckpointManager, hook):
        raise SnapshotError(f"torchtitan: BaseCheckpointManager has no {hook}; this version is not known, use {KNOWN}")

RNG = "rng"
"""Key of the random numbers, by rank and number of ranks."""
_find_step = finding_snapshots(CheckpointManager._find_load_step)
_load_state = loading_snapshots(CheckpointManager.dcp_load)


class SnapshotCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager over snapshots."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan's `CheckpointManager`, and options of the storage."""

        storage_options: dict[str, Any] = field(default_factory=dict)
        """Options for the storage plugin."""

    def __init__(self, config: Config, **parts: Any) -> None:
        self.storage_options = dict(config.storage_options)
        self._damaged: dict[int, CheckpointException] = {}
        self._model_only = False
        self._removal: LoopFuture[set[int]] | None = None
        super().__init__(config, **parts)

    def _load(self, step: int = -1) -> bool:
        """Restore a step, or the newest one that is intact."""
        while True:
            try:
                return bool(super()._load(step))
            except CheckpointException as error:
                if step != -1 or not _is_damage(error):
                    raise
                newest = self._find_load_step()  # of `super()._load`: all ranks list the same folder
                if newest in self._damaged or newest not in self._committed():
                    raise
                log.warning("%s: is passed over: %s", self._create_checkpoint_id(newest), error)
                self._damaged[newest] = error

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step that was not found to be damaged, or -1 if there is none at all."""
        if not self._damaged:
            return int(_find_step(self, folder))
        intact = [step for step in self._committed() if step not in self._damaged]
        if not intact:  # -1 would begin from scratch
            raise CorruptSnapshotError(f"{self.folder}: all steps are damaged: {sorted(self._damaged)}")
        return max(intact)

    def _committed(self) -> list[int]:
        return list(run(Root(URL.parse(str(self.folder)), self.storage_options).folders()).committed)

    def _flattened_model_states_sd(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return torchtitan's flat state. That of a save, which is without an argument, has the random numbers, too."""
        flat: dict[str, Any] = super()._flattened_model_states_sd(state_dict)
        return flat if state_dict is not None else {**flat, RNG: {_place(): RNGState().state_dict()}}

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        self._model_only = model_only
        states: dict[str, Any] = super()._states_to_load(model_only)
        return states

    dcp_save = saving_snapshots(CheckpointManager.dcp_save)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint of any kind into the state, and then this rank's random numbers."""
        _load_state(self, state_dict, checkpoint_id, from_hf, from_quantized)
        if self._model_only:
            return
        snapshot = Snapshot(checkpoint_id, storage_options=self.storage_options)
        if f"0/{RNG}/{_place()}" in snapshot.get_manifest():
            RNGState().load_state_dict(snapshot.read_object(f"0/{RNG}/{_place()}"))
        else:
            log.info("%s: has no random numbers of %s", checkpoint_id, _place())

    def _purge_stale_checkpoints(self) -> None:
        """Start to remove the steps before the newest committed ones. A step that is being written does not count."""
        busy = self._removal is not None and not self._removal.done()
        if self.keep_latest_k > 0 and dist.get_rank() == 0 and not busy:
            root = Root(URL.parse(str(self.folder)), self.storage_options)
            policy = KeepLatest(self.keep_latest_k)
            self._removal = start(in_own_thread(remove_unkept, root, policy, self._committed()))
            finish_before_exit(self._removal)


def _place() -> str:
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _is_damage(error: CheckpointException) -> bool:
    """Return True if ranks failed, and each of them found damage."""
    return bool(error.failures) and all(isinstance(each[0], CorruptSnapshotError) for each in error.failures.values())
