"""Reads of mapped tensors: the parts of stored tensors that fill a box of a mapped one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from snapshot.formats.foreign import is_packed
from snapshot.loading.requests import ReadRequest
from snapshot.loading.scatter import copy_into, request_grid, request_packed_grid
from snapshot.manifest.entries import MappedTensorEntry
from snapshot.manifest.validate import Files
from snapshot.maps.grid import Grid
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.geometry import Box, boxes_of_range, find_flat_ranges

_SAMPLE = 4 << 20
_SAMPLES = 4
"""Number of ranges of a tensor, of _SAMPLE bytes each, whose reads are planned to see how scattered they are."""


def request_mapped(
    path: str,
    entry: MappedTensorEntry,
    target: torch.Tensor,
    box: Box,
    files: Files,
    *,
    add: Callable[[Any, torch.Tensor, Box], None],
    finish: list[Callable[[], None]],
    live: bool,
) -> Iterator[ReadRequest]:
    """Yield requests that fill a tensor of the box's shape with that part of a mapped tensor.

    Whole boxes of a stored tensor are passed to `add`: its pieces, their destination, and the box.
    """
    target = target.detach()
    for stored_tensor, whole in entry.parts_in(box):
        pieces = stored_tensor.pieces()
        for clipped in whole.clip("target", box):
            for grid in clipped.simplified().split(BLOCK // ITEMSIZE[stored_tensor.dtype]):
                cover = grid.cover("source")
                view = _view_box(grid, target, box)
                if view is not None:
                    add(pieces, view, cover)
                    continue
                if any(files[stored.location].in_base for _, stored in pieces):
                    held = torch.empty(cover.sizes, dtype=BY_NAME[stored_tensor.dtype])
                    add(pieces, held, cover)
                    views = grid.view("target", target, box.offsets), grid.view("source", held, cover.offsets)
                    finish.append(partial(copy_into, *views))
                    continue
                given: Any = {"grid": grid, "target": target, "origin": box.offsets, "live": live}
                for piece, stored in pieces:
                    if is_packed(stored):
                        yield from request_packed_grid(path, stored, piece, finish=finish, **given)
                    else:
                        yield from request_grid(path, stored, piece, **given)


def is_spread(entry: MappedTensorEntry) -> bool:
    """Return True if reading the tensor range by range, in C order, would read far more bytes than it has."""
    itemsize = ITEMSIZE[entry.dtype]
    count, sample = math.prod(entry.shape), _SAMPLE // itemsize
    block, wanted, read = BLOCK // itemsize, 0, 0
    if count <= sample:
        sources = {id(part.entry): math.prod(part.entry.shape) for part in entry.parts}
        if sum(sources.values()) <= 4 * count + _SAMPLES * block:
            return False
    for begin in range(0, count, max(1, count // _SAMPLES)):
        for _, box in boxes_of_range(entry.shape, begin, min(count, begin + sample)):
            wanted += box.numel
            for part in entry.parts_in(box):
                for clipped in part.grid.clip("target", box):
                    for grid in clipped.simplified().split(block):
                        ranges = find_flat_ranges(tuple(part.entry.shape), grid.cover("source"), block // 4)
                        read += sum(-(-(end - first) // block) * block for first, end in ranges)
            if read > 4 * (wanted + _SAMPLES * block):
                return True
    return False


def _view_box(grid: Grid, target: torch.Tensor, box: Box) -> torch.Tensor | None:
    """Return the places of a grid's elements in the target, in the axes of the source; None unless they are a box."""
    axes = grid.source_axes()
    if axes is None:
        return None
    view = grid.view("target", target, box.offsets).permute([number for number in axes if number is not None])
    for axis, number in enumerate(axes):
        if number is None:
            view = view.unsqueeze(axis)
    return view
