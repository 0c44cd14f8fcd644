"""torchtune's `DistributedCheckpointer`, with snapshots instead of DCP's files. Tested with version 0.6.

from snapshot_trainers.torchtune import use_snapshots

use_snapshots()  # before the recipe creates its checkpointer, on every rank
"""

from __future__ import annotations

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter


def use_snapshots() -> None:
    """Let torchtune's `DistributedCheckpointer` save and load snapshots in this process.

    The checkpointer finds the newest checkpoint by a `.metadata` file, which `SnapshotWriter` adds to each snapshot.
    Checkpoints that DCP wrote are loaded as before. torchtune requests unsynced files; snapshots are durable anyway.

    Raises:
        MissingExtraError: torchtune cannot be imported.
        SnapshotError: Its checkpointers use other classes than those of the known version.
    """
    try:
        from torchtune.training.checkpointing import _checkpointer
    except ImportError as error:
        raise MissingExtraError(f"torchtune cannot be imported: {error}; pip install torchtune") from error
    needed = ("FileSystemWriter", "FileSystemReader", "DistributedCheckpointer")
    missing = [name for name in needed if not hasattr(_checkpointer, name)]
    if missing:
        raise SnapshotError(
            f"{_checkpointer.__name__} has no {', '.join(missing)}; this version is not known, use torchtune 0.6"
        )
    _checkpointer.FileSystemWriter = _DurableWriter
    _checkpointer.FileSystemReader = SnapshotReader


class _DurableWriter(SnapshotWriter):
    """A writer that syncs, regardless of torchtune's arguments."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "durable": True})  # type: ignore[arg-type]
