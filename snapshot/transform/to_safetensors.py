"""Safetensors that a conversion writes: one file, or several with an index."""

from __future__ import annotations

import json

from snapshot.formats import dcp_notice, hugging_face
from snapshot.manifest import document
from snapshot.plan.layout import group_in_order, plan_exact_file
from snapshot.transform.export import Export, ExportPlan, ExportRequest


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan one file, or a folder in Hugging Face's layout."""
    made = ExportPlan("safetensors")
    export.add_named(made, list(export.named_tensors(made)))
    sizes = [leaf.nbytes for leaf in made.leaves]
    if request.name is not None:
        made.files.append((request.name, plan_exact_file(made.leaves, range(len(sizes)))))
        return made
    groups = group_in_order(sizes, request.target.shard_bytes)
    made.markers = (hugging_face.INDEX, hugging_face.ALONE)
    made.others = (document.METADATA, dcp_notice.METADATA)
    made.more = r"model-\d{5}-of-\d{5}\.safetensors"
    if len(groups) == 1:
        made.files.append((hugging_face.ALONE, plan_exact_file(made.leaves, groups[0])))
        return made
    located = {}
    for number, group in enumerate(groups, 1):
        where = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        made.files.append((where, plan_exact_file(made.leaves, group)))
        located.update({made.leaves[index].path: where for index in group})
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": located}
    made.last = lambda: [(hugging_face.INDEX, json.dumps(index, indent=2).encode())]
    return made
