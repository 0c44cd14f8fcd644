"""Ray Train's checkpoints as snapshots: `report` and `restore` for the training function of a `TorchTrainer`.

All workers write one snapshot, in a folder of the run's storage that Ray knows as the checkpoint. Ray then keeps,
ranks and deletes it as any other. Nothing of Ray is imported until it is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from snapshot.errors import SnapshotError
from snapshot.interop.framework_checks import expect_version
from snapshot.reports import RestoreReport
from snapshot.save.take import AppState
from snapshot.save.take_options import TAKE_OPTIONS, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot

VERSIONS = ("2",)
_ARGUMENTS = (
    "checkpoint",
    "checkpoint_dir_name",
    "checkpoint_upload_mode",
    "checkpoint_upload_fn",
    "delete_local_checkpoint_after_upload",
)
"""Arguments of Ray's own `report` that the adapter uses."""
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Names of pyarrow's file systems -> the beginnings of URLs."""


def report(
    metrics: Mapping[str, Any],
    app_state: AppState,
    *,
    asynchronous: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: TakeOptions = TAKE_OPTIONS,
) -> PendingSnapshot:
    """Save the app state of all workers, and report it to Ray with metrics. Each worker must call it.

    Ray learns of the checkpoint after its commit. So a run that fails meanwhile restarts from the one before.

    Args:
        metrics: The metrics of this worker, as for `ray.train.report`.
        app_state: The objects to save, as for `Snapshot.take`.
        asynchronous: Continue training while the snapshot is written. If that fails, Ray ends the worker, as its own
            `CheckpointUploadMode.ASYNC` does.
        storage_options: Options for the storage plugin.
        options: More options of the take, such as `TakeOptions(replicated=[...])` for values that all workers have.

    Raises:
        MissingExtraError: Ray is not installed.
        SnapshotError: The save failed. Or the version of Ray, its storage or its trainer is not supported.
    """
    train = _train()
    storage = train.get_context().get_storage()
    name = train.collective.broadcast_from_rank_zero(storage.make_default_checkpoint_dir_name())
    path = storage.build_checkpoint_path_from_name(name)
    checkpoint = train.Checkpoint(path, storage.storage_filesystem)
    pending = Snapshot.async_take(_url_of(checkpoint), app_state, storage_options=storage_options, options=options)

    def wait_for_commit(reported: Any, _: str) -> Any:
        pending.wait()
        return reported

    train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC if asynchronous else train.CheckpointUploadMode.SYNC,
        checkpoint_upload_fn=wait_for_commit,
        delete_local_checkpoint_after_upload=False,  # the snapshot is already in its place
    )
    return pending


def restore(
    app_state: AppState, *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> RestoreReport | None:
    """Restore the run's latest checkpoint on each worker, on any number of workers. Return None if there is none.

    Args:
        app_state: The objects to restore, as for `Snapshot.restore`.
        storage_options: Options for the storage plugin.
        options: More options of `Snapshot.restore`, such as `strict=False`.
    """
    checkpoint = _train().get_checkpoint()
    if checkpoint is None:
        return None
    return open_checkpoint(checkpoint, storage_options=storage_options).restore(app_state, **options)


def open_checkpoint(checkpoint: Any, *, storage_options: Mapping[str, Any] | None = None) -> Snapshot:
    """Return the snapshot of a `ray.train.Checkpoint`, such as `result.checkpoint`."""
    return Snapshot(_url_of(checkpoint), storage_options=storage_options)


def _url_of(checkpoint: Any) -> str:
    kind = checkpoint.filesystem.type_name
    if kind not in _SCHEMES:
        raise SnapshotError(
            f"{checkpoint.path}: Ray's storage must be a local or shared folder, S3 or GCS, got {kind}; set "
            "RunConfig(storage_path=...)"
        )
    return f"{_SCHEMES[kind]}{checkpoint.path}"


def _train() -> Any:
    """Return `ray.train`. Raise if it is not the one of Ray Train v2, or if its workers are not ranks."""
    found = expect_version("ray", VERSIONS, "snapshot_trainers.ray")
    from ray import train
    from ray.train import collective

    missing = [name for name in _ARGUMENTS if name not in inspect.signature(train.report).parameters]
    if missing or not hasattr(collective, "broadcast_from_rank_zero"):
        raise SnapshotError(
            f"snapshot_trainers.ray: ray must have Train v2, whose report() has {', '.join(_ARGUMENTS)}, got {found} "
            f"without {', '.join(missing) or 'broadcast_from_rank_zero'}; check RAY_TRAIN_V2_ENABLED"
        )
    workers = train.get_context().get_world_size()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks != workers:
        raise SnapshotError(
            f"snapshot_trainers.ray: the {workers} workers must form one process group of torch, got {ranks} in it; "
            "use TorchTrainer"
        )
    return train
