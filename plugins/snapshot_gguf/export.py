"""Files of GGUF that a conversion writes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from snapshot.distributed.operation import Operation
from snapshot.maps.tensor_map import TensorMap
from snapshot.transform.export import Export, ExportPlan, ExportRequest
from snapshot.transform.target import Target
from snapshot_gguf.reader import NewTensor, choose_kind
from snapshot_gguf.target import GGUFTemplate, QuantisingSource, lay_out, options_of, read_template


def prepare(operation: Operation, target: Target) -> GGUFTemplate:
    """Return the file whose key-values are copied."""
    return read_template(operation, target)


def choose_map(template: GGUFTemplate, manifest: Mapping[str, Any]) -> TensorMap | None:
    """Return the map of names that a template gives."""
    return template.find_map(manifest)


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan one file for llama.cpp, with the key-values of a template."""
    template, quantisation = request.prepared, options_of(request.target).quantisation
    assert isinstance(template, GGUFTemplate)
    assert request.name is not None
    made, tensors, quantised = ExportPlan("gguf"), [], set[int]()
    for name, _, entry, dtype in export.named_tensors(made):
        shape = tuple(entry.shape)
        kind = choose_kind(dtype, shape, quantisation)
        number = made.leaf(name, "float32" if kind == quantisation else kind, shape, entry)
        if kind == quantisation:
            quantised.add(number)
        tensors.append(NewTensor(name, kind, shape))
    template.expect_tensors(each.name for each in tensors)
    made.files.append((request.name, lay_out(template, tensors, made.leaf)))
    if quantised:
        made.wrap = partial(_quantise, frozenset(quantised))
    return made


def _quantise(quantised: frozenset[int], reader: Any, memory: Any) -> QuantisingSource:
    return QuantisingSource(reader, quantised, memory)
