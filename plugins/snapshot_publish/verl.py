"""verl's weight synchronization through published versions: the backend `snapshot`. Tested with version 0.9.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: snapshot
      custom_backend_module: snapshot_publish.verl
      engine_kwargs:
        snapshot:
          url: s3://bucket/policy

All ranks of the actor publish a part of the weights. Each rollout worker waits for exactly that version, and hands its
tensors to the engine after all of them were verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.interop.framework_checks import expect_parameters
from snapshot_publish.publisher import Publisher
from snapshot_publish.weight_sync import Shares, WeightReader

KNOWN = "verl 0.9"
METHODS = {
    "prepare": (),
    "build_topology": ("actor_wg_world_size", "rollout_world_size", "metadata"),
    "init_process_group": (),
    "finalize": (),
    "send_weights": ("weights", "global_steps"),
    "receive_weights": ("global_steps",),
    "get_weights": (),
}
"""verl's methods of a checkpoint engine, and their parameters."""
expect_parameters(CheckpointEngineWithCache, METHODS, KNOWN)


@CheckpointEngineRegistry.register("snapshot")
class SnapshotCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """A checkpoint engine of verl over `Publisher` and `Subscriber`.

    Args:
        bucket_size: Not used: tensors are handed over one by one.
        is_master: True on rank 0 of the actor.
        url: The store. It must be a bucket, or a folder that all hosts see.
        folder: The local folder of the rollout workers of a host. By default, it is in the host's memory.
        timeout: Seconds that a rollout worker waits for a version.
        storage_options: Options for the storage plugin.
        publish: More arguments of `Publisher`, and fields of its options: `{"full_every": 20, "keep": 3}`.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        url: str,
        folder: str | None = None,
        timeout: float = 1800.0,
        storage_options: Mapping[str, Any] | None = None,
        publish: Mapping[str, Any] | None = None,
    ) -> None:
        self._is_master = is_master
        self._timeout = timeout
        self._read = (url, folder, storage_options)
        self._publish = {"storage_options": storage_options, **(publish or {})}
        self._reader: WeightReader | None = None
        self._publisher: Publisher | None = None
        self._after = 0
        """The newest version when the update began: this update's version has a higher number."""

    # In the order in which verl calls them in each update

    def prepare(self) -> dict[str, Any]:
        """Return the number of the newest version, on the master."""
        return {"after": WeightReader.newest(self._read[0], self._read[2])} if self._is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give all workers the master's number."""
        after = metadata[0]["after"]
        return {"after": [after] * actor_wg_world_size}, {"after": [after] * rollout_world_size}

    def init_process_group(self, after: int) -> None:
        """Note the number of the newest version. Trainer and rollout form no process group."""
        self._after = after

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish the weights. All ranks of the actor call it, and return when the version is committed."""
        if self._publisher is None:
            self._publisher = Publisher.of_config(self._read[0], self._publish)
        ranks = ranks_of(None)
        shares, state = Shares(ranks.world), {}
        for name, tensor in weights:  # each rank must walk it, since a tensor is gathered from all of them
            if shares.choose(tensor.nbytes) == ranks.rank:
                state[name] = tensor.detach().to("cpu", copy=True)
        pending = self._publisher.publish(global_steps or 0, state)
        published = await asyncio.to_thread(pending.wait)
        if published.version <= self._after:
            raise SnapshotError(f"{self._read[0]}: version {published.version} must be newer than {self._after}")
        return {"snapshot/version": published.version}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the version of this update, verify it, and yield its tensors."""
        if self._reader is None:
            self._reader = WeightReader(*self._read)
        version = await asyncio.to_thread(self._reader.wait_for, global_steps or 0, self._after, self._timeout)
        folder = await asyncio.to_thread(self._reader.pull, version)
        for name, tensor in self._reader.open(folder):
            yield name, _on_device(tensor)

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the version that was received last."""
        if self._reader is None:
            raise SnapshotError("verl has received no weights yet; call receive_weights first")
        for name, tensor in self._reader.open(self._reader.current()):
            yield name, _on_device(tensor)

    def finalize(self) -> None:
        """Do nothing: the next update's version may be a delta of this one."""


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on this worker's accelerator, where verl hands it to the engine."""
    return tensor.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else tensor
