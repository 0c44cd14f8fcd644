"""Reads of mapped tensors: the parts of stored tensors that fill a box of a mapped one."""

from __future__ import annotations

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
from snapshot.tensors.geometry import Box


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
    for stored_tensor, whole in entry.parts:
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
