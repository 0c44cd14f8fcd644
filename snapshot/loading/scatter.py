"""Destinations of a stored range in a tensor: its own memory if possible, otherwise a copy box by box."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch

from snapshot.formats.embedded_tensors import EmbeddedLayout
from snapshot.loading.requests import Place, ReadRequest, request_all
from snapshot.manifest import entries as e
from snapshot.maps.grid import Grid
from snapshot.runtime.accelerators import accelerator_of
from snapshot.runtime.arena import Slot
from snapshot.tensors.addresses import is_plain
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.geometry import Box, Shape, boxes_of_range, find_flat_ranges, intersect, is_flat_range, whole_box
from snapshot.tensors.strides import contiguous_strides, find_enclosing_tensor, measure_span

_BITS = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in BY_NAME.items()
    if re.fullmatch(r"u?int[1-7]|bits.*|float4.*", name)
}
"""Dtypes that torch cannot copy, with the dtype of equal size that is copied instead."""
_GAP = 64 << 10
"""Gaps up to this size are read through instead of issuing a second request."""


def add_requests(
    requests: list[ReadRequest],
    path: str,
    stored: e.TensorEntry,
    piece: Box,
    *,
    target: torch.Tensor,
    box: Box,
    live: bool,
) -> int:
    """Add requests for the part of a stored piece that is in a box. Return its number of elements.

    `target` has the box's shape.
    """
    same = BY_NAME[stored.dtype] == target.dtype and is_plain(target)
    if same and piece == box:  # the common case, in the fewest steps
        requests.append(request_all(path, stored, target.data_ptr(), None, live))
        return box.numel
    shared = intersect(piece, box)
    if shared is None:
        return 0
    itemsize = ITEMSIZE[stored.dtype]
    within = shared.relative_to(box.offsets)
    if shared == piece and same and is_flat_range(box.sizes, within):
        first = find_flat_ranges(box.sizes, within, 0)[0][0]
        requests.append(request_all(path, stored, target.data_ptr() + first * itemsize, None, live))
        return shared.numel
    place = _make_placer(stored, piece, target, box)
    device = accelerator_of(target)
    if shared == piece:
        requests.append(request_all(path, stored, 0, place, live))
        requests[-1].device = device
        return shared.numel
    begin = stored.byte_range[0]
    inner = shared.relative_to(piece.offsets)
    if same and is_flat_range(piece.sizes, inner) and is_flat_range(box.sizes, within):
        address = target.data_ptr() + find_flat_ranges(box.sizes, within, 0)[0][0] * itemsize
        for first, stop in find_flat_ranges(piece.sizes, inner, 0):
            wanted = begin + first * itemsize, begin + stop * itemsize
            low, high = _whole_blocks(stored, *wanted)
            if low < high:  # straight to its destination; the rest of the range are parts of blocks
                direct = ReadRequest(path, stored, stored.location, low, high, address + low - wanted[0], None, live)
                requests.append(direct)
                edges = [(wanted[0], low), (high, wanted[1])]
                for edge in (each for each in edges if each[0] < each[1]):
                    low, high = _enclosing_blocks(stored, *edge)
                    requests.append(ReadRequest(path, stored, stored.location, low, high, 0, place, live))
                return shared.numel
    requests += _request_box(path, stored, inner, place, live=live, device=device)
    return shared.numel


def _request_box(
    path: str, stored: e.TensorEntry, box: Box, place: Place, *, live: bool, device: torch.device | None
) -> Iterator[ReadRequest]:
    """Yield requests for whole blocks that cover a box of a stored piece."""
    itemsize = ITEMSIZE[stored.dtype]
    begin, last = stored.byte_range[0], -1
    for first, stop in find_flat_ranges(stored.shape, box, _GAP // itemsize):
        low, high = _enclosing_blocks(stored, begin + first * itemsize, begin + stop * itemsize)
        low = max(low, last)
        if low < high:
            yield ReadRequest(path, stored, stored.location, low, high, 0, place, live, device=device)
            last = high


def request_grid(
    path: str, stored: e.TensorEntry, piece: Box, *, grid: Grid, target: torch.Tensor, origin: Shape, live: bool
) -> Iterator[ReadRequest]:
    """Yield requests for the elements of a grid in a stored piece, into a tensor that begins at `origin`."""
    shared = intersect(piece, grid.cover("source"))
    if shared is None or not grid.clip("source", piece):
        return
    target = target.detach()

    def place(start: int, slot: Slot, at: int, length: int) -> None:
        for there, held in _arrived_boxes(stored, piece, start, slot.tensor[at : at + length]):
            for each in grid.clip("source", there):
                source = each.view("source", held, there.offsets)
                copy_into(each.view("target", target, origin), source, non_blocking=slot.pinned)

    inner = shared.relative_to(piece.offsets)
    yield from _request_box(path, stored, inner, place, live=live, device=accelerator_of(target))


def request_packed_grid(
    path: str,
    stored: e.TensorEntry,
    piece: Box,
    *,
    grid: Grid,
    target: torch.Tensor,
    origin: Shape,
    live: bool,
    finish: list[Callable[[], None]],
) -> Iterator[ReadRequest]:
    """Yield the request for the elements of a grid in a packed piece, whose layout is not known yet."""
    shared = intersect(piece, grid.cover("source"))
    if shared is None or not grid.clip("source", piece):
        return

    def opens(layout: EmbeddedLayout) -> list[ReadRequest]:
        if layout.strides == contiguous_strides(stored.shape):
            begin = layout.begin + layout.offset * ITEMSIZE[stored.dtype]
            end = begin + math.prod(stored.shape) * ITEMSIZE[stored.dtype]
            raw = e.TensorEntry(stored.location, (begin, end), stored.dtype, stored.shape)
            return list(request_grid(path, raw, piece, grid=grid, target=target, origin=origin, live=live))
        held = torch.empty(shared.sizes, dtype=BY_NAME[stored.dtype])
        inner = shared.relative_to(piece.offsets)
        requests = add_unpacked_requests(path, stored, layout, inner, target=held, live=live, finish=finish)
        for each in grid.clip("source", shared):
            views = each.view("target", target, origin), each.view("source", held, shared.offsets)
            finish.append(partial(copy_into, *views))
        return requests

    request = request_all(path, stored, 0, None, live)
    request.opens = opens
    request.device = accelerator_of(target)
    yield request


def _enclosing_blocks(stored: e.TensorEntry, low: int, high: int) -> tuple[int, int]:
    """Return the shortest range of whole blocks that contains a range of a file."""
    begin, end = stored.byte_range
    return begin + (low - begin) // BLOCK * BLOCK, min(end, begin + -(-(high - begin) // BLOCK) * BLOCK)


def _whole_blocks(stored: e.TensorEntry, low: int, high: int) -> tuple[int, int]:
    """Return the longest range of whole blocks in a range of a file; all of it if there are no digests."""
    if stored.digest is None:
        return low, high
    begin, end = stored.byte_range
    return begin + -(-(low - begin) // BLOCK) * BLOCK, high if high == end else begin + (high - begin) // BLOCK * BLOCK


def add_unpacked_requests(
    path: str,
    stored: e.TensorEntry,
    layout: EmbeddedLayout,
    box: Box,
    *,
    target: torch.Tensor,
    live: bool,
    finish: list[Callable[[], None]],
) -> list[ReadRequest]:
    """Return the requests for a box of a packed tensor, into a tensor of the box's shape."""
    itemsize = ITEMSIZE[stored.dtype]
    begin = layout.begin + layout.offset * itemsize
    requests: list[ReadRequest] = []
    if layout.strides == contiguous_strides(stored.shape):
        end = begin + math.prod(stored.shape) * itemsize
        raw = e.TensorEntry(stored.location, (begin, end), stored.dtype, stored.shape)
        add_requests(requests, path, raw, whole_box(stored.shape), target=target, box=box, live=live)
        return requests
    found = find_enclosing_tensor(stored.shape, layout.strides)
    if found is None:  # overlapping or repeated elements: read in file order, then copied
        count = measure_span(stored.shape, layout.strides)
        held = torch.empty(count, dtype=BY_NAME[stored.dtype])
        raw = e.TensorEntry(stored.location, (begin, begin + count * itemsize), stored.dtype, (count,))
        requests.append(request_all(path, raw, held.data_ptr(), None, live))
        finish.append(lambda: copy_into(target, held.as_strided(stored.shape, layout.strides)[box.slices()]))
        return requests
    end = min(begin + math.prod(found.sizes) * itemsize, layout.begin + layout.nbytes)
    raw = e.TensorEntry(stored.location, (begin, end), stored.dtype, found.sizes)
    offsets = tuple(box.offsets[axis] for axis in found.order) + (0,) * found.padded
    sizes = tuple(box.sizes[axis] for axis in found.order) + (1,) * found.padded
    target = target.permute(found.order)
    target = target.unsqueeze(-1) if found.padded else target
    add_requests(requests, path, raw, whole_box(found.sizes), target=target, box=Box(offsets, sizes), live=live)
    return requests


def place_of(stored: e.TensorEntry) -> tuple[str, int]:
    """Return a key that identifies the memory of a stored tensor."""
    extra = stored.extra
    view = f" {extra.strides} {extra.storage_offset}" if extra is not None and extra.strides is not None else ""
    packed = f" {stored.serializer}" if stored.serializer != "raw" else ""
    return stored.location + view + packed, stored.byte_range[0]


def _make_placer(stored: e.TensorEntry, piece: Box, target: torch.Tensor, box: Box) -> Place:
    """Return a function that copies arriving bytes of a stored piece to a tensor that represents `box`."""
    target = target.detach()

    def place(start: int, slot: Slot, at: int, length: int) -> None:
        for there, source in _arrived_boxes(stored, piece, start, slot.tensor[at : at + length]):
            shared = intersect(there, box)
            if shared is None:
                continue
            within = target[shared.relative_to(box.offsets).slices()]
            copy_into(within, source[shared.relative_to(there.offsets).slices()], non_blocking=slot.pinned)

    return place


def _arrived_boxes(
    stored: e.TensorEntry, piece: Box, start: int, data: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a stored piece that arrived: bytes from `start` on, and each box's elements in them."""
    first = start // ITEMSIZE[stored.dtype]
    arrived = data.view(BY_NAME[stored.dtype])
    for position, part in boxes_of_range(piece.sizes, first, first + arrived.numel()):
        elements = arrived[position - first : position - first + part.numel].view(part.sizes)
        yield part.moved_by(piece.offsets), elements


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy elements even if the target requires a gradient."""
    target, source = target.detach(), source.detach()
    bits = _BITS.get(target.dtype)
    if bits is not None and source.dtype == target.dtype:
        target, source = target.view(bits), source.view(bits)
    with torch.no_grad():
        target.copy_(source, non_blocking=non_blocking)
