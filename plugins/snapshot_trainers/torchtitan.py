"""torchtitan's checkpoint manager, with snapshots instead of DCP's files. Tested with versions 0.2 and 0.3, and main.

    from snapshot_trainers.torchtitan import use_snapshots

    use_snapshots()  # before the trainer is created, on every rank

The rest of torchtitan's checkpointing is unchanged: settings, asynchronous modes, retention, and conversion from and to
Hugging Face's format. Checkpoints that DCP wrote are found and loaded as before.

Since version 0.3, `SnapshotCheckpointManager` is the choice for a configuration: see `torchtitan_manager`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from snapshot.errors import MissingExtraError
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter
from snapshot.interop.framework_checks import expect_parameters
from snapshot.io.loop import run
from snapshot.io.url import URL
from snapshot.manager.root import Root

METHODS = {
    "dcp_save": ("state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"),
    "dcp_load": ("state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    "_find_load_step": ("folder",),
}
"""The methods of torchtitan's manager that are replaced, and their parameters."""
KNOWN = "torchtitan 0.2 or 0.3"


def use_snapshots(manager: Any = None, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let torchtitan save and load snapshots in this process.

    Args:
        manager: A `CheckpointManager` class like torchtitan's, which is the default. The class itself is changed, since
            trainers and configurations refer to it.
        storage_options: Options for the storage plugin.

    Raises:
        MissingExtraError: torchtitan cannot be imported.
        SnapshotError: The manager has other methods than those of the known versions.
    """
    manager = _torchtitan_manager() if manager is None else manager
    expect_parameters(manager, METHODS, KNOWN)
    if not hasattr(manager.dcp_save, "saves_snapshots"):
        manager.dcp_save = saving_snapshots(manager.dcp_save, storage_options)
        manager.dcp_load = loading_snapshots(manager.dcp_load, storage_options)
        manager._find_load_step = finding_snapshots(manager._find_load_step, storage_options)


def _torchtitan_manager() -> Any:
    try:
        try:
            from torchtitan.components.checkpointer import CheckpointManager  # since 0.3
        except ModuleNotFoundError:
            from torchtitan.components.checkpoint import CheckpointManager
    except ImportError as error:
        raise MissingExtraError(f"torchtitan cannot be imported: {error}; pip install torchtitan") from error
    return CheckpointManager


def saving_snapshots(original: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return a `dcp_save` that writes snapshots. `storage_options` of the manager itself take precedence."""

    @functools.wraps(original)
    @torch.no_grad()
    def dcp_save(  # noqa: PLR0917 - as torchtitan calls it
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf:
            return original(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = SnapshotWriter(checkpoint_id, storage_options=_options(self, options))
        given: dict[str, Any] = {"storage_writer": writer}
        mode = str(getattr(async_mode, "value", async_mode))
        if mode == "disabled":
            save(state_dict, **given)
            made = None
        else:
            if mode == "async_with_pinned_mem":
                from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # since torch 2.7

                given["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
                given["async_stager"] = self.stager
            made = async_save(state_dict, process_group=self.pg, **given)
        if enable_garbage_collection:
            from torchtitan.tools.utils import GarbageCollection

            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return made

    dcp_save.saves_snapshots = True  # type: ignore[attr-defined]
    return dcp_save


def loading_snapshots(original: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return a `dcp_load` that reads snapshots, and what DCP wrote."""

    @functools.wraps(original)
    def dcp_load(
        self: Any, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if from_hf:
            original(self, state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=SnapshotReader(checkpoint_id, storage_options=_options(self, options)))
        if "model" in self.states:  # its names are top-level keys
            self.states["model"].load_state_dict(state_dict)

    return dcp_load


def finding_snapshots(original: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return a `_find_load_step` that finds snapshots, too."""

    @functools.wraps(original)
    def find_load_step(self: Any, folder: str = "") -> int:
        """Return the newest step of torchtitan's checkpoints and of snapshots, or -1."""
        folders = run(Root(URL.parse(str(folder or self.folder)), _options(self, options)).folders())
        newest: int = max([original(self, folder), *folders.committed])
        unreadable = [step for step in folders.unreadable if step > newest]
        if unreadable:  # resuming from an older step would silently lose steps
            raise folders.unreadable[max(unreadable)]
        return newest

    return find_load_step


def _options(manager: Any, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    own: Mapping[str, Any] | None = getattr(manager, "storage_options", options)
    return own
