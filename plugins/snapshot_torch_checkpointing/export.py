"""Folders of torch_checkpointing that a conversion writes."""

from __future__ import annotations

from snapshot.errors import UnsupportedFormatError
from snapshot.formats import dcp_notice
from snapshot.manifest import document
from snapshot.text import listed
from snapshot.transform.export import Export, ExportPlan, ExportRequest
from snapshot_torch_checkpointing.checkpoint import KEY, METADATA, encode_metadata


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan a folder: a file of torch.save for each key, and the metadata."""
    made = ExportPlan("torch_checkpointing", sums={}, markers=(METADATA,))
    made.others = (document.METADATA, dcp_notice.METADATA)
    made.more = rf"{KEY.pattern}_\d+\.(pt|safetensors|json|bin)"
    made.left_out += export.lose_classes()
    made.changed += export.changes_in_torch()
    state, stands = export.stand_in_dict(made)
    odd = [repr(key) for key in state if not (isinstance(key, str) and KEY.fullmatch(key))]
    if odd:
        raise UnsupportedFormatError(
            f"{export.source.url}: keys of torch_checkpointing must have only letters, digits, '-' and '_'; rename "
            f"or exclude:{listed(odd)}"
        )
    for key, value in state.items():
        export.add_state(made, f"{key}_0.pt", value, stands)
    made.last = lambda: [(METADATA, encode_metadata(state))]
    return made
