"""NeMo AutoModel's `Checkpointer`, with snapshots instead of DCP's files.

    from snapshot_trainers.automodel import use_snapshots

    use_snapshots()  # before the recipe is set up, on every rank

The rest of AutoModel's checkpointing is unchanged: its settings, its asynchronous saves, its pointers `LATEST` and
`LOWEST_VAL`, and retention. Checkpoints that DCP wrote are loaded as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter

_HOOKS = {
    "_do_save": ["self", "state_dict", "path", "storage_writer"],
    "_do_load": ["self", "state_dict", "path", "storage_reader", "is_init_step"],
}
"""Methods of `Checkpointer` that are replaced -> their arguments."""


def use_snapshots(checkpointer: Any = None, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let AutoModel save and load snapshots in this process.

    The optimizer is in the snapshot `optim` of a checkpoint. The model is in the snapshot `model` with
    `checkpoint.model_save_format: torch_save`. With `safetensors`, and for adapters of PEFT, AutoModel writes it.

    Args:
        checkpointer: A class like AutoModel's `Checkpointer`, which is the default. The class itself is changed, since
            recipes refer to it.
        storage_options: Options for the storage plugin.

    Raises:
        MissingExtraError: AutoModel cannot be imported.
        SnapshotError: The class has not the methods that are replaced.
    """
    kind = _load_checkpointer() if checkpointer is None else checkpointer
    if hasattr(getattr(kind, "_do_save", None), "saves_snapshots"):
        return
    for name, arguments in _HOOKS.items():
        method = getattr(kind, name, None)
        if method is None or list(inspect.signature(method).parameters) != arguments:
            raise SnapshotError(
                f"use_snapshots: {kind.__qualname__} of this version of nemo_automodel has no method {name}"
                f"({', '.join(arguments)}); the adapter was written for version 0.7"
            )
    kind._do_save = _saving(kind._do_save, storage_options)
    kind._do_load = _loading(kind._do_load, storage_options)
    module = sys.modules[kind.__module__]
    module.FileSystemReader = functools.partial(  # type: ignore[attr-defined]  # it lists the names in a checkpoint
        SnapshotReader, storage_options=storage_options
    )


def _load_checkpointer() -> Any:
    try:
        from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
    except ImportError as error:
        raise MissingExtraError(f"nemo_automodel cannot be imported: {error}; pip install nemo-automodel") from error
    return Checkpointer


def _is_ours(path: Any) -> bool:
    return not str(path).startswith("msc://")  # the storage of another library


def _saving(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def _do_save(self: Any, state_dict: dict[str, Any], path: str, storage_writer: Any = None) -> Any:
        if storage_writer is None and _is_ours(path):
            storage_writer = SnapshotWriter(path, storage_options=options)
        return original(self, state_dict, path, storage_writer)

    _do_save.saves_snapshots = True  # type: ignore[attr-defined]
    return _do_save


def _loading(original: Any, options: Mapping[str, Any] | None) -> Any:
    @functools.wraps(original)
    def _do_load(
        self: Any, state_dict: dict[str, Any], path: str, storage_reader: Any = None, is_init_step: bool = False
    ) -> Any:
        if storage_reader is None and _is_ours(path):
            storage_reader = SnapshotReader(path, storage_options=options)
        return original(self, state_dict, path, storage_reader, is_init_step)

    return _do_load
