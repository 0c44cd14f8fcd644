"""torchtune's `DistributedCheckpointer`, with snapshots in the place of DCP's files. Tested with version 0.6.

from snapshot.interop.torchtune import use_snapshots

use_snapshots()  # before the recipe makes its checkpointer, on every rank
"""

from __future__ import annotations

from snapshot.errors import MissingExtraError
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter


def use_snapshots() -> None:
    """Let torchtune's `DistributedCheckpointer` save and load snapshots in this process.

    It finds its newest checkpoint by a `.metadata`, which `SnapshotWriter` puts beside each snapshot. Checkpoints that
    DCP wrote are loaded as before. torchtune asks for files that are not synced; snapshots are durable all the same.

    Raises:
        MissingExtraError: torchtune cannot be imported.
    """
    try:
        from torchtune.training.checkpointing import _checkpointer
    except ImportError as error:
        raise MissingExtraError(f"torchtune cannot be imported: {error}; pip install torchtune") from error
    _checkpointer.FileSystemWriter = _DurableWriter
    _checkpointer.FileSystemReader = SnapshotReader


class _DurableWriter(SnapshotWriter):
    """A writer that syncs, whatever torchtune asks for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "durable": True})  # type: ignore[arg-type]
