"""Megatron-Bridge's checkpoints as snapshots: a manager for its `custom_manager_class`.

    register_allowed_target_prefix("snapshot_megatron.")  # of megatron.bridge.utils.instantiate_utils
    config.checkpoint.custom_manager_class = "snapshot_megatron.bridge.SnapshotCheckpointManager"

Bridge decides what a checkpoint contains, and keeps its trackers and its retention. Only its calls of Megatron-core's
`dist_checkpointing` are answered here, as a `MegatronState` in the iteration's folder.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.handover import is_snapshot
from snapshot.interop.objects import build_objects
from snapshot.save.take_options import TAKE_OPTIONS, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot_megatron.adapter import COMMON, OPTIMIZER, MegatronState

KEY = "megatron"
"""Key of the state in a snapshot."""
_BRIDGE = "megatron.bridge.training.checkpointing"
_METADATA = "content_metadata"
"""Megatron-core's key for the description of the sharding, next to the common state."""
_OWN = "snapshot_optimizer"
"""Key in that description: the optimizer is stored as tensors of the model."""
_STRICT = ("raise_unexpected", "raise_all")
_CALLED = {
    "save": ("sharded_state_dict", "checkpoint_dir", "content_metadata", "async_sharded_save"),
    "load": ("sharded_state_dict", "checkpoint_dir", "strict"),
    "load_common_state_dict": ("checkpoint_dir",),
    "load_content_metadata": ("preloaded_state_dict",),
    "check_is_distributed_checkpoint": ("checkpoint_dir",),
}
"""Functions of Megatron-core that Bridge calls -> the arguments that this module relies on."""


class SnapshotCheckpointManager:
    """Saves and loads the checkpoints of Megatron-Bridge, of format `torch_dist`.

    Each iteration's folder is a snapshot. It can be loaded with any split and number of ranks that Bridge can change
    to. The distributed optimizer is saved and loaded without Megatron's gather, also into another split.

    With `async_save`, the snapshot is written by threads while training continues, and Bridge's trackers name it after
    its commit. Checkpoints that Bridge itself wrote are loaded as before. Local checkpoints are not changed.

    Args:
        checkpoint_config: Bridge's `CheckpointConfig`.

    Raises:
        MissingExtraError: Megatron-Bridge cannot be imported.
        SnapshotError: The adapter does not know this version of Megatron-Bridge, or the format is another one.
    """

    options: ClassVar[TakeOptions] = TAKE_OPTIONS
    """More options of the takes. Change them in a subclass."""

    def __init__(self, checkpoint_config: Any) -> None:
        bridge = _load_bridge()
        if checkpoint_config.ckpt_format != "torch_dist":
            raise SnapshotError(
                f"SnapshotCheckpointManager: checkpoint.ckpt_format must be 'torch_dist', got "
                f"{checkpoint_config.ckpt_format!r}"
            )
        if not isinstance(bridge.dist_checkpointing, _Storage):
            bridge.dist_checkpointing = _Storage(bridge.dist_checkpointing)
            bridge.schedule_async_save = partial(_schedule, bridge.schedule_async_save)
            if hasattr(bridge, "get_default_load_sharded_strategy"):  # version 0.4
                bridge.get_default_load_sharded_strategy = partial(_strategy, bridge.get_default_load_sharded_strategy)
        bridge.dist_checkpointing.options = replace(self.options, allow_pickle="error")
        self._storage: _Storage = bridge.dist_checkpointing
        self._saves: list[_Save] = self._storage.saves
        self._is_local = getattr(checkpoint_config, "non_persistent_ckpt_type", None) == "local"
        self._bridge = bridge.DefaultCheckpointManager(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Bridge's own context of saves and loads."""
        held: dict[str, Any] = self._bridge.checkpointing_context
        return held

    def save(self, ctx: Any, *more: Any) -> None:
        """Save what Bridge saves. `more` has the callbacks, since version 0.5."""
        is_local = self._is_local and getattr(ctx, "non_persistent_ckpt", False)
        self._bridge.save(ctx if is_local else _with_runs(ctx, lambda: True), *more)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load what Bridge loads. Return the iteration, and the number of floating point operations so far."""
        self._storage.has_runs = False
        found: tuple[int, int] = self._bridge.load(_with_runs(ctx, lambda: self._storage.has_runs))
        return found

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Let Bridge's trackers name the snapshots that were committed meanwhile. Each rank calls it at each step.

        Args:
            state: Bridge's global state.
            blocking: Wait for all snapshots.
            terminate: No more saves follow.

        Raises:
            SnapshotError: A save failed. The trackers still name the one before.
        """
        while self._saves and (blocking or _is_everywhere(self._saves[0].pending.done())):
            save = self._saves.pop(0)
            save.pending.wait()
            for finalize in save.finalize_fns:
                finalize()
        self._bridge.finalize_async_saves(state, blocking=blocking, terminate=terminate)


class _Save:
    """An asynchronous save, as Bridge expects it from Megatron-core."""

    def __init__(self, pending: PendingSnapshot) -> None:
        self.pending = pending
        self.finalize_fns: list[Callable[[], object]] = []

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        self.finalize_fns.append(fn)


class _Runs:
    """Stands for the state of an optimizer in the sharded state dict that Bridge makes."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class _Optimizer:
    """A distributed optimizer whose state a `MegatronState` saves and restores, if `has_runs()` is true."""

    def __init__(self, original: Any, has_runs: Callable[[], bool]) -> None:
        self._original = original
        self._has_runs = has_runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def sharded_state_dict(self, *state: Any, **options: Any) -> Any:
        """Return a mark instead of what Megatron gathers, or of what is of one split."""
        return _Runs(self._original) if self._has_runs() else self._original.sharded_state_dict(*state, **options)

    def load_state_dict(self, state: Any) -> None:
        """Do nothing with a mark: the restore has filled the optimizer."""
        if not isinstance(state, _Runs):
            self._original.load_state_dict(state)


def _with_runs(context: Any, has_runs: Callable[[], bool]) -> Any:
    """Return a context with such an optimizer. Other kinds of optimizers stay."""
    optimizer = context.optimizer
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if not parts or not all(
        hasattr(each, "gbuf_ranges") or getattr(each, "is_stub_optimizer", False) for each in parts
    ):
        return context
    made = copy.copy(context)
    made.optimizer = _Optimizer(optimizer, has_runs)
    return made


def _take_runs(state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a sharded state dict without the mark of an optimizer, and that optimizer."""
    mark = state.get(OPTIMIZER)
    if not isinstance(mark, _Runs):
        return dict(state), None
    return {name: value for name, value in state.items() if name != OPTIMIZER}, mark.optimizer


class _Storage:
    """Megatron-core's `dist_checkpointing`, for snapshots. Other folders, and other functions, are left to it."""

    def __init__(self, original: Any) -> None:
        self.options = TAKE_OPTIONS
        self.saves: list[_Save] = []
        self.has_runs = False
        """True if the checkpoint that is being loaded has the optimizer as tensors of the model."""
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def check_is_distributed_checkpoint(self, checkpoint_dir: Any) -> bool:
        return is_snapshot(checkpoint_dir) or self._original.check_is_distributed_checkpoint(checkpoint_dir)

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Any,
        *_: Any,
        async_sharded_save: bool = False,
        content_metadata: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> _Save | None:
        tree, optimizer = _take_runs(sharded_state_dict)
        if optimizer is not None:  # Bridge looks for the kind, and refuses to load others in another split
            content_metadata = {
                **(content_metadata or {}),
                "distrib_optim_sharding_type": "fully_reshardable",
                _OWN: True,
            }
        state = MegatronState({**tree, _METADATA: content_metadata}, optimizer=optimizer)
        take: Any = Snapshot.async_take if async_sharded_save else Snapshot.take
        taken = take(str(checkpoint_dir), {KEY: state}, overwrite=True, options=self.options)
        return _Save(taken) if isinstance(taken, PendingSnapshot) else None

    def load_common_state_dict(self, checkpoint_dir: Any) -> Any:
        if not is_snapshot(checkpoint_dir):
            return self._original.load_common_state_dict(checkpoint_dir)
        stored = Snapshot(checkpoint_dir).read_object(f"{KEY}/{COMMON}")
        common = build_objects(stored, str(checkpoint_dir), _find_enum)
        self.has_runs = bool((common.get(_METADATA) or {}).get(_OWN))
        return common

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *more: Any, strict: Any = None, **options: Any
    ) -> Any:
        if not is_snapshot(checkpoint_dir):
            options |= {} if strict is None else {"strict": strict}
            return self._original.load(sharded_state_dict, checkpoint_dir, *more, **options)
        tree, optimizer = _take_runs(sharded_state_dict)
        state = MegatronState(tree, optimizer=optimizer)
        Snapshot(checkpoint_dir).restore({KEY: state}, strict=getattr(strict, "value", strict) in _STRICT)
        loaded = build_objects(state.loaded, str(checkpoint_dir), _find_enum)
        return loaded if optimizer is None else {**loaded, OPTIMIZER: sharded_state_dict[OPTIMIZER]}


def _schedule(original: Callable[..., object], global_state: Any, async_request: Any) -> None:
    """Remember an asynchronous save of a snapshot. Leave others to Bridge."""
    if isinstance(async_request, _Save):
        sys.modules[_BRIDGE].dist_checkpointing.saves.append(async_request)
    else:
        original(global_state, async_request)


def _strategy(original: Callable[[Any], object], folder: Any) -> object:
    """Return no strategy for a snapshot, which `_Storage.load` reads without one."""
    return None if is_snapshot(folder) else original(folder)


def _is_everywhere(done: bool) -> bool:
    """Return True if a save is done on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return done
    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"
    number = torch.tensor(int(done), device="cuda" if on_gpu else "cpu")
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return bool(number.item())


def _find_enum(name: str) -> type | None:
    """Return one of Megatron-core's enums, such as those of its rerun state machine. It is imported already."""
    module, _, kind = name.rpartition(".")
    found = getattr(sys.modules.get(module), kind, None) if module.startswith("megatron.core.") else None
    return found if isinstance(found, type) and issubclass(found, Enum) else None


def _load_bridge() -> Any:
    """Return Bridge's module of checkpoints. Raise if it calls other functions than those that are replaced here."""
    try:
        bridge = import_module(_BRIDGE)
    except ImportError as error:
        raise MissingExtraError(f"Megatron-Bridge cannot be imported: {error}") from error
    called = getattr(bridge, "dist_checkpointing", None)
    parts = [
        f"{name}({', '.join(names)})" for name, names in _CALLED.items() if not _has_arguments(called, name, names)
    ]
    parts += [n for n in ("schedule_async_save", "DefaultCheckpointManager") if not hasattr(bridge, n)]
    if parts:
        raise SnapshotError(
            f"SnapshotCheckpointManager: this version of Megatron-Bridge or Megatron-core has no {', '.join(parts)}; "
            "the manager was written for Megatron-Bridge 0.4 to 0.6"
        )
    return bridge


def _has_arguments(called: Any, name: str, arguments: tuple[str, ...]) -> bool:
    function = getattr(getattr(called, "_original", called), name, None)
    return callable(function) and {*arguments} <= {*inspect.signature(function).parameters}
