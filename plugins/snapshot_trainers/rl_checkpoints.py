"""Checkpoints of a model, its optimizer and scheduler in verl's and SkyRL's folders, as one snapshot of all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.interop.handover import TrainableState
from snapshot.snapshot import Snapshot
from snapshot.state.rng import RNGState

FOLDER = "snapshot"
"""Folder of the snapshot in a checkpoint folder."""
KEY = "trainer"
"""Key in the snapshot's metadata for what the trainer stores beside its tensors."""
RNG = "rng"


def save_parts(
    folder: str,
    parts: Mapping[str, Any],
    *,
    rng: bool,
    adapter: bool,
    values: Mapping[str, Any],
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Save the parts that are not None, in a folder that all ranks see. Return when the snapshot is committed.

    With `adapter`, the model's frozen parameters are left out.
    """
    state = _stateful(parts, adapter=adapter)
    Snapshot.take(
        os.path.join(folder, FOLDER),
        {**state, RNG: RNGState()} if rng else state,
        replicated=[*state] if ranks_of(None).world > 1 else None,
        overwrite=True,
        storage_options=storage_options,
        metadata={KEY: {**values, "adapter": adapter}},
    )


def find_snapshot(folder: str, storage_options: Mapping[str, Any] | None) -> Snapshot | None:
    """Return the snapshot in a checkpoint folder, or None: then the trainer itself wrote the checkpoint."""
    found = Snapshot(os.path.join(folder, FOLDER), None, storage_options)
    return found if found.exists() else None


def load_parts(snapshot: Snapshot, parts: Mapping[str, Any], *, rng: bool) -> dict[str, Any]:
    """Restore the parts that are not None, on any number of ranks. Return the values that were saved beside them.

    Random numbers are restored if the number of ranks is the same.
    """
    described = snapshot.metadata
    values = dict(described.metadata.get(KEY, {}))
    state = _stateful(parts, adapter=values.pop("adapter", False))
    same = described.world_size == ranks_of(None).world
    if rng and not same:
        log.info("%s: random numbers of %d ranks do not fit", snapshot.path, described.world_size)
    snapshot.restore({**state, RNG: RNGState()} if rng and same else state, unused="ignore")
    return values


def _stateful(parts: Mapping[str, Any], *, adapter: bool) -> dict[str, Any]:
    state = {name: each for name, each in parts.items() if each is not None}
    model = state.get("model")
    if model is not None and any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise SnapshotError(
            "a model with FSDP1 has flat parameters, whose optimizer state cannot be restored on other ranks; "
            "train with FSDP2 (strategy: fsdp2), or without use_snapshots()"
        )
    if model is not None and adapter:
        state["model"] = TrainableState(model)
    return state
