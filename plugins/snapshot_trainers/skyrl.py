"""SkyRL's checkpoints with FSDP2, as one snapshot instead of three files of each rank. Tested with 0.3 and 0.4.

    from snapshot_trainers.skyrl import use_snapshots

    use_snapshots()  # in each worker process, before the first checkpoint

The rest is unchanged: the folders, the tokenizer and configuration, and the adapter's own files. Checkpoints that SkyRL
wrote are loaded as before. A checkpoint restores on another number of ranks. Folders in a bucket need no local copy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from torch import distributed as dist

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.framework_checks import expect_parameters
from snapshot_trainers.rl_checkpoints import find_snapshot, load_parts, save_parts

METHODS = {
    "save_checkpoint": ("model", "ckpt_dir", "node_local_rank", "optimizer", "scheduler", "client_state", "tag"),
    "load_checkpoint": ("model", "ckpt_dir", "optimizer", "scheduler", "tag", "load_module_strict"),
    "save_hf_configs": ("model_config", "hf_dir", "tokenizer"),
    "_unwrap_model": ("model",),
    "_save_lora_adapters": ("model", "ckpt_dir"),
}
"""The methods of SkyRL's strategy that are replaced or called, and their parameters."""


def use_snapshots(strategy: Any = None, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let SkyRL's `FSDPStrategy` save and load snapshots in this process.

    Args:
        strategy: A class like `FSDPStrategy`, which is the default. The class itself is changed, since SkyRL constructs
            it by name.
        storage_options: Options for the storage plugin.

    Raises:
        MissingExtraError: SkyRL cannot be imported.
        SnapshotError: The strategy has other methods than those of the known version.
    """
    strategy = _skyrl_strategy() if strategy is None else strategy
    expect_parameters(strategy, METHODS, "SkyRL 0.3 or 0.4")
    if not hasattr(strategy.save_checkpoint, "saves_snapshots"):
        strategy.save_checkpoint = _saving(strategy.save_checkpoint, storage_options)
        strategy.load_checkpoint = _loading(strategy.load_checkpoint, storage_options)


def _skyrl_strategy() -> Any:
    try:
        from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    except ImportError as error:
        raise MissingExtraError(f"SkyRL cannot be imported: {error}; pip install skyrl") from error
    return FSDPStrategy


def _inner(model: Any) -> Any:
    """Return the module in SkyRL's wrapper of a model."""
    return model.model if type(model).__name__ == "HFModelWrapper" else model


def _saving(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def save_checkpoint(  # noqa: PLR0917 - as SkyRL calls it
        self: Any,
        model: Any,
        ckpt_dir: str,
        node_local_rank: int,
        optimizer: Any = None,
        scheduler: Any = None,
        client_state: Mapping[str, Any] | None = None,
        tag: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        module = _inner(model)
        save_parts(
            ckpt_dir,
            {"model": module, "optimizer": optimizer, "scheduler": scheduler},
            rng=True,
            adapter=False,
            values={"client_state": dict(client_state or {}), "tag": tag, "fsdp_strategy": self.fsdp_strategy},
            storage_options=options,
        )
        if dist.get_rank() == 0:
            self.save_hf_configs(self._unwrap_model(model).config, os.path.join(ckpt_dir, "huggingface"), tokenizer)
        if getattr(self, "is_lora", False) and hasattr(module, "peft_config"):
            self._save_lora_adapters(module, ckpt_dir)
        dist.barrier()
        self.print(f"[rank-{dist.get_rank()}]: Checkpoint saved to {ckpt_dir}")

    save_checkpoint.saves_snapshots = True  # type: ignore[attr-defined]
    return save_checkpoint


def _loading(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def load_checkpoint(  # noqa: PLR0917 - as SkyRL calls it
        self: Any,
        model: Any,
        ckpt_dir: str,
        optimizer: Any = None,
        scheduler: Any = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> Any:
        snapshot = None if ckpt_dir is None else find_snapshot(ckpt_dir, options)
        if snapshot is None:
            return original(
                self, model, ckpt_dir, optimizer, scheduler, tag, load_module_strict, load_optimizer_states,
                load_lr_scheduler_states,
            )  # fmt: skip
        if not load_module_strict:
            raise SnapshotError(f"{ckpt_dir}: load_module_strict must be True for a snapshot, got False")
        parts = {
            "model": _inner(model),
            "optimizer": optimizer if load_optimizer_states else None,
            "scheduler": scheduler if load_lr_scheduler_states else None,
        }
        found = load_parts(snapshot, parts, rng=True)
        dist.barrier()
        ranks = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
        return ckpt_dir, {**found, "tag": found.get("tag") or tag, **ranks}

    return load_checkpoint
