"""Lightning's checkpoints as snapshots: `SnapshotCheckpointIO` and `SnapshotCallback`.

`SnapshotCheckpointIO` stores the checkpoints that Lightning itself decides to save. `SnapshotCallback` saves
asynchronously, with the random number generators that Lightning leaves out.

Both work for `lightning.pytorch` and `pytorch_lightning`. The classes extend those of the library that was imported
before this module, or else of the installed one.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snapshot import KeepSpread, KeepWithin
from snapshot.distributed.group import group_of_this_rank, ranks_of
from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.handover import Given
from snapshot.interop.new_folders import NewFolder, hide_folder, remove_folder
from snapshot.io.loop import run
from snapshot.io.url import URL
from snapshot.manager.policies import KeepBest, KeepLatest, Policy, checked_policy, every_policy, split_policy
from snapshot.manager.retention import remove_unkept
from snapshot.manager.root import Root
from snapshot.manager.step_metadata import add_note, checked_metrics
from snapshot.manifest.document import OWN_FORMATS
from snapshot.save.take_options import TAKE_OPTIONS, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.state.rng import RNGState
from snapshot_trainers.lightning_loaders import FitLoaders

KEY = "lightning"
"""Key in a snapshot's metadata for the description of Lightning's checkpoint."""
LOADERS = "loaders"
"""Key in a snapshot for the places of the training loaders."""
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies in which every rank has the whole model."""
_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def _library() -> str:
    """Return the name of the Lightning package in use."""
    imported = [library for library in _LIBRARIES if sys.modules.get(library)]
    for library in imported or _LIBRARIES:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{library}.".startswith(f"{error.name}."):
                raise  # installed, but a dependency is missing
        else:
            return library
    raise MissingExtraError("Lightning is not installed: install the extra 'lightning'")


_NAME = _library()
_TorchCheckpointIO: Any = importlib.import_module(f"{_NAME}.plugins.io").TorchCheckpointIO
_LightningCallback: Any = importlib.import_module(f"{_NAME}.callbacks").Callback


_ADVICE = "Lightning restores its checkpoints itself; read them with SnapshotCheckpointIO"


def _app_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: Given(value, _ADVICE) for key, value in checkpoint.items()}


class SnapshotCheckpointIO(_TorchCheckpointIO):  # type: ignore[misc]
    """Lightning's checkpoints as snapshots: `Trainer(plugins=[SnapshotCheckpointIO()])`.

    A checkpoint is a folder, or a prefix in a bucket, with an object for each part of Lightning's dictionary
    (`0/state_dict/layer.weight`). Loading returns an equal dictionary, including types. Checkpoints that Lightning
    itself wrote are read and removed as before.

    Lightning takes every folder with a checkpoint's name for a whole one. So a new folder gets its name when it is
    committed, and loses it before its files are removed. Until then it is in the folder `.unfinished` beside it.

    Args:
        asynchronous: Continue training while a checkpoint is written. A checkpoint that Lightning wants to remove
            meanwhile is kept until the new one is committed.
        allow_pickle: Read objects that were stored as pickles, which can run any code. So does `weights_only=False` of
            `Trainer.fit`.
        storage_options: Options for the storage plugin.
        options: More options of the takes.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: TakeOptions = TAKE_OPTIONS,
    ) -> None:
        self._asynchronous = asynchronous
        self._allow_pickle = allow_pickle
        self._storage_options = storage_options
        self._options = options
        self._pending: PendingSnapshot | None = None
        self._named: Future[None] = Future()
        """Set when the pending checkpoint has its name, or will not get it."""
        self._doomed: list[str] = []

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save Lightning's checkpoint, and replace an existing one."""
        self._settle()
        new = NewFolder.of(path)
        name = _place(path) if new is None else new.aside
        arguments: dict[str, Any] = {
            "storage_options": storage_options or self._storage_options,
            "overwrite": True,
            "metadata": {KEY: {"keys": list(checkpoint)}},
            "options": self._options,
        }
        state, group = _app_state(checkpoint), group_of_this_rank()
        if self._asynchronous:
            self._named = Future()
            self._pending = Snapshot.async_take(name, state, group, **arguments)
            self._pending.work.add_done_callback(partial(_end_save, new, self._doomed, self._named))
        else:
            Snapshot.take(name, state, group, **arguments)
            if new is not None:
                new.name()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the saved dictionary, on the host unless `map_location` is a device."""
        self._settle()
        snapshot = self._snapshot(path, allow_pickle=self._allow_pickle or weights_only is False)
        if not _is_ours(snapshot):
            more = {} if weights_only is None else {"weights_only": weights_only}
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location=map_location, **more)
            return loaded
        told = snapshot.metadata.metadata.get(KEY)
        if told is None:
            raise SnapshotError(f"{path}: a snapshot, but not a Lightning checkpoint")
        checkpoint = {key: snapshot.get_state_dict_for_key(key, replicate_from_rank0=True) for key in told["keys"]}
        if isinstance(map_location, (str, torch.device)):
            return {key: _moved(value, torch.device(map_location)) for key, value in checkpoint.items()}
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint. While one is being written, defer the removal until that is committed.

        It loses its name then, so that a crash leaves no checkpoint that Lightning does not know. The next save removes
        its files.
        """
        self._doomed.append(os.fspath(path))
        if self._pending is None or self._named.done():
            self._settle()

    def teardown(self) -> None:
        """Wait for the pending checkpoint."""
        self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        doomed, self._doomed = self._doomed, []
        if pending is not None:
            pending.wait()  # if it raises, the old checkpoints are kept
            self._named.result()
        for path in doomed:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if os.path.islink(path):
            os.unlink(path)  # what it names is another checkpoint
        elif "://" not in path and not os.path.isfile(path):
            remove_folder(path)
        elif _is_ours(self._snapshot(path)):
            self._snapshot(path).delete()
        else:
            super().remove_checkpoint(path)

    def _snapshot(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Snapshot:
        found = Snapshot(_place(path), storage_options=self._storage_options, allow_pickle=allow_pickle)
        if found.path != os.fspath(path) and not found.exists():  # this library's own memory, as of SnapshotCallback
            return Snapshot(path, storage_options=self._storage_options, allow_pickle=allow_pickle)
        return found


def _end_save(new: NewFolder | None, doomed: Sequence[str], named: Future[None], work: Any) -> None:
    """Give a checkpoint its name if it was committed, and take it from those that Lightning has removed meanwhile."""
    try:
        if not work.cancelled() and work.exception() is None:
            if new is not None:
                new.name()
            for path in [each for each in doomed if "://" not in each]:
                hide_folder(path)
        named.set_result(None)
    except Exception as error:  # noqa: BLE001 - the next save raises it
        named.set_exception(error)


def _place(path: str | os.PathLike[str]) -> str:
    """Return the URL of a checkpoint. Lightning lists `memory://` with fsspec, whose memory is not this library's."""
    name = os.fspath(path)
    return f"fsspec+{name}" if name.startswith("memory://") else name


def _is_ours(snapshot: Snapshot) -> bool:
    """Return True for a snapshot of this library, False for a file that Lightning wrote."""
    return not os.path.isfile(snapshot.path) and snapshot.exists() and snapshot.metadata.format in OWN_FORMATS


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, _moved(child, device)) for key, child in value.items())
    return type(value)(_moved(child, device) for child in value) if type(value) in (list, tuple) else value


class SnapshotCallback(_LightningCallback):  # type: ignore[misc]
    """Saves asynchronously every few steps or seconds, so that a run resumes with bit-identical results.

    A snapshot includes every rank's random number generators, which Lightning's checkpoints leave out.

        callback = SnapshotCallback("run", every_n_steps=100)
        trainer = Trainer(callbacks=[callback], plugins=[SnapshotCheckpointIO()])
        trainer.fit(model, ckpt_path=callback.latest())

    Snapshots are in `<folder>/step-<global step>`, and are atomic. The callback works on one device and with
    `DDPStrategy`.

    The training loaders go on with the next batch of the epoch, in the same order, if they are `DataLoader`s of torch
    with map-style datasets, and the number of ranks is the same. Else a warning is logged, and the epoch begins again
    in another order, as in Lightning itself. Loaders with a `state_dict()` are left to Lightning.

    Args:
        folder: A folder that all ranks share, or a URL.
        every_n_steps: Save after this number of optimizer steps.
        every_n_seconds: Save at the end of the first batch after this time since the last save. Either option suffices.
        keep: Number of snapshots to keep, or a policy; all by default. Others are removed when a newer one is
            committed, as by a `SnapshotManager`, so pinned ones stay. Snapshots in other folders, which a run was
            resumed from, are not removed. `KeepBest` reads `trainer.callback_metrics`.
        data_order: Keep the places of the training loaders in their epochs. A restore into loaders with another order
            is an error then.
        storage_options: Options for the storage plugin.
        options: More options of the takes: `TakeOptions(worker="process")`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        every_n_seconds: float | None = None,
        keep: Policy | int | None = None,
        data_order: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        options: TakeOptions = TAKE_OPTIONS,
    ) -> None:
        if (every_n_steps or 0) < 1 and every_n_seconds is None:
            raise ValueError("SnapshotCallback: pass every_n_steps (at least 1), or every_n_seconds, or both")
        self.folder = os.fspath(folder)
        self._every = every_n_steps
        self._seconds = every_n_seconds
        self._keep = checked_policy(keep)
        self._data_order = data_order
        self._loaders: FitLoaders | None = None
        self._root = Root(URL.parse(self.folder), storage_options)
        self._storage_options = storage_options
        self._options = options
        self._pending: PendingSnapshot | None = None
        self._written: list[str] = []
        self._saved_step = -1
        self._seen_step = -1
        self._saved_at = time.monotonic()
        self._resumed: Snapshot | None = None

    def latest(self) -> str | None:
        """Return the snapshot that was taken last, for `fit(ckpt_path=...)`, or None if there is none.

        A higher step may be older: it was abandoned if a run has continued from a step before it. Suspect snapshots are
        passed over, with a log line. Raises SnapshotError if `folder` is a URL: name its snapshots explicitly.
        """
        if "://" in self.folder:
            raise SnapshotError(
                f"{self.folder}: latest() supports local folders only; name the snapshot to resume from"
            )
        step = run(self._root.find_last_taken())
        return None if step is None else os.path.join(self.folder, f"step-{step}")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise if the snapshots of this run could not be resumed, before training starts."""
        if stage != "fit":
            return
        strategy = type(trainer.strategy).__name__
        if strategy not in STRATEGIES:
            raise SnapshotError(
                f"SnapshotCallback: {strategy} does not hold the whole model on every rank; supported strategies: "
                f"{', '.join(STRATEGIES)}"
            )
        if not isinstance(trainer.strategy.checkpoint_io, SnapshotCheckpointIO):
            raise SnapshotError(
                "SnapshotCallback: only SnapshotCheckpointIO can read its snapshots; use "
                "Trainer(plugins=[SnapshotCheckpointIO()])"
            )
        if self._loaders is not None:
            self._loaders.detach()  # an earlier fit raised
        self._loaders = FitLoaders(trainer, partial(self._read_loaders, trainer)) if self._data_order else None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the loaders of the trainer alone."""
        if self._loaders is not None:
            self._loaders.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the list that `keep` applies to, so that a resumed run continues it."""
        return {"written": list(self._written)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the list of written snapshots."""
        self._written = []
        for path in state_dict["written"]:
            self._remember(path)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random numbers of an epoch's beginning here: iterators draw from them before training starts."""
        self._saved_at = time.monotonic()
        self._saved_step = self._seen_step = trainer.global_step
        snapshot, told = self._source(trainer)
        if "in_epoch" in told:
            self._resumed = snapshot
            self._saved_step = self._seen_step = told["step"]
            self._remember(os.fspath(trainer.ckpt_path))
            if not told["in_epoch"]:
                self._restore_random_numbers()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random numbers of the middle of an epoch here, since the next draw is for a batch."""
        self._restore_random_numbers()
        if self._loaders is not None:
            self._loaders.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a snapshot is due."""
        step, before = trainer.global_step, self._seen_step
        self._seen_step = step
        if step in (before, self._saved_step) or not self._is_time(trainer, step):
            return  # a checkpoint has no partially accumulated gradients
        self._settle(trainer)
        checkpoint = _dumped(trainer)
        in_epoch = not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        several = trainer.world_size > 1
        options, replicated = self._options, self._options.replicated
        if several and replicated is None:
            replicated = ["state_dict", "optimizer_states"]
        noted = {KEY: {"keys": list(checkpoint), "in_epoch": in_epoch, "step": step}}
        own: dict[str, Any] = {"rng": RNGState()}
        if self._loaders is not None:
            own[LOADERS] = Given(self._loaders.state_dict(), _ADVICE)
            noted[KEY][LOADERS] = True
        self._pending = Snapshot.async_take(
            f"{self.folder}/step-{step}",
            {**_app_state(checkpoint), **own},
            replicated=replicated,
            storage_options=self._storage_options,
            overwrite=True,
            metadata=add_note(step, self._metrics(trainer), noted),
            options=options,
        )
        self._saved_step, self._saved_at = step, time.monotonic()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last snapshot."""
        self._settle(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the pending snapshot when training fails."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.wait()
            except SnapshotError as error:  # the error of training must be raised
                exception.add_note(f"the last snapshot was not committed: {error}")

    def _is_time(self, trainer: Any, step: int) -> bool:
        if self._every and step % self._every == 0:
            return True
        if self._seconds is None:
            return False
        return bool(trainer.strategy.broadcast(time.monotonic() - self._saved_at >= self._seconds))

    def _settle(self, trainer: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        path = pending.wait().path
        if self._keep is None:
            return
        self._remember(path)
        steps = {_step(Path(each)): each for each in self._written}
        left = self._remove_unkept(list(steps), _step(Path(path))) if ranks_of(None).rank == 0 else set[int]()
        left = trainer.strategy.broadcast(left)  # each rank saves its list
        self._written = [each for step, each in steps.items() if step in left]

    def _remove_unkept(self, steps: list[int], newest: int) -> set[int]:
        """Remove snapshots that are not kept, and return the steps that are left. `steps`: in the order of writing.

        Steps after the newest are those of an earlier `fit`, so they are older. They fill the places of `KeepLatest`
        that are still free. A limit of bytes and `KeepSpread` cannot say which of them to remove, so those stay.
        """
        assert self._keep is not None
        earlier = [step for step in steps if step > newest]
        left = remove_unkept(self._root, self._keep, [step for step in steps if step <= newest], leftovers=True)
        places = max((each.n for each in split_policy(self._keep) if isinstance(each, KeepLatest)), default=0)
        undecided = any(isinstance(each, (KeepWithin, KeepSpread)) for each in every_policy(self._keep))
        gone = [] if undecided else earlier[: max(0, len(earlier) - max(0, places - len(left)))]
        if gone:
            left |= remove_unkept(self._root, self._keep, [newest, *gone], ignored=gone)
        return left | {*earlier}.difference(gone)

    def _metrics(self, trainer: Any) -> dict[str, float]:
        """Return the metrics that `keep` needs, as far as the trainer has them now."""
        names = [each.metric for each in every_policy(self._keep) if isinstance(each, KeepBest)]
        return checked_metrics({name: value for name, value in trainer.callback_metrics.items() if name in names})

    def _remember(self, path: str) -> None:
        """Append a snapshot to those that `keep` applies to. Skip snapshots of other folders."""
        own = f"{self.folder}/{path.rstrip('/').rpartition('/')[2]}"
        if URL.parse(own) == URL.parse(path):
            self._written = [*(each for each in self._written if each != own), own]

    def _source(self, trainer: Any) -> tuple[Snapshot | None, Mapping[str, Any]]:
        """Return the snapshot that the trainer resumes from, and what its metadata tells."""
        if trainer.ckpt_path is None:
            return None, {}
        snapshot = Snapshot(trainer.ckpt_path, storage_options=self._storage_options)
        return snapshot, snapshot.metadata.metadata.get(KEY, {}) if _is_ours(snapshot) else {}

    def _read_loaders(self, trainer: Any) -> Mapping[str, Any] | None:
        """Return the places of this rank's loaders in the snapshot that the trainer resumes from."""
        snapshot, told = self._source(trainer)
        if snapshot is None or not told.get(LOADERS):
            return None
        same = snapshot.metadata.world_size == trainer.world_size
        places: Mapping[str, Any] = snapshot.get_state_dict_for_key(LOADERS, replicate_from_rank0=not same)
        return places

    def _restore_random_numbers(self) -> None:
        snapshot, self._resumed = self._resumed, None
        if snapshot is not None:
            snapshot.restore({"rng": RNGState()}, unused="ignore")


def _step(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() else -1


def _dumped(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint dictionary that Lightning would save."""
    connector: Any = getattr(trainer, "_checkpoint_connector", None)
    if not hasattr(connector, "dump_checkpoint"):
        raise SnapshotError(
            "SnapshotCallback: unsupported version of Lightning: its checkpoint connector is not that of 2.0 to 2.6"
        )
    checkpoint: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
    return checkpoint
