"""Folders of `torch.distributed.checkpoint` that a conversion writes."""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import torch

from snapshot.errors import RestoreError, UnsupportedFormatError
from snapshot.formats import torch_save
from snapshot.formats.dcp_notice import METADATA
from snapshot.manifest import document
from snapshot.manifest import entries as e
from snapshot.plan.layout import Extent, FilePlan
from snapshot.text import listed
from snapshot.transform import target
from snapshot.transform.export import KEPT_BY_TORCH, ArchiveLeaves, Export, ExportPlan, ExportRequest, lay_out_archive

ALIGNMENT = 64
_LANE = 16 << 20
"""A file has at least this many bytes, if there are several."""
_NARROW = re.compile("u?int[1-7]")
"""Dtypes of less than a byte, which torch cannot copy when DCP loads them."""


class _Archive(msgspec.Struct):
    """A tensor, or an object with tensors: a pickle, what it holds, and the numbers of its leaves."""

    content: bytes
    held: dict[str, bytes]
    numbers: range


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan a folder. Its files are about equally large."""
    made = ExportPlan("dcp", sums={}, markers=(METADATA,), others=(document.METADATA,), more=r"__\d+_\d+\.distcp")
    lanes = request.operation.exchange.agree(request.destination.settings.lane_count(), sum, int, int)
    made.left_out += export.lose_classes()
    _expect_supported(export)
    state, stands = export.stand_in_dict(made)
    flat, paths = flatten_state(state)
    left_out, changed = target.container_changes(state, paths)
    made.left_out += left_out
    made.changed += changed
    for path, entry in export.entries.items():
        made.changed += target.array_changes(path, entry)
    items: list[tuple[str, int, Any]] = []
    objects: dict[str, str] = {}
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and id(value) in stands:
            _, path, entry = stands[id(value)]
            made.changed += target.tensor_changes(path, entry)
            items.append((name, value.nbytes, entry))
        else:
            size, content, within = _pickle_object(made, export, value, stands)
            items.append((name, size, content))
            objects.update(dict.fromkeys(within, name))
    made.changed += target.memory_changes(
        export.entries, lambda path, other: path in objects and objects[path] == objects.get(other)
    )
    lanes = max(1, min(lanes, sum(size for _, size, _ in items) // _LANE))
    loads = [0] * lanes
    dealt: list[list[tuple[str, Any]]] = [[] for _ in range(lanes)]
    for name, size, content in items:
        lane = loads.index(min(loads))
        loads[lane] += size
        dealt[lane].append((name, content))
    placed: dict[str, tuple[str, int, int]] = {}
    for number, lane_items in enumerate(dealt):
        where = f"__0_{number}.distcp"
        made.files.append((where, _plan_file(made, export, where, lane_items, placed)))
    made.last = lambda: [(METADATA, encode_metadata(flat, paths, placed))]
    return made


def _expect_supported(export: Export) -> None:
    parts = [path for path, entry in export.entries.items() if isinstance(entry, e.TensorPartsEntry)]
    if parts:
        raise UnsupportedFormatError(
            f"{export.source.url}: DCP does not support tensors of several parts; exclude them:{listed(parts)}"
        )
    narrow = [
        f"{path}: {entry.dtype}"
        for path, entry in export.entries.items()
        if entry.is_tensor and _NARROW.fullmatch(entry.dtype)
    ]
    if narrow:
        raise UnsupportedFormatError(
            f"{export.source.url}: DCP cannot load these dtypes; exclude them:{listed(narrow)}"
        )


def _pickle_object(
    plan: ExportPlan, export: Export, value: Any, stands: Mapping[int, Any]
) -> tuple[int, bytes | _Archive, list[str]]:
    """Return an object that DCP stores as one archive: the size of its tensors, the archive, and their paths.

    DCP does not split tuples, so their tensors are inside the archive. They are written part by part like all others.
    """
    leaves = ArchiveLeaves(plan, export.choice.cast_dtype)
    within: list[str] = []

    def absent(tensor: torch.Tensor) -> torch_save.AbsentTensor | None:
        if id(tensor) not in stands:
            return None
        _, path, entry = stands[id(tensor)]
        plan.changed += target.tensor_changes(path, entry, KEPT_BY_TORCH)
        within.append(path)
        return leaves.stand_in(path, entry)

    content, held = torch_save.pickle_state(value, absent)
    if not within:
        return 0, archive_object(value), within
    return sum(plan.leaves[number].nbytes for number in leaves.numbers), _Archive(content, held, leaves.numbers), within


def _plan_file(
    plan: ExportPlan, export: Export, where: str, items: list[tuple[str, Any]], placed: dict[str, tuple[str, int, int]]
) -> FilePlan:
    """Plan a file with some items, and add the place of each."""
    extents: list[Extent] = []
    position = 0
    for name, content in items:
        padding = -position % ALIGNMENT
        if padding:
            extents.append(Extent(plan.leaf("", "uint8", (padding,), bytes(padding)), position, position + padding))
            position += padding
        if isinstance(content, bytes):
            size = len(content)
            extents.append(Extent(plan.leaf(name, "uint8", (size,), content), position, position + size))
        else:
            made = content if isinstance(content, _Archive) else _wrap_tensor(plan, export, name, content)
            size = lay_out_archive(
                plan, "archive", made.content, made.held, numbers=made.numbers, base=position, extents=extents
            )
        placed[name] = where, position, size
        position += size
    return FilePlan(b"", tuple(extents), position)


@lru_cache(maxsize=1024)
def _pickle_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of one tensor in its own archive. Tensors of one shape have equal pickles."""
    return torch_save.pickle_state(torch_save.AbsentTensor("0", dtype, shape))[0]


def _wrap_tensor(plan: ExportPlan, export: Export, name: str, entry: e.AnyTensor) -> _Archive:
    dtype, shape = export.choice.cast_dtype(entry.dtype), tuple(entry.shape)
    number = plan.leaf(name, dtype, shape, entry)
    return _Archive(_pickle_tensor(dtype, shape), {}, range(number, number + 1))


# Metadata of a torch.distributed.checkpoint directory, created with torch's own classes.


def flatten_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state by DCP's flat names, and the path of each name.

    DCP flattens the state to be loaded in the same way.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # slow import, rarely needed

    try:
        flat, paths = flatten_state_dict(dict(state))
    except ValueError as error:  # names that are equal when joined
        raise RestoreError(f"DCP joins names with dots: {error}; rename one of them") from error
    return dict(flat), dict(paths)


def archive_object(value: Any) -> bytes:
    """Return an object as DCP stores it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def encode_metadata(
    flat: Mapping[str, Any], paths: Mapping[str, Any], placed: Mapping[str, tuple[str, int, int]]
) -> bytes:
    """Return the content of `.metadata`: each name with its location and its path in the nested state."""
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    stored = {}
    for name, value in flat.items():
        where = _StorageInfo(*placed[name])
        if isinstance(value, torch.Tensor) and value.is_meta:
            offsets = torch.Size([0] * value.dim())
            described[name] = m.TensorStorageMetadata(
                properties=m.TensorProperties(dtype=value.dtype),
                size=value.size(),
                chunks=[m.ChunkStorageMetadata(offsets=offsets, sizes=value.size())],
            )
            stored[m.MetadataIndex(name, offsets)] = where
        else:
            described[name] = m.BytesStorageMetadata()
            stored[m.MetadataIndex(name)] = where
    file = io.BytesIO()
    _MetadataPickler(file).dump(m.Metadata(described, planner_data=dict(paths), storage_data=stored))
    return file.getvalue()


class _MetadataPickler(pickle.Pickler):
    """Pickles the properties of a tensor with the five fields that every version of torch reads.

    Torch 2.15 has a sixth field, the strides, and earlier versions cannot read its pickles.
    """

    def reducer_override(self, value: Any) -> Any:
        from torch.distributed.checkpoint.metadata import TensorProperties

        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined,no-untyped-call]
