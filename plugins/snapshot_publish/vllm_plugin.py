"""Entry point for vLLM, which calls `register` in each of its processes."""

from __future__ import annotations

from snapshot.events import log

BACKEND = "snapshot"
"""Name of the backend in `WeightTransferConfig`."""


def register() -> None:
    """Register the backend `snapshot` of vLLM's weight transfer. Do nothing in a version without plug-ins for it."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError as error:
        log.debug("vLLM has no weight transfer that this library knows: %s", error)
        return
    for factory, name in (
        (WeightTransferEngineFactory, "SnapshotWeightTransferEngine"),
        (WeightTransferTrainerFactory, "SnapshotTrainerWeightTransferEngine"),
    ):
        try:
            factory.register_engine(BACKEND, "snapshot_publish.vllm", name)
        except ValueError:  # registered before
            log.debug("vLLM has the backend %s already", BACKEND)
