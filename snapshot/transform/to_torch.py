"""Files of torch.save that a conversion writes."""

from __future__ import annotations

from snapshot.formats.torch_save import LaterTensor
from snapshot.transform.export import Export, ExportPlan, ExportRequest


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan one file."""
    assert request.name is not None
    made = ExportPlan("torch", sums={})
    made.changed += export.changes_in_torch()
    made.left_out += export.lose_classes()
    export.add_state(made, request.name, export.state(LaterTensor), {})
    return made
