"""Composer's checkpoints as snapshots: a callback that saves while training continues, and the loading of its files.

    saver = SnapshotSaver("run", save_interval="100ba", keep=3)
    trainer = Trainer(..., callbacks=[saver], load_path=saver.latest())

The contents are those of Composer's own checkpoints. Composer's `load_path`, `load_weights_only`, `load_ignore_keys`
and `load_exclude_algorithms` apply to them.
"""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import replace
from typing import Any

from snapshot.distributed.exchange import call_of
from snapshot.distributed.group import group_of_this_rank
from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.handover import Given, is_snapshot
from snapshot.io.loop import run
from snapshot.io.url import URL
from snapshot.manager.manager import SnapshotManager
from snapshot.manager.policies import Policy
from snapshot.manager.root import Root
from snapshot.save.take_options import TAKE_OPTIONS, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot

try:
    from composer import Callback as _Callback
    from composer import Event
    from composer.utils import checkpoint as _checkpoint
    from composer.utils import create_interval_scheduler, reproducibility
except ImportError as error:
    _Callback, _MISSING = object, str(error)
else:
    _MISSING = ""

_LOADER = "_torch_load_with_validation"
"""Composer's function that returns the contents of a file."""
_PARTS = ("state", "rng")
"""The parts of Composer's checkpoints, which are the keys of a snapshot."""
_ADVICE = "a snapshot of SnapshotSaver is loaded by Composer; pass load_path to its Trainer"


class SnapshotSaver(_Callback):  # type: ignore[misc]
    """Saves Composer's checkpoints as snapshots, `<folder>/step-<batch>`: `Trainer(callbacks=[saver])`.

    Rank 0 writes, as for Composer's own checkpoints that are not sharded. A snapshot is committed as a whole or not at
    all. It works in one process and with `DistributedDataParallel`. FSDP is refused.

    Args:
        folder: A folder that all ranks share.
        save_interval: As of Composer's `CheckpointSaver`: `"1ep"`, `"100ba"`, or a function.
        keep: Number of snapshots to keep, or a policy; all by default.
        asynchronous: Continue training while a snapshot is written. The next save, or the end of training, waits for
            it, and raises on all ranks if it failed.
        options: More options of the takes.

    Raises:
        MissingExtraError: Composer cannot be imported.
        SnapshotError: The adapter does not know this version of Composer. Or `folder` is a URL.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        save_interval: Any = "1ep",
        *,
        keep: Policy | int | None = None,
        asynchronous: bool = True,
        options: TakeOptions = TAKE_OPTIONS,
    ) -> None:
        if _MISSING:
            raise MissingExtraError(f"composer cannot be imported: {_MISSING}; pip install mosaicml")
        if "://" in os.fspath(folder):
            raise SnapshotError(f"SnapshotSaver: folder must be a folder that all ranks share, got {os.fspath(folder)}")
        read_snapshots()
        self.folder = os.fspath(folder)
        self._is_due = save_interval if callable(save_interval) else create_interval_scheduler(save_interval)
        self._keep = keep
        self._asynchronous = asynchronous
        self._options = replace(options, allow_pickle="error")
        self._manager: SnapshotManager | None = None
        self._pending: PendingSnapshot | None = None
        self._saved: Any = None

    def latest(self) -> str | None:
        """Return the snapshot that was taken last, for `Trainer(load_path=...)`, or None if there is none.

        Suspect snapshots are passed over, with a log line.
        """
        step = run(Root(URL.parse(self.folder), None).find_last_taken())
        return None if step is None else os.path.join(self.folder, f"step-{step}")

    def init(self, state: Any, logger: Any) -> None:
        """Raise if ranks have parts of the model, before training starts."""
        if state.fsdp_config is not None or getattr(state, "tp_config", None) is not None:
            raise SnapshotError("SnapshotSaver: the model must be whole on each rank, but it is sharded by FSDP or TP")

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        """Save if a snapshot is due."""
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: Any, logger: Any) -> None:
        """Save if a snapshot is due."""
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: Any, logger: Any) -> None:
        """Save if a snapshot is due."""
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: Any, logger: Any) -> None:
        """Wait for the last snapshot. Raise on all ranks if it failed."""
        with call_of("save", None, ranks=True, timeout=self._options.timeout) as exchange:
            self.wait()
            exchange.agree(True, all, bool, bool)

    def post_close(self) -> None:
        """Wait for the last snapshot after an error, and end retention."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def wait(self) -> None:
        """Wait for the snapshot that is written in the background. Raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _save_if_due(self, state: Any, event: Any) -> None:
        batch = state.timestamp.batch
        if not self._is_due(state, event) or self._saved == batch:
            return
        self._saved = batch
        with call_of("save", None, ranks=True, timeout=self._options.timeout) as exchange:  # ranks share errors
            self.wait()
            exchange.agree(True, all, bool, bool)
            content = state.state_dict()  # by all ranks together, as the next line
            held = {"state": content, "rng": {"ranks": reproducibility.get_rng_state()}}
            if exchange.rank == 0:
                self._take(int(batch), held)
            exchange.agree(True, all, bool, bool)

    def _take(self, batch: int, held: dict[str, Any]) -> None:
        content = held["state"]
        noted = content["metadata"]
        content["metadata"] = {key: str(each) if isinstance(each, str) else each for key, each in noted.items()}
        if self._manager is None:
            self._manager = SnapshotManager(self.folder, keep=self._keep, pg=group_of_this_rank(), signals=())
        take = self._manager.async_take if self._asynchronous else self._manager.take
        taken = take(
            batch, {key: Given(value, _ADVICE) for key, value in held.items()}, overwrite=True, options=self._options
        )
        self._pending = taken if isinstance(taken, PendingSnapshot) else None


def read_snapshots() -> None:
    """Let Composer's `load_path` name a snapshot. A `SnapshotSaver` calls this.

    Raises SnapshotError if Composer has no function that this module replaces.
    """
    original = getattr(_checkpoint, _LOADER, None)
    if original is None or list(inspect.signature(original).parameters) != ["checkpoint_filepath", "map_location"]:
        raise SnapshotError(
            f"SnapshotSaver: composer.utils.checkpoint of this version has no {_LOADER}(checkpoint_filepath, "
            "map_location); the adapter was written for Composer 0.32"
        )
    if not hasattr(original, "reads_snapshots"):
        setattr(_checkpoint, _LOADER, _loading(original))


def _loading(original: Any) -> Any:
    @functools.wraps(original)
    def load(checkpoint_filepath: Any, map_location: str) -> Any:
        if not _is_snapshot(checkpoint_filepath):
            return original(checkpoint_filepath, map_location)
        snapshot = Snapshot(os.path.realpath(checkpoint_filepath), group_of_this_rank())
        state, rng = (snapshot.get_state_dict_for_key(key, replicate_from_rank0=True) for key in _PARTS)
        return {"state": state, "rng": rng["ranks"]}

    load.reads_snapshots = True  # type: ignore[attr-defined]
    return load


def _is_snapshot(path: Any) -> bool:
    return os.path.isdir(path) and is_snapshot(os.path.realpath(path))
