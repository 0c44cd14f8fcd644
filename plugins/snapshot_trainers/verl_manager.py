"""verl's checkpoint manager for FSDP2, with one snapshot instead of three files of each rank. Tested with version 0.9.

    from snapshot_trainers.verl_manager import use_snapshots

    use_snapshots()  # in each worker process

The rest is unchanged: the folders, `max_actor_ckpt_to_keep`, the tokenizer and configuration, and the chosen contents.
Checkpoints that verl wrote are loaded as before. A checkpoint restores on another number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import distributed as dist

from snapshot.errors import MissingExtraError
from snapshot.interop.framework_checks import expect_parameters
from snapshot_trainers.rl_checkpoints import find_snapshot, load_parts, save_parts

METHODS = {
    "save_checkpoint": ("local_path", "hdfs_path", "global_step", "max_ckpt_to_keep"),
    "load_checkpoint": ("local_path", "hdfs_path", "del_local_after_load"),
}
"""The methods of verl's manager that are replaced, and their parameters."""
CONTENTS = ("model", "optimizer", "extra")
"""The contents that are in the snapshot."""


def use_snapshots(manager: Any = None, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let verl's `FSDPCheckpointManager` save and load snapshots in this process.

    Args:
        manager: A class like `FSDPCheckpointManager`, which is the default. The class itself is changed, since verl
            constructs it by name.
        storage_options: Options for the storage plugin.

    Raises:
        MissingExtraError: verl cannot be imported.
        SnapshotError: The manager has other methods than those of the known version.
    """
    manager = _verl_manager() if manager is None else manager
    expect_parameters(manager, METHODS, "verl 0.9")
    if not hasattr(manager.save_checkpoint, "saves_snapshots"):
        manager.save_checkpoint = _saving(manager.save_checkpoint, storage_options)
        manager.load_checkpoint = _loading(manager.load_checkpoint, storage_options)


def _verl_manager() -> Any:
    try:
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    except ImportError as error:
        raise MissingExtraError(f"verl cannot be imported: {error}; pip install verl") from error
    return FSDPCheckpointManager


def _parts(manager: Any, contents: Any) -> dict[str, Any]:
    return {
        "model": manager.model if "model" in contents else None,
        "optimizer": manager.optimizer if "optimizer" in contents else None,
        "scheduler": manager.lr_scheduler if "extra" in contents else None,
    }


def _saving(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        if local_path is None:
            return
        contents = self.checkpoint_save_contents
        adapter = bool(getattr(self, "should_save_lora_only", False)) and hasattr(self.model, "peft_config")
        save_parts(
            local_path,
            _parts(self, contents),
            rng="extra" in contents,
            adapter=adapter,
            values={"step": global_step},
            storage_options=options,
        )
        self.checkpoint_save_contents = [each for each in contents if each not in CONTENTS]
        try:  # the rest of the folder, and the removal of old ones, which this one replaces now
            original(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self.checkpoint_save_contents = contents

    save_checkpoint.saves_snapshots = True  # type: ignore[attr-defined]
    return save_checkpoint


def _loading(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def load_checkpoint(
        self: Any, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        snapshot = None if local_path is None else find_snapshot(local_path, options)
        if snapshot is None:
            original(self, local_path, hdfs_path, del_local_after_load)
            return
        contents = self.checkpoint_load_contents
        load_parts(snapshot, _parts(self, contents), rng="extra" in contents)
        dist.barrier()

    return load_checkpoint
