"""Folders that DeepSpeed resumes from, which a conversion writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from snapshot.formats import dcp_notice
from snapshot.manifest import document
from snapshot.transform.export import Export, ExportPlan, ExportRequest
from snapshot_deepspeed.universal import MODEL, OPTIMIZER
from snapshot_deepspeed.universal_target import LATEST, plan_universal


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan a universal checkpoint."""
    if export.choice.dtype is not None:
        raise ValueError("dtype must be None for to='deepspeed-universal': the optimizer's weights are float32")
    made = ExportPlan("deepspeed-universal", sums={}, others=(document.METADATA, dcp_notice.METADATA, "latest"))
    made.left_out += export.lose_classes()
    made.changed += export.changes_in_torch()
    state, stands = export.stand_in_state()

    def read(paths: Sequence[str]) -> dict[str, Any]:
        return export.objects.read({path: export.entries[path] for path in paths})

    found = plan_universal(state, export.source.url, stands, read)
    made.left_out += found.left_out
    for name, value, dtype in found.files:
        export.add_state(made, name, value, stands, dtype)
    made.last = lambda: found.last
    made.markers = (LATEST, f"{found.tag}/{OPTIMIZER}", f"{found.tag}/{MODEL}")
    made.more = rf"{re.escape(found.tag)}/.+"
    return made
