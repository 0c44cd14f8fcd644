"""Files of torch.save that a conversion writes."""

from __future__ import annotations

from snapshot.formats.torch_save import LaterTensor
from snapshot.transform.export import Export, Plan, Request


def plan(export: Export, request: Request) -> Plan:
    """Plan one file."""
    assert request.name is not None
    made = Plan("torch", sums={})
    made.changed += export.changes_in_torch()
    made.left_out += export.lose_classes()
    export.add_state(made, request.name, export.state(LaterTensor), {})
    return made
