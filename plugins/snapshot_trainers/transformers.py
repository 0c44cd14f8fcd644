"""Hugging Face's Trainer with its optimizer, scheduler, scaler and random numbers in a snapshot.

The snapshot is in the Trainer's checkpoint folder. The model next to it is written by `save_pretrained`, so that
`from_pretrained` finds it. With FSDP2, the sharded model is in the snapshot, too, and so is a model that
`save_pretrained` converts. A callback cannot do this, since the Trainer saves and loads these itself. So a mixin
replaces those methods. Nothing of transformers is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

from snapshot.distributed.exchange import call_of
from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.events import log
from snapshot.interop.framework_checks import expect_overridden
from snapshot.interop.handover import TrainableState
from snapshot.interop.weight_digests import FOLDER, KEY, STATE_KEY, digest_state, digest_weights, put_state_digest
from snapshot.io.loop import is_exiting, start_in_thread
from snapshot.save.take_options import TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.state.rng import RNGState
from snapshot_trainers.staged_weights import StagedWeights
from snapshot_trainers.trainer_folders import (
    check_weights,
    delete_old,
    expect_weights,
    find_last,
    has_optimizer,
    mark_weights,
    present_name,
    put_back,
    put_notices,
    set_aside,
    snapshot_in,
    sync_files,
    unmark_weights,
)
from snapshot_trainers.trainer_order import TrainerOrder

_HOOKS = {
    "_save_checkpoint": 2,
    "_save_optimizer_and_scheduler": 1,
    "_save_scaler": 1,
    "_save_rng_state": 1,
    "_load_from_checkpoint": 2,
    "_load_optimizer_and_scheduler": 1,
    "_load_scaler": 1,
    "_load_rng_state": 1,
    "_load_best_model": 0,
}
"""The Trainer's methods that the mixin replaces -> their number of arguments."""
_PARALLEL = ("NOT_PARALLEL", "NOT_DISTRIBUTED", "DISTRIBUTED")


class SnapshotTrainerMixin(TrainerOrder):
    """Saves and loads the training state of a Trainer: `class MyTrainer(SnapshotTrainerMixin, Trainer)`.

    Everything else is unchanged: `save_steps`, `save_total_limit`, `train(resume_from_checkpoint=True)`.

    The mixin supports one process, `DistributedDataParallel`, and FSDP2. State that is equal on all ranks is written
    once, by all of them together, and each rank stores its own random numbers. A run with FSDP2 can resume on another
    number of ranks. An epoch goes on after the samples that were seen, on any number of ranks and with any batch size;
    how many steps are left, and so the end of the scheduler, follows from that. FSDP1, DeepSpeed and TPUs have their
    own checkpoint formats, and are refused. Checkpoints that the Trainer wrote without the mixin are read by the
    Trainer.
    """

    snapshot_options: ClassVar[TakeOptions] = TakeOptions()
    """Options of the takes, such as `TakeOptions(durable=False)`."""
    snapshot_metadata: ClassVar[Mapping[str, Any]] = {}
    """JSON values to store in each snapshot."""
    snapshot_in_background: ClassVar[bool] = False
    """True to write while training continues, also the weights. A checkpoint is complete some time after `on_save`.

    Until then, one checkpoint more than `save_total_limit` is kept. With `push_to_hub`, saves are never in the
    background.
    """

    snapshot_verify_weights: ClassVar[bool] = True
    """False to load weights that were changed on purpose after the save, without a comparison with their digests."""

    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    model: Any
    state: Any
    _get_output_dir: Any
    _pending: PendingSnapshot | None = None
    _finished: Future[None] | None = None
    _metadata: Future[Mapping[str, Any]] | None = None
    _verified: str | None = None
    _saving = _asynchronous = False

    def __init__(self, *args: Any, **options: Any) -> None:
        expect_overridden(type(self), SnapshotTrainerMixin, _HOOKS, "transformers 5")
        self._weights = StagedWeights()
        self._damaged = set[str]()
        self._said: dict[str, str] = {}
        super().__init__(*args, **options)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train until the last checkpoint is committed.

        `True` resumes from the last one that is complete and undamaged. A damaged one that is named is an error.
        """
        self._verified = self._resumes_from = None
        if resume_from_checkpoint:
            find = partial(find_last, weights=self.snapshot_verify_weights, damaged=self._damaged)
            looks = resume_from_checkpoint is True
            with call_of("restore", None, ranks=True) as exchange:
                if self.args.should_save:
                    put_back(self.args.output_dir, weights=self.snapshot_verify_weights)
                # one rank looks: another one may see an older listing
                found = exchange.agree(True, lambda _: (looks and find(self.args.output_dir)) or "", bool, str)
            self._verified = found or None
            self._resumes_from = found or (None if looks else str(resume_from_checkpoint))
            resume_from_checkpoint = (found or True) if looks else present_name(str(resume_from_checkpoint))
        try:
            result = super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]
        except BaseException:
            with suppress(SnapshotError, OSError):  # it was logged, and this error is the first one
                self._end_writes()
            raise
        self._wait_for_snapshot()
        self._weights = StagedWeights()  # it holds memory
        return result

    # In the order in which the Trainer calls them

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        limit, folder = self.args.save_total_limit, self._get_output_dir(trial=trial)
        self._wait_for_snapshot()
        new = os.path.join(folder, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            set_aside(new)
            if not self.args.push_to_hub:  # the Trainer uploads the folder with all that is in it
                mark_weights(new)
        # the end of training then deletes all checkpoints but the best one, without waiting
        deletes = limit == 1 and self.args.metric_for_best_model and not self.args.load_best_model_at_end
        background = self.snapshot_in_background and not self.args.push_to_hub and not deletes and not is_exiting()
        self._metadata = Future() if background else None
        self._saving, self._asynchronous = True, background
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            if self.args.should_save:
                put_state_digest(new, self.state)  # the Trainer has added the states of callbacks
        except BaseException:
            self._give_metadata(SnapshotError(f"{new}: another part of the checkpoint failed"))
            raise
        finally:
            self._saving, self._asynchronous, self.args.save_total_limit = False, False, limit
        if not background:
            self._finish(new, None, limit, self.state.best_model_checkpoint)
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot-trainer")
        arguments = new, self._pending, limit, self.state.best_model_checkpoint
        self._finished = pool.submit(self._finish_in_background, *arguments)
        pool.shutdown(wait=False)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the model. In a checkpoint that is saved in the background, its tensors are only copied here."""
        with self._weights.capture() if self._asynchronous else nullcontext():
            super().save_model(*args, **options)  # type: ignore[misc]
        if self._saving:
            self.args.save_total_limit = None  # old checkpoints are deleted when the new one is complete

    def _finish_in_background(self, new: str, pending: PendingSnapshot | None, *arguments: Any) -> None:
        try:
            self._finish(new, pending, *arguments)
        except BaseException as error:
            self._give_metadata(error if isinstance(error, SnapshotError) else SnapshotError(f"{new}: {error}"))
            if pending is not None:
                with suppress(SnapshotError):  # it fails for the same reason
                    pending.wait()
            raise

    def _finish(self, new: str, pending: PendingSnapshot | None, limit: int | None, best: str | None) -> None:
        """Write the weights that are left, wait for the commit, flush all to disk, and delete old checkpoints."""
        self._weights.write()
        if pending is not None:
            self._give_metadata(self._metadata_of(new) if self.args.should_save else {})
            pending.wait()
        if self.args.should_save:
            durable = self.snapshot_options.durable
            if durable:
                sync_files(new)
            unmark_weights(new, durable=durable)  # before older ones are deleted
            self._damaged.discard(new)
            delete_old(new, limit or 0, best, self._damaged)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._refuse_what_is_not_ours()
        state = self._resumable()
        if getattr(self, "is_fsdp_enabled", False) or self._is_converted():  # the Trainer does not load such files
            state["model"] = self._model_state()
        if self.args.should_save:
            put_notices(output_dir)
        self._said = digest_state(self.state)  # training changes it while the snapshot is written
        metadata: Any = self._metadata  # the weights are written later
        if not self._asynchronous:
            metadata = self._begin_metadata(output_dir) if self.args.should_save else None
        take = Snapshot.async_take if self._asynchronous else Snapshot.take
        saved = take(
            os.path.join(output_dir, FOLDER),
            {**state, "rng": RNGState(), **({"loader": self._loader} if self._loader is not None else {})},
            replicated=[*state] if self.args.world_size > 1 and self.snapshot_options.replicated is None else None,
            overwrite=True,
            metadata=metadata,
            options=self.snapshot_options,
        )
        self._pending = saved if isinstance(saved, PendingSnapshot) else None

    def _begin_metadata(self, checkpoint: str) -> Mapping[str, Any] | Future[dict[str, Any]]:
        """Read the weights in a thread while the snapshot is written, whose commit waits for the digests."""
        read = partial(self._metadata_of, checkpoint)
        return read() if is_exiting() else start_in_thread(read, "snapshot-io-weights")

    def _metadata_of(self, checkpoint: str) -> dict[str, Any]:
        """Return the metadata of the user, and the digests of the state and the weights, whose files are whole."""
        kept = {name: each for name, each in self.snapshot_metadata.items() if name not in (KEY, STATE_KEY)}
        return {**kept, **self._said, **digest_weights(checkpoint)}

    def _give_metadata(self, found: Mapping[str, Any] | SnapshotError) -> None:
        """Give a snapshot in the background its metadata, or the reason that it has none. The commit waits for it."""
        later = self._metadata
        if later is None or later.done():
            return
        with suppress(InvalidStateError):  # the snapshot failed meanwhile
            if isinstance(found, SnapshotError):
                later.set_exception(found)
            else:
                later.set_result(found)

    def _wait_for_snapshot(self) -> None:
        """Wait until a checkpoint that is written in the background is complete. Raise on all ranks if it failed."""
        if self._finished is not None or self._pending is not None:
            with call_of("save", None, ranks=True, timeout=self.snapshot_options.timeout) as exchange:
                self._end_writes()
                exchange.agree(True, all, bool, bool)

    def _end_writes(self) -> None:
        """Wait for this rank's part. If that is interrupted, the next call waits for it."""
        finished, pending = self._finished, self._pending
        if finished is not None:
            wait([finished])
        self._finished = self._pending = None
        if finished is not None:
            finished.result()
        elif pending is not None:  # the rest of its checkpoint failed, with an error of its own
            with suppress(SnapshotError):
                pending.wait()

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scaler is in the snapshot."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the state is in the snapshot, and no random numbers are drawn between the two calls."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_weights(resume_from_checkpoint)
        self._expect_weights(resume_from_checkpoint)
        if not self._restore_model(resume_from_checkpoint):
            self._expect_same_names(resume_from_checkpoint)
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._refuse_what_is_not_ours()
        snapshot = snapshot_in(checkpoint)
        if snapshot is not None:
            snapshot.restore(self._resumable(), unused="ignore")
        elif has_optimizer(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            raise SnapshotNotFoundError(
                f"{checkpoint}: has neither {FOLDER!r} nor the state of an optimizer and a scheduler, so training "
                "cannot resume there; to start a new training with its weights, load them with from_pretrained"
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and snapshot_in(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._has_random_numbers:
            self._has_random_numbers = False
            return
        snapshot = snapshot_in(checkpoint)
        if snapshot is None:
            super()._load_rng_state(checkpoint)
        elif (saved := snapshot.metadata.world_size) == self.args.world_size:
            snapshot.restore({"rng": RNGState()}, unused="ignore")
        else:
            log.info("%s: random numbers of %d ranks do not fit %d", checkpoint, saved, self.args.world_size)

    def _load_best_model(self) -> None:
        self._wait_for_snapshot()
        self._expect_weights(self.state.best_model_checkpoint)
        if not self._restore_model(self.state.best_model_checkpoint):
            self._expect_same_names(self.state.best_model_checkpoint)
            super()._load_best_model()  # type: ignore[misc]

    def _expect_weights(self, checkpoint: str) -> None:
        """Raise on all ranks if the weights of a checkpoint are not those that were saved."""
        if not self.snapshot_verify_weights or checkpoint == self._verified:
            return
        with call_of("restore", None, ranks=True) as exchange:
            if self.args.should_save:  # the others read the same files
                expect_weights(checkpoint)
            exchange.agree(True, all, bool, bool)

    def _restore_model(self, checkpoint: str) -> bool:
        """Restore the model, and return True, if it is in the snapshot, or next to it for a model that FSDP shards."""
        snapshot = snapshot_in(checkpoint)
        if snapshot is None:
            return False
        if "0/model" in snapshot.get_manifest():
            snapshot.restore({"model": self._model_state()}, unused="ignore")
        elif getattr(self, "is_fsdp_enabled", False):
            source = Snapshot(checkpoint)
            source.restore({"model": self._model_state()}, unused="ignore", rename=self._adapter_names() or None)
        else:
            return False
        return True

    def _adapter_names(self) -> dict[str, str]:
        """Return the names of a PEFT model's adapter in its file -> those in the model."""
        adapters = getattr(self.model, "active_adapters", ())
        names = self._model_state().state_dict() if hasattr(self.model, "peft_config") else ()
        from snapshot_merge.peft import saved_name  # of another plugin, for adapters only

        saved = {name: saved_name(name, each) for name in names for each in adapters[:1]}
        return {f"model/{there}": f"model/{name}" for name, there in saved.items() if there is not None}

    def _model_state(self) -> Any:
        """Return the model, or of a PEFT model the adapter."""
        return TrainableState(self.model) if hasattr(self.model, "peft_config") else self.model

    def _is_converted(self) -> bool:
        """Return True if `save_pretrained` writes other names or values, such as a file's tensor for each expert.

        `from_pretrained` converts them back, but the Trainer does not.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):  # adapters are not converted
            return False
        used = getattr(model, "_weight_conversions", None)
        if used is not None:
            return bool(used)
        revert = getattr(sys.modules.get("transformers.modeling_utils"), "revert_weight_conversion", None)
        nothing: dict[str, Any] = {}
        return revert is not None and revert(model, nothing) is not nothing

    def _expect_same_names(self, checkpoint: str) -> None:
        """Raise if the Trainer would load only some of the weights of a checkpoint, with a warning."""
        if not getattr(self, "is_fsdp_enabled", False) and self._is_converted():
            raise SnapshotError(
                f"{checkpoint}: its weights have other names than those of the model, since save_pretrained converts "
                "them, and the Trainer does not convert them back; load them with from_pretrained"
            )

    def _resumable(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        state = {"optimizer": optimizer, "scheduler": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        return state

    def _refuse_what_is_not_ours(self) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        others = {
            "FSDP1": getattr(self, "is_fsdp_enabled", False) and getattr(plugin, "fsdp_version", 1) != 2,
            "DeepSpeed": getattr(self, "is_deepspeed_enabled", False),
            str(self.args.parallel_mode): getattr(self.args.parallel_mode, "name", "") not in _PARALLEL,
        }
        found = [name for name, is_there in others.items() if is_there]
        if found:
            raise SnapshotError(
                f"SnapshotTrainerMixin: training uses {found[0]}, which has its own checkpoint format; remove the "
                "mixin, or train in one process, with DistributedDataParallel, or with FSDP2"
            )
