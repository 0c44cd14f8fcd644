"""Quantised checkpoints: their weights are replaced by those that the quantised tensors stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.formats.derived import Derivation, DerivedStorage
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.loading.open import AT_ONCE, Opened
from snapshot.manifest.document import DerivedFile, ForeignFile, check_stored
from snapshot.manifest.entries import Extra, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.maps.tensor_map import TensorMap
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides
from snapshot.text import listed
from snapshot_quantised.layouts import Layout, Quantised, describe_weight, find_layouts, small_parts

_MOST_TABLES = 4096
"""Maximum number of different tables of a checkpoint, which are in memory. The known ones have two."""


class _Weight(NamedTuple):
    """A quantised weight in a manifest."""

    above: str
    """The path of its container."""
    layout: Layout
    entries: dict[str, TensorEntry]
    small: list[str]


def dequantise_checkpoint(opened: Opened, tensor_map: TensorMap | None) -> Opened:
    """Return a checkpoint with plain weights in place of quantised ones, if a map says so.

    Nothing is computed yet: the weights are derived files, which are computed range by range when they are read.
    """
    method = tensor_map.dequantise if isinstance(tensor_map, TensorMap) else None
    if method is None:
        return opened
    weights = _find_weights(opened, method)
    values = run(_read_values(opened, weights))
    places: dict[str, str | None] = {}
    """Path of a quantised tensor -> that of the weight that takes its place, or None."""
    entries: dict[str, TensorEntry] = {}
    files: dict[str, Any] = dict(opened.document.files)
    derivations: dict[str, Derivation] = {}
    wrong: list[str] = []
    for weight, own in zip(weights, values, strict=True):
        try:
            made = describe_weight(weight.layout, weight.entries, own, method)
        except ValueError as error:
            wrong.append(str(error))
            continue
        path = _join(weight.above, weight.layout.name)
        places |= {_join(weight.above, name): None for name in weight.layout.parts.values()}
        places[_join(weight.above, weight.layout.main)] = path
        location = f"{made.stored[0].location}/{path}"
        while location in files:
            location += "'"
        files[location] = DerivedFile(math.prod(made.shape) * ITEMSIZE[made.dtype])
        derivations[location] = made
        entries[path] = _describe_derived(location, made)
    _expect_none(opened, wrong)
    manifest: dict[str, Any] = {}
    for path, entry in opened.document.manifest.items():
        place = places.get(path, path)
        if place is not None:
            manifest[place] = entries.get(place, entry)
    storage = DerivedStorage(opened.storage, derivations, files, opened.session.packed_memory)
    document = msgspec.structs.replace(opened.document, manifest=manifest, files=files)
    return replace(opened, document=document, storage=storage)


def _join(above: str, name: str) -> str:
    return f"{above}/{encode_component(name)}"


def _describe_derived(location: str, made: Quantised) -> TensorEntry:
    nbytes = math.prod(made.shape) * ITEMSIZE[made.dtype]
    if not made.turned:
        return TensorEntry(location, (0, nbytes), made.dtype, made.shape)
    strides = tuple(reversed(contiguous_strides(made.shape)))
    shape = tuple(reversed(made.shape))
    return TensorEntry(location, (0, nbytes), made.dtype, shape, serializer="array", extra=Extra(strides=strides))


def _expect_none(opened: Opened, wrong: list[str]) -> None:
    if wrong:
        raise RestoreError(f"{opened.url}: quantised weights that cannot be read:{listed(wrong, 20)}", wrong)


def _find_weights(opened: Opened, method: str) -> list[_Weight]:
    """Return the quantised weights of a checkpoint. Raise RestoreError if there is none."""
    document = opened.document
    folders: dict[str, dict[str, Any]] = {}
    for path, entry in document.manifest.items():
        above, _, component = path.rpartition("/")
        if entry.is_tensor:
            folders.setdefault(above, {})[decode_component(component)] = entry
    found: list[_Weight] = []
    wrong: list[str] = []
    for above, tensors in folders.items():
        try:
            layouts = find_layouts(tensors, method)
        except ValueError as error:
            wrong.append(str(error))
            continue
        for layout in layouts:
            entries = {role: tensors[name] for role, name in layout.parts.items()}
            try:
                _expect_plain(opened, layout, entries)
                found.append(_Weight(above, layout, entries, small_parts(layout, entries)))
            except ValueError as error:
                wrong.append(str(error))
    _expect_none(opened, wrong)
    if not found:
        raise RestoreError(f"{opened.url}: has no weights that {method} has quantised", [])
    return found


def _expect_plain(opened: Opened, layout: Layout, entries: Mapping[str, Any]) -> None:
    """Raise ValueError unless each tensor is one range of a file of another library."""
    files = opened.document.files
    for role, entry in entries.items():
        file = files.get(entry.location) if isinstance(entry, TensorEntry) else None
        plain = type(file) is ForeignFile and file.exact and entry.serializer == "raw" and entry.extra is None
        if not plain:
            raise ValueError(f"{layout.parts[role]} must be in a file of safetensors; convert all to it first")
        check_stored(layout.parts[role], entry, files)


async def _read_values(opened: Opened, weights: list[_Weight]) -> list[dict[str, torch.Tensor]]:
    """Return the small tensors of each weight. Equal ones are the same."""
    known: dict[tuple[str, bytes], torch.Tensor] = {}

    async def read(weight: _Weight) -> dict[str, torch.Tensor]:
        made = {}
        for role in weight.small:
            entry = weight.entries[role]
            data = bytearray(entry.nbytes)
            await opened.storage.read_into(entry.location, entry.byte_range[0], [data])
            value = torch.frombuffer(data, dtype=BY_NAME[entry.dtype]) if data else torch.empty(0)
            made[role] = value if role == "state" else known.setdefault((entry.dtype, bytes(data)), value)
            if len(known) > _MOST_TABLES:
                raise CorruptSnapshotError(f"{opened.url}: has more than {_MOST_TABLES:,} different tables of codes")
        return made

    return await gather_limited(weights, read, AT_ONCE)
