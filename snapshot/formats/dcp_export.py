"""Metadata of a torch.distributed.checkpoint directory, created with torch's own classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from snapshot.errors import RestoreError


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
    return pickle.dumps(m.Metadata(described, planner_data=dict(paths), storage_data=stored))
