"""State of an accelerator as a snapshot, in place of `accelerator.save_state`. It imports nothing of accelerate."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from snapshot import RestoreOptions, TakeOptions
from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.interop.handover import is_snapshot
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.state.model_state import ModelState
from snapshot.state.rng import RNGState
from snapshot_trainers.data_order import is_tracked, order_of
from snapshot_trainers.torchdata import LoaderState

_OWN = ("rng", "loader")
"""Names of each rank's own state. It is restored on the same number of ranks only."""


class _Step:
    """The accelerator's count of batches. It decides after which ones the gradients are applied."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def track_loaders(accelerator: Any, *loaders: Any) -> None:
    """Let `save_state` and `load_state` save and restore the places of prepared data loaders: these, or all.

    Call it on all ranks after `accelerator.prepare`, and before the first loop: the start of an epoch cannot be found
    later. After a restore, the loop goes on by itself with the rest of the epoch, on any number of ranks and with any
    batch size, without `skip_first_batches`. A loop that was left early goes on, too: so pass only those for training
    if an evaluation reads some batches of its loader. See `snapshot_trainers.torchdata.LoaderState`.
    """
    for each in loaders or accelerator._dataloaders:  # noqa: SLF001 - accelerate has no public names
        LoaderState(each)
    skip = type(accelerator).skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if is_tracked(dataloader):
            order_of(dataloader).expect_own_reader()
        return skip(accelerator, dataloader, num_batches)

    accelerator.skip_first_batches = skip_first_batches


def app_state_of(accelerator: Any) -> dict[str, Any]:
    """Return what `accelerator.save_state` saves, as an app state.

    These are the prepared models, optimizers and schedulers, the scaler, and random numbers. Data loaders are included
    if they are stateful, or tracked by `track_loaders`. The count of batches and all objects of
    `register_for_checkpointing` are included. Names of models do not depend on wrappers.

    Raises:
        SnapshotError: The accelerator uses FSDP1, DeepSpeed, Megatron-LM or XLA, which have their own formats.
    """
    _refuse_other_formats(accelerator)
    loaders = [
        LoaderState(each) if is_tracked(each) else each
        for each in accelerator._dataloaders  # noqa: SLF001 - accelerate has no public names
        if is_tracked(each) or getattr(each, "use_stateful_dataloader", False)
    ]
    groups = {
        "model": map(ModelState, accelerator._models),  # noqa: SLF001
        "optimizer": (each.optimizer for each in accelerator._optimizers),  # noqa: SLF001
        "scheduler": (each.scheduler for each in accelerator._schedulers),  # noqa: SLF001
        "custom": accelerator._custom_objects,  # noqa: SLF001
        "loader": loaders,
    }
    state: dict[str, Any] = {"accelerator": _Step(accelerator), "rng": RNGState()}
    for name, group in groups.items():
        state |= {f"{name}_{number}" if number else name: each for number, each in enumerate(group)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def save_state(accelerator: Any, path: Any, *, background: bool = False, **options: Any) -> Snapshot | PendingSnapshot:
    """Save what `accelerator.save_state(path)` saves, as a snapshot. Call it on all ranks.

    What is equal on all ranks is written once, and must be equal: also registered objects. With FSDP2, each rank writes
    its shards. Hooks of `register_save_state_pre_hook` are not called.

    Args:
        accelerator: The accelerator that has prepared the objects.
        path: Path or URL of the snapshot.
        background: Return when the state is copied, with a `PendingSnapshot`.
        options: More arguments of `Snapshot.take`: `overwrite=True`, or other `replicated` globs.

    Raises:
        SnapshotError: The accelerator uses FSDP1, DeepSpeed, Megatron-LM or XLA, which have their own formats.
    """
    state = app_state_of(accelerator)
    lacking = sum(not is_tracked(each) for each in accelerator._dataloaders)  # noqa: SLF001
    if lacking:
        log.info("the order of %d data loaders is not saved; call track_loaders(accelerator) after prepare", lacking)
    if accelerator.num_processes > 1 and (options.get("options") or TakeOptions()).replicated is None:
        options.setdefault("replicated", [name for name, each in state.items() if _is_replicated(name, each)])
    take: Any = Snapshot.async_take if background else Snapshot.take
    saved: Snapshot | PendingSnapshot = take(path, state, **options)
    return saved


def load_state(accelerator: Any, path: Any, **options: Any) -> None:
    """Restore what `save_state` saved, on any number of ranks.

    Random numbers are restored on the same number of ranks only, with a log line otherwise, and so are the places of
    stateful data loaders that `track_loaders` does not know. Saved objects that this accelerator lacks are logged, too.
    A folder that accelerate wrote is loaded by `accelerator.load_state`. `options`: more arguments of
    `Snapshot.restore`.
    """
    state = app_state_of(accelerator)
    if os.path.exists(os.path.join(path, "random_states_0.pkl")) and not is_snapshot(path):
        accelerator.load_state(path)
        return
    snapshot = Snapshot(path)
    manifest = snapshot.get_manifest()
    for name in [name for name, each in state.items() if type(each) is LoaderState and f"0/{name}" not in manifest]:
        log.warning("%s: has no place of the data loader %r, which begins a new epoch", path, name)
        del state[name]
    saved = snapshot.metadata.world_size
    if saved != accelerator.num_processes:
        log.info("%s: random numbers and data of %d ranks do not fit %d", path, saved, accelerator.num_processes)
        chosen = options.get("options") or RestoreOptions()
        own = [f"{name}/**" for name, each in state.items() if name.startswith(_OWN) and type(each) is not LoaderState]
        options["options"] = replace(chosen, exclude=[*chosen.exclude, *own])
    snapshot.restore(state, **options)


def _is_replicated(name: str, stateful: Any) -> bool:
    """Return True for state that is equal on all ranks, and is not known to be. DDP's buffers are those of rank 0."""
    if isinstance(stateful, ModelState):
        return not any(isinstance(module, DistributedDataParallel) for module in stateful.model.modules())
    return not name.startswith(_OWN)


def _refuse_other_formats(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1)
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (kind == "FSDP" and version != 2):
        raise SnapshotError(
            f"the accelerator uses {'FSDP1' if kind == 'FSDP' else kind}, which has its own checkpoint format; "
            "call accelerator.save_state, or train in one process, with DistributedDataParallel, or with FSDP2"
        )
