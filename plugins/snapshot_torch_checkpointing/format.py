"""How torch_checkpointing's folders are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

TORCH_CHECKPOINTING = Format(
    "torch_checkpointing",
    20,
    "snapshot_torch_checkpointing.checkpoint:describe_folder",
    r"metadata\.pkl",
    writes="torch_checkpointing",
    plan="snapshot_torch_checkpointing.export:plan",
)
