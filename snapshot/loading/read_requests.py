"""Read requests: ranges of files, and their destinations in tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from snapshot.io.accelerators import accelerator_of
from snapshot.manifest import entries as e
from snapshot.manifest.document import Files
from snapshot.manifest.entries import MappedTensorEntry, ObjectEntry, TensorEntry
from snapshot.plan.layout import ReadPart
from snapshot.tensors.digest import BLOCK, SIZE
from snapshot.tensors.geometry import (
    Box,
    Grid,
    Shape,
    boxes_of_range,
    find_flat_ranges,
    intersect,
    is_flat_range,
    whole_box,
)
from snapshot.tensors.memory import (
    BY_NAME,
    ITEMSIZE,
    find_enclosing_tensor,
    is_flat,
    measure_span,
)

# Read requests: ranges of files, with their destination and their verification.

Copy = tuple[torch.Tensor, torch.Tensor]
"""A copy to make: the destination, and the elements for it, of the same shape."""
Place = Callable[[int, torch.Tensor], Iterable[Copy]]
"""A function that returns the copies of some bytes: (position in the stored range, the bytes)."""


class ReadRequest(msgspec.Struct, gc=False):
    """A stored range to read: all of it, or some of its blocks."""

    name: str
    stored: TensorEntry | ObjectEntry
    location: str
    begin: int
    end: int
    address: int = 0
    """The address of its first byte; 0 if the bytes are copied to their places."""
    place: Place | None = None
    live: bool = False
    """True if the destination is a tensor of the application."""
    check: BlockCheck | None = None
    device: torch.device | None = None
    """The accelerator of its destination, if it is on one."""
    also: tuple[str, ...] = ()
    """Names of further tensors that the range is placed in."""
    opens: Callable[[TensorEntry], list[ReadRequest]] | None = None
    """For a packed tensor that must be located: returns the requests for its elements, once their place is known."""

    def as_dry(self) -> ReadRequest:
        """Return a request for the same range that only verifies it, and places nothing."""
        return ReadRequest(self.name, self.stored, self.location, self.begin, self.end)


class SharedRanges:
    """Requests for the same range become one request, also if they are for different tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ReadRequest] = {}

    def join(self, requests: list[ReadRequest], first: int) -> None:
        """Join the requests from a number on with earlier ones."""
        added = requests[first:]
        del requests[first:]
        for request in added:
            if request.address or request.place is None:
                requests.append(request)
                continue
            stored = request.stored
            key = (
                request.location,
                request.begin,
                request.end,
                request.live,
                request.device,
                stored.byte_range,
                stored.digest,
                stored.blocks,
            )
            known = self._known.setdefault(key, request)
            if known is request:
                requests.append(request)
            elif isinstance(known.place, _Places):
                known.place.places.append(request.place)
                known.also = (*known.also, request.name) if request.live else ()
            elif known.place is not None:
                known.place = _Places([known.place, request.place])
                known.also = (request.name,) if request.live else ()


class _Places:
    def __init__(self, places: list[Place]) -> None:
        self.places = places

    def __call__(self, start: int, data: torch.Tensor) -> Iterator[Copy]:
        for place in self.places:
            yield from place(start, data)


class FlatPlace:
    """A range of an accelerator's memory that takes stored bytes as they are.

    Args:
        target: A tensor whose elements are there in C order.
        first: The first byte in it.
        nbytes: The length of the stored range.
    """

    __slots__ = ("_memory", "address")

    def __init__(self, target: torch.Tensor, first: int, nbytes: int) -> None:
        flat = target.detach().as_strided((target.numel(),), (1,))  # a single element may have any stride
        self._memory = flat.view(torch.uint8)[first : first + nbytes]
        self.address = self._memory.data_ptr()

    def __call__(self, start: int, data: torch.Tensor) -> Sequence[Copy]:
        return [(self._memory[start : start + data.numel()], data)]


def request_all(
    name: str, stored: TensorEntry | ObjectEntry, address: int = 0, place: Place | None = None, live: bool = False
) -> ReadRequest:
    """Return the request for a whole stored range."""
    begin, end = stored.byte_range
    return ReadRequest(name, stored, stored.location, begin, end, address, place, live)


def slot_bytes(part: ReadPart, requests: Sequence[ReadRequest]) -> int:
    """Return the slot size of a part: its bytes to place, aligned to 16, and its gaps."""
    used, position = 0, part.begin
    for segment in part.segments:
        used += max(0, segment.begin - position)
        if not requests[segment.request].address:
            used = -(-used // 16) * 16 + segment.end - segment.begin
        position = segment.end
    return used


class BlockCheck:
    """Verifies the block digests of a long range, as blocks arrive from several threads.

    With a `table`, each block is compared at once. Without one, the blocks' digests make a table when the last one
    arrived.
    """

    __slots__ = ("bad", "digests", "left", "table")

    def __init__(self, nbytes: int, table: bytes | None) -> None:
        self.left = nbytes
        self.table = table
        self.digests = bytearray(-(-nbytes // BLOCK) * SIZE)
        self.bad: str | None = None

    def update(self, at: int, made: bytes) -> None:
        """Add the digests of whole blocks that begin at `at` bytes into the range."""
        first = at // BLOCK
        if self.table is None:
            self.digests[first * SIZE : first * SIZE + len(made)] = made
        else:
            expected = self.table[first * SIZE : first * SIZE + len(made)]
            if made != expected:
                wrong = next(i for i in range(0, len(made), SIZE) if made[i : i + SIZE] != expected[i : i + SIZE])
                block = first + wrong // SIZE
                self.bad = (
                    f"block {block} (bytes {block * BLOCK} on): digest must be "
                    f"xxh3:{expected[wrong : wrong + SIZE].hex()}, got xxh3:{made[wrong : wrong + SIZE].hex()}"
                )


# Destinations of a stored range in a tensor: its own memory if possible, otherwise a copy box by box.

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
    flat = BY_NAME[stored.dtype] == target.dtype and is_flat(target)
    same = flat and target.is_cpu
    if same and piece == box:  # most tensors: their bytes are read to where they belong, and no geometry is computed
        requests.append(request_all(path, stored, target.data_ptr(), None, live))
        return box.numel
    shared = intersect(piece, box)
    if shared is None:
        return 0
    itemsize = ITEMSIZE[stored.dtype]
    within = shared.relative_to(box.offsets)
    device = accelerator_of(target)
    if shared == piece and flat and (same or device is not None) and is_flat_range(box.sizes, within):
        first = find_flat_ranges(box.sizes, within, 0)[0][0] * itemsize
        # Host memory is an address, which bytes are read to. Bytes for a device arrive in staging memory first.
        to = None if device is None else FlatPlace(target, first, stored.nbytes)
        requests.append(request_all(path, stored, target.data_ptr() + first if to is None else 0, to, live))
        requests[-1].device = device
        return shared.numel
    place = _make_placer(stored, piece, target, box)
    if shared == piece:
        requests.append(request_all(path, stored, 0, place, live))
        requests[-1].device = device
        return shared.numel
    begin = stored.byte_range[0]
    inner = shared.relative_to(piece.offsets)
    if same and is_flat_range(piece.sizes, inner) and is_flat_range(box.sizes, within):
        address = target.data_ptr() + find_flat_ranges(box.sizes, within, 0)[0][0] * itemsize
        # Digests are of whole blocks. A range may begin or end within one, so its edges are read with the rest of their
        # blocks into staging memory, and only what is wanted of them is copied.
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
        low = max(low, last)  # two runs may meet in a block, which is read once
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

    def place(start: int, data: torch.Tensor) -> Iterator[Copy]:
        for there, held in _arrived_boxes(stored, piece, start, data):
            for each in grid.clip("source", there):
                yield each.view("target", target, origin), each.view("source", held, there.offsets)

    inner = shared.relative_to(piece.offsets)
    yield from _request_box(path, stored, inner, place, live=live, device=accelerator_of(target))


def is_packed(stored: e.TensorEntry) -> bool:
    """Return True if a tensor's bytes are not simply those of its range."""
    return stored.serializer != "raw"


def request_packed(
    path: str,
    stored: e.TensorEntry,
    copies: Callable[[torch.Tensor], Iterable[Copy]],
    opens: Callable[[e.TensorEntry], list[ReadRequest]],
    *,
    flat: torch.Tensor | None = None,
    live: bool = False,
    device: torch.device | None = None,
) -> ReadRequest:
    """Return the request for a packed tensor. A short one is unpacked on arrival: `copies` has those of its elements.

    `flat` is the destination of all elements, if that is contiguous host memory of the same dtype.
    """
    from snapshot.formats import packed_tensors  # only other libraries' files have such tensors

    request = request_all(path, stored, 0, None, live)
    request.device = device
    if not packed_tensors.is_short(stored):
        request.opens = opens
        return request

    def place(start: int, data: torch.Tensor) -> Iterable[Copy]:
        elements = packed_tensors.unpack(path, stored, data, flat)
        return () if elements is None else copies(elements)

    request.place = place
    return request


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
    """Yield the request for the elements of a grid in a packed piece."""
    shared = intersect(piece, grid.cover("source"))
    if shared is None or not grid.clip("source", piece):
        return

    def copies(elements: torch.Tensor, box: Box = piece) -> Iterator[Copy]:
        for each in grid.clip("source", box):
            yield each.view("target", target, origin), each.view("source", elements, box.offsets)

    def opens(located: e.TensorEntry) -> list[ReadRequest]:
        if not is_packed(located):
            return list(request_grid(path, located, piece, grid=grid, target=target, origin=origin, live=live))
        held = torch.empty(shared.sizes, dtype=BY_NAME[stored.dtype])
        inner = shared.relative_to(piece.offsets)
        requests = request_strided(path, located, box=inner, target=held, live=live, finish=finish)
        finish.extend(partial(copy_into, *each) for each in copies(held, shared))
        return requests

    yield request_packed(path, stored, copies, opens, live=live, device=accelerator_of(target))


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


def request_strided(
    path: str,
    stored: e.TensorEntry,
    *,
    box: Box,
    target: torch.Tensor,
    live: bool,
    finish: list[Callable[[], None]],
) -> list[ReadRequest]:
    """Return the requests for a box of a tensor with any strides, into a tensor of the box's shape."""
    itemsize = ITEMSIZE[stored.dtype]
    begin, end = stored.byte_range
    strides = (stored.extra or e.PLAIN).strides
    requests: list[ReadRequest] = []
    if strides is None:
        add_requests(requests, path, stored, whole_box(stored.shape), target=target, box=box, live=live)
        return requests
    found = find_enclosing_tensor(stored.shape, strides)
    if found is None:  # overlapping or repeated elements: read in file order, then copied
        count = measure_span(stored.shape, strides)
        held = torch.empty(count, dtype=BY_NAME[stored.dtype])
        raw = e.TensorEntry(stored.location, (begin, begin + count * itemsize), stored.dtype, (count,))
        requests.append(request_all(path, raw, held.data_ptr(), None, live))
        finish.append(lambda: copy_into(target, held.as_strided(stored.shape, strides)[box.slices()]))
        return requests
    end = min(begin + math.prod(found.sizes) * itemsize, end)
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
    is_view = extra is not None and (extra.strides is not None or extra.storage_offset is not None)
    view = f" {extra.strides} {extra.storage_offset}" if extra is not None and is_view else ""
    embedded = f" {stored.serializer}" if stored.serializer != "raw" else ""
    return stored.location + view + embedded, stored.byte_range[0]


def _make_placer(stored: e.TensorEntry, piece: Box, target: torch.Tensor, box: Box) -> Place:
    """Return a function that places arriving bytes of a stored piece in a tensor that represents `box`."""
    target = target.detach()

    def place(start: int, data: torch.Tensor) -> Iterator[Copy]:
        for there, source in _arrived_boxes(stored, piece, start, data):
            shared = intersect(there, box)
            if shared is None:
                continue
            within = target[shared.relative_to(box.offsets).slices()]
            yield within, source[shared.relative_to(there.offsets).slices()]

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


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements even if the target requires a gradient."""
    target, source = _as_copied(target.detach(), source.detach())
    with torch.no_grad():
        target.copy_(source)


def copy_all(copies: Sequence[Copy], *, non_blocking: bool) -> None:
    """Copy elements to tensors of one device, in one call: many small copies would each take as long as a large one."""
    targets, sources = [], []
    for copy in copies:
        target, source = _as_copied(copy[0].detach(), copy[1])
        if target.is_conj() or target.is_neg():  # torch copies no lists of these
            copy_into(target, source)
            continue
        targets.append(target)
        sources.append(source)
    if not targets:
        return
    with torch.no_grad():
        try:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
        except torch.OutOfMemoryError:  # on a device that is full, one by one may still fit
            for target, source in zip(targets, sources, strict=True):
                _copy_in_pieces(target, source)


def _copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a full device: for a strided target, torch takes as much of its memory as is copied at once."""
    try:
        target.copy_(source)
    except torch.OutOfMemoryError:
        longest = max(range(target.dim()), key=lambda axis: (target.shape[axis] > 1) * target.stride(axis), default=0)
        if target.numel() < 2:
            raise
        for pieces in zip(target.tensor_split(2, longest), source.tensor_split(2, longest), strict=True):
            _copy_in_pieces(*pieces)


def _as_copied(target: torch.Tensor, source: torch.Tensor) -> Copy:
    bits = _BITS.get(target.dtype)
    return (
        (target.view(bits), source.view(bits))
        if bits is not None and source.dtype == target.dtype
        else (target, source)
    )


# Reads of mapped tensors: the parts of stored tensors that fill a box of a mapped one.

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
                # What a base has is compared with the live tensor, which takes whole boxes. So it is read as one, and
                # its elements are copied at the end.
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
