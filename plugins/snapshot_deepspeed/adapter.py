"""DeepSpeed's checkpoints as snapshots: an engine that DeepSpeed gives its files, and asks for them.

    engine.checkpoint_engine = SnapshotCheckpointEngine()

Each tag is one snapshot of all ranks, with an object for each of DeepSpeed's files. Nothing of DeepSpeed is imported
until it is needed. The order of calls is that of `DeepSpeedEngine.save_checkpoint` in DeepSpeed 0.19.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from snapshot.errors import SnapshotError, SnapshotExistsError, SnapshotNotFoundError
from snapshot.events import log
from snapshot.interop.framework_checks import expect_version
from snapshot.interop.objects import build_objects, change_leaves
from snapshot.io.system import store_file
from snapshot.save.take_options import TAKE_OPTIONS, TakeOptions
from snapshot.saved import SavedObject, class_name
from snapshot.snapshot import PendingSnapshot, Snapshot
from snapshot.state.compound import find_form

FOLDER = "snapshot"
"""Folder of the snapshot in a tag's folder."""
VERSIONS = ("0.19",)
_NOTICE = b"snapshot: this file is in the folder 'snapshot', and SnapshotCheckpointEngine reads it\n"
"""Content of the files that DeepSpeed lists by name before it asks for them."""
_SCALERS = tuple(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler"))
_CLASSES = (
    *_SCALERS,
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)
"""Classes in DeepSpeed's states. No other class is imported by name."""


class SnapshotCheckpointEngine:
    """Saves and loads the checkpoints of DeepSpeed, as each rank assigns it: `engine.checkpoint_engine = ...`.

    `save_checkpoint` and `load_checkpoint` work as before, with ZeRO 0 to 3 and pipelines. A tag that was not committed
    cannot be loaded, and `latest` does not name it. Objects that only a pickle can hold are refused by name.
    Checkpoints that DeepSpeed wrote are loaded by DeepSpeed. `save_16bit_model` writes its file as before.

    Args:
        asynchronous: Write while training continues. `latest` then names the tag after its commit. The next
            `save_checkpoint`, and `wait`, wait for it, and raise if it failed.
        options: More options of the takes.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
        SnapshotError: The adapter does not know this version of DeepSpeed.
    """

    name = "SnapshotCheckpointEngine"

    def __init__(self, *, asynchronous: bool = False, options: TakeOptions = TAKE_OPTIONS) -> None:
        expect_version("deepspeed", VERSIONS, self.name)
        self._asynchronous = asynchronous
        self._options = replace(options, allow_pickle="error")  # it keeps the key, whose file is read once
        self._info: Any = None
        """DeepSpeed's description of the checkpoint that it writes."""
        self._files: dict[str, Any] | None = None
        """Contents by name; None if DeepSpeed does not write a tag."""
        self._pending: PendingSnapshot | None = None
        self._named = threading.Event()
        """Set when `latest` names the pending tag, or will not."""
        self._read: Snapshot | None = None

    # In the order in which `save_checkpoint` calls them

    def create(self, info: Any) -> None:
        """Begin a checkpoint: `info` has its `tag`, `save_dir` and `save_latest`. Wait for the one before."""
        self.wait()
        foreign = next((each for each in sorted(_tag_folder(info).glob("*.pt")) if not _is_notice(each)), None)
        if foreign is not None:
            raise SnapshotExistsError(f"{foreign}: DeepSpeed itself has saved this tag; save under another tag")
        self._info, self._files = info, None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder. That of the tag is created by all ranks, even by those that write no file."""
        os.makedirs(path, exist_ok=exist_ok)
        if self._info is not None and self._files is None and Path(path) == _tag_folder(self._info):
            self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Add a file to the checkpoint. One that is not in the tag's folder is written by torch, as before."""
        folder, name = os.path.split(path)
        if self._files is not None and Path(folder) == _tag_folder(self._info):
            self._files[name] = state_dict  # what cannot be stored is refused by the take, on all ranks
            return
        partial_path = f"{path}.partial"
        torch.save(state_dict, partial_path)
        os.replace(partial_path, path)

    def is_decoupled(self) -> bool:
        """Return True, so that DeepSpeed never writes `latest`: it would empty the file first, and a crash may follow.

        `save_checkpoint` asks after its last file. The checkpoint is written here, or its write begins. Each step asks,
        too. A save that ended with an error must not begin there.
        """
        caller = getattr(inspect.currentframe(), "f_back", None)
        if self._files is not None and caller and caller.f_code.co_name == "save_checkpoint":
            self._begin(Snapshot.async_take if self._asynchronous else Snapshot.take)
        return True

    def commit(self, info: Any) -> bool:
        """Write the checkpoint, and return when it is committed. Raise on all ranks if that failed."""
        if self._files is not None:
            self._begin(Snapshot.take)
        return True

    def get_commit_info(self) -> None:
        """Return None: DeepSpeed has nothing to commit later."""

    def set_commit_info(self, info: Any) -> None:
        """Do nothing. `create` gets the same information."""

    def wait(self) -> None:
        """Wait for the checkpoint that is written in the background. Raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self._named.wait()

    def cleanup(self) -> None:
        """Wait, when the engine ends."""
        self.wait()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of a file, with tensors in host memory.

        Raises:
            SnapshotNotFoundError: The tag was not committed, or has no such file.
        """
        file = Path(path)
        if file.is_file() and not _is_notice(file):
            engine = import_module("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
            return engine.TorchCheckpointEngine().load(path, map_location=map_location)
        snapshot = self._open(file.parent)
        if not any(name.split("/")[1:] == [file.name] for name in snapshot.get_manifest()):
            raise SnapshotNotFoundError(f"{file}: the checkpoint in {file.parent / FOLDER} has no such file")
        return build_objects(snapshot.read_object(file.name), path, _find_class)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True for the rank that writes what all data-parallel ranks have."""
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the elements of a view are written, so DeepSpeed need not copy it first."""
        return False

    def _begin(self, take: Callable[..., Any]) -> None:
        info, self._info = self._info, None
        files, self._files = self._files or {}, None
        folder = _tag_folder(info)
        state = {name: _Contents(content, str(folder / name)) for name, content in files.items()}
        self._read = None
        taken = take(folder / FOLDER, state, overwrite=True, options=self._options)
        names = info.save_latest and _is_leader()
        if isinstance(taken, PendingSnapshot):
            self._pending, self._named = taken, threading.Event()
            taken.work.add_done_callback(partial(_end_tag, info if names else None, self._named))
        elif names:
            _write_latest(info)

    def _open(self, folder: Path) -> Snapshot:
        if self._read is None or self._read.path != str(folder / FOLDER):
            snapshot = Snapshot(folder / FOLDER)
            if not snapshot.exists():
                raise SnapshotNotFoundError(f"{folder}: this checkpoint was not committed; load another tag")
            self._read = snapshot
        return self._read


def write_files(tag: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the files of a committed tag as DeepSpeed writes them, for its tools and for `Snapshot.convert`.

    Args:
        tag: The folder of the tag, such as `run/global_step100`.
        target: A folder with the same name in a new place: `files/global_step100`. Files there are replaced.
    """
    engine = SnapshotCheckpointEngine()
    folder, made = Path(tag), Path(target)
    names = [name.split("/")[1] for name in engine._open(folder).get_manifest() if name.count("/") == 1]
    made.mkdir(parents=True, exist_ok=True)
    for name in names:
        torch.save(engine.load(str(folder / name)), made / name)
    (made.parent / "latest").write_text(made.name)


class _Contents:
    """Stateful wrapper of a file's contents."""

    def __init__(self, value: Any, path: str) -> None:
        self._value, self._path = value, path

    def state_dict(self) -> Any:
        Path(self._path).write_bytes(_NOTICE)  # a load of a tag that is not committed then says so
        return change_leaves(self._value, self._path, _to_saved)

    def load_state_dict(self, state: Any) -> None:
        raise SnapshotError("DeepSpeed restores its checkpoints itself; load them with SnapshotCheckpointEngine")


def _tag_folder(info: Any) -> Path:
    return Path(info.save_dir, info.tag)


def _is_notice(file: Path) -> bool:
    """Return True for a notice, and for the part of one that a crash left."""
    with file.open("rb") as opened:
        return _NOTICE.startswith(opened.read(len(_NOTICE) + 1))


def _is_leader() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _end_tag(info: Any, named: threading.Event, work: Any) -> None:
    """Let `latest` name a tag that was committed, and set the event. `info`: None if this rank names no tag."""
    try:
        if info is not None and not work.cancelled() and work.exception() is None:
            _name_latest(info)
    finally:
        named.set()


def _name_latest(info: Any) -> None:
    try:
        _write_latest(info)
    except OSError as error:
        log.error("%s: is committed, but `latest` could not be written: %s", _tag_folder(info), error)


def _write_latest(info: Any) -> None:
    """Replace `latest`, and remove the new ones that a crash has left beside it."""
    for left in Path(info.save_dir).glob("latest.????????.tmp"):
        left.unlink(missing_ok=True)
    store_file(os.path.join(info.save_dir, "latest"), info.tag.encode(), durable=True)


def _to_saved(value: Any, path: str) -> Any:
    """Return a loss scaler as a saved object. Raise for a class that a load would not know."""
    name = class_name(type(value))
    if name in _SCALERS:
        return SavedObject("dataclass", name, vars(value))
    if find_form(type(value)) is not None and name not in _CLASSES:
        raise SnapshotError(f"{path}: an object of class {name} cannot be stored; store its fields as plain values")
    return value


def _find_class(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind) if name in _CLASSES else None
