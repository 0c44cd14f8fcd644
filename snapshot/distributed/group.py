"""Who takes part in a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from snapshot.errors import SnapshotError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_one_rank(pg: ProcessGroup | None) -> None:
    """Raise where several ranks take part: each would take the whole snapshot for its own."""
    if pg is None and not (dist.is_available() and dist.is_initialized()):
        return
    size = dist.get_world_size(pg)
    if size > 1:
        raise SnapshotError(
            f"the process group has {size} ranks, and this version takes and restores snapshots of one process; "
            "give each rank a path of its own and pg=dist.new_subgroups(1)[0]"
        )
