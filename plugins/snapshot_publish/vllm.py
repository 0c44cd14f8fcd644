"""vLLM's weight transfer through published versions: the backend `snapshot`. Written for version 0.33.

vLLM finds it by itself: `WeightTransferConfig(backend="snapshot")`. The trainer sends with

    from snapshot_publish.vllm import SnapshotTrainerInitInfo
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    info = SnapshotTrainerInitInfo(rank=rank, url="s3://bucket/policy")
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    sender.send_weights()

A version is published first. Then all workers pull and verify it, while their weights are unchanged. Only if all of
them have it, they load it. So an engine never has the weights of two versions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from snapshot.distributed.exchange import call_of
from snapshot.errors import SnapshotError
from snapshot.interop.framework_checks import expect_parameters
from snapshot_publish.publisher import Publisher
from snapshot_publish.weight_sync import WeightReader, state_of

KNOWN = "vLLM 0.33"
# vLLM's methods, and their parameters
OF_WORKER = {
    "init_transfer_engine": ("init_info",),
    "start_weight_update": (),
    "receive_weights": ("update_info",),
    "finish_weight_update": (),
    "shutdown": (),
}
OF_TRAINER = {"trainer_init": ("init_info", "client", "source"), "send_weights": ()}
expect_parameters(WeightTransferEngine, OF_WORKER, KNOWN)
expect_parameters(TrainerWeightTransferEngine, OF_TRAINER, KNOWN)


@dataclass
class SnapshotInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The store of a worker, as the trainer names it."""

    url: str
    folder: str | None = None
    """The local folder, shared by the workers of a host. By default, it is in the host's memory."""
    storage_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SnapshotUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One step of an update: pull a version, and load it if `load` is set."""

    version: int
    load: bool = True


class SnapshotWeightTransferEngine(WeightTransferEngine[SnapshotInitInfo, SnapshotUpdateInfo]):  # type: ignore[misc]
    """A worker's side: pulls versions, and loads exactly the one that it is given."""

    init_info_cls = SnapshotInitInfo
    update_info_cls = SnapshotUpdateInfo
    supports_draft_weight_update = False
    _reader: WeightReader | None = None
    _loading = False

    def init_transfer_engine(self, init_info: SnapshotInitInfo) -> None:
        """Open the store."""
        self.shutdown()
        self._reader = WeightReader(init_info.url, init_info.folder, init_info.storage_options)

    def start_weight_update(self) -> None:
        """Do nothing yet: the model stays as it is until a whole version is here."""
        self._loading = False

    def receive_weights(self, update_info: SnapshotUpdateInfo) -> None:
        """Pull a version, and verify it. With `load`, give its tensors to the model."""
        if self._reader is None:
            raise SnapshotError("the backend 'snapshot' is not initialized; call init_transfer_engine first")
        tensors = self._reader.open(self._reader.pull(update_info.version))
        if not update_info.load:
            return
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self._loading = True
        with disable_mtp_completeness_check():  # a trainer may have no weights for these layers
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Process the weights that were loaded."""
        if not self._loading:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._loading = False

    def shutdown(self) -> None:
        """Leave the local folder."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None


@dataclass
class SnapshotTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """A trainer rank, and its store. All ranks of the default process group send together."""

    backend: ClassVar[str] = "snapshot"
    url: str
    folder: str | None = None
    """The local folder of the workers."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    publish: dict[str, Any] = field(default_factory=dict)
    """More arguments of `Publisher`, and fields of its options: `{"full_every": 20, "keep": 3}`."""


class SnapshotTrainerWeightTransferEngine(TrainerWeightTransferEngine[SnapshotTrainerInitInfo]):  # type: ignore[misc]
    """The trainer's side: publishes, and lets the workers pull and load the version."""

    init_info_cls = SnapshotTrainerInitInfo

    def __init__(self, info: SnapshotTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._new_publisher = partial(Publisher.of_config, info.url, info.publish, storage_options=info.storage_options)
        self._publisher = self._new_publisher()
        self._rounds = 0
        self._failed = False

    @classmethod
    def trainer_init(
        cls, init_info: SnapshotTrainerInitInfo, *, client: Any, source: Any = None
    ) -> SnapshotTrainerWeightTransferEngine:
        """Return a sender, and open the store in the workers."""
        if source is None:
            raise ValueError("the backend 'snapshot' requires a WeightSource, got None")
        engine = cls(init_info, client=client, source=source)
        if init_info.is_sender:
            given = {"url": init_info.url, "folder": init_info.folder, "storage_options": init_info.storage_options}
            client.init_weight_transfer_engine(given)
        return engine

    @torch.no_grad()
    def send_weights(self, step: int | None = None) -> None:
        """Publish the weights as a version of a training step, and let all workers load it.

        `step` is the number of this call by default. All trainer ranks call it.
        """
        self._rounds += 1
        with call_of("send_weights", None, ranks=True) as exchange:
            if exchange.agree(self._failed, any, bool, bool):  # what the workers have is unknown: begin again
                self._publisher, self._failed = self._new_publisher(), False
        pending = self._publisher.publish(self._rounds if step is None else step, state_of(self.source, self.rank))
        version = pending.wait().version
        if self.is_sender:
            try:
                self._update(version)
            except BaseException:
                self._failed = True  # on the next call, the other ranks learn it
                raise

    def _update(self, version: int) -> None:
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version, "load": False})  # all of them have it, or none loads it
        except BaseException:
            with suppress(Exception):  # the other workers still wait for an end
                self.client.finish_weight_update()
            raise
        self.client.update_weights({"version": version, "load": True})
        self.client.finish_weight_update(weight_version=str(version))
