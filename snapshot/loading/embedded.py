"""Tensors inside other libraries' archives: from the bytes of a file to elements at their destination."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.formats.torch_save import HEAD, PIECE, EmbeddedLayout, find_layout, is_streamed, make_decoder
from snapshot.formats.zip_archive import MoreBytesNeeded
from snapshot.loading.read_requests import ReadRequest, copy_into
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, copy_memory

ALIGNED = 16
"""No element is longer. At multiples of it, counted from the start of a storage, no element is split."""
ENOUGH = 64 << 10
"""Decompressed bytes that are delivered at once."""
MORE = 64 << 20
"""Bytes that a compressed archive may have in addition to its tensor's elements."""


def deliver_bytes(
    requests: Sequence[ReadRequest], layout: EmbeddedLayout, dtype: str, begin: int, held: torch.Tensor
) -> None:
    """Deliver the bytes that begin at `begin`, in the file or after decompression, to the requests that want them."""
    if not layout.plain:
        held = _turned(held, layout.begin - begin, dtype, layout)
    end = begin + held.numel()
    for request in requests:
        low, high = max(request.begin, begin), min(request.end, end)
        if low >= high:
            continue
        if request.address:
            copy_memory(request.address + low - request.begin, held.data_ptr() + low - begin, high - low)
        elif request.place is not None:
            part = held[low - begin : high - begin]
            if part.storage_offset() % ALIGNED:
                part = part.clone()
            for copy in request.place(low - request.stored.byte_range[0], part):
                copy_into(*copy)


def _turned(held: torch.Tensor, at: int, dtype: str, layout: EmbeddedLayout) -> torch.Tensor:
    """Return the tensor's bytes in native byte order, conjugated and negated as saved. Elements begin at `at`."""
    whole = ITEMSIZE[dtype]
    size = whole // (2 if BY_NAME[dtype].is_complex else 1)
    held = held.clone()
    at = at % whole
    count = max(0, held.numel() - at) // whole * whole
    middle = held[at : at + count]
    if layout.swapped and size > 1:
        middle.copy_(middle.clone().view(-1, size).flip(1).reshape(-1))
    if layout.neg:  # the last byte has the sign bit
        middle.view(-1, size)[:, -1] ^= 0x80
    if layout.conj:
        middle.view(-1, whole)[:, -1] ^= 0x80
    return held


def parse_whole(request: ReadRequest, share: Any, tensor: torch.Tensor) -> None:
    """Parse a short range whose bytes have all been read, and place its elements."""
    stored = request.stored
    assert isinstance(stored, TensorEntry)
    if is_streamed(stored):
        parser = EmbeddedParser(request)
        view = memoryview(share).cast("B")
        for step in parser.steps():
            step(view)
        return
    try:
        layout = find_layout(request.name, stored, share, share)
    except MoreBytesNeeded as short:
        raise CorruptSnapshotError(f"{request.name}: its archive refers to bytes beyond its end") from short
    deliver_bytes(locate_embedded(request, layout), layout, stored.dtype, request.begin, tensor)


def locate_embedded(request: ReadRequest, layout: EmbeddedLayout) -> list[ReadRequest]:
    """Return the requests for the file itself, once the position of an embedded tensor is known."""
    assert request.opens is not None
    return request.opens(layout)


class EmbeddedParser:
    """Parses a range sequentially; twice, if its directory is stored at the end."""

    def __init__(self, request: ReadRequest, layout: EmbeddedLayout | None = None) -> None:
        """Start with a known layout, if given, from the first byte of the storage."""
        assert isinstance(request.stored, TensorEntry)
        self._request = request
        self._stored = request.stored
        self._decode = make_decoder(request.name, request.stored) if layout is None else bytes
        self._layout: EmbeddedLayout | None = None
        self._requests: list[ReadRequest] = []
        self._head, self._tail = bytearray(), bytearray()
        self._position = 0
        """The position where `_held` begins."""
        self._held = bytearray()
        self._end = 0
        self._most = math.prod(request.stored.shape) * ITEMSIZE[request.stored.dtype] + MORE
        if request.stored.extra is not None and request.stored.extra.storage_offset is not None:
            self._most += MORE * (request.end - request.begin)  # it is a part of the tensor in the archive
        self.looks = layout is None and request.stored.serializer.endswith("+torch_save")
        """True if the whole range must be scanned before any bytes can be delivered."""
        if layout is not None:
            self._begin(layout, layout.begin)

    def steps(self) -> list[Callable[[memoryview], None]]:
        """Return the functions to call with all bytes of the range, in this order."""
        return [self._look_all, self._take_all] if self.looks else [self._take_all]

    def _look_all(self, data: memoryview) -> None:
        self.look(data)
        self.looked()

    def _take_all(self, data: memoryview) -> None:
        self.take(data)
        self.taken()

    def look(self, data: memoryview) -> None:
        """Scan bytes of the range without delivering any."""
        for at in range(0, len(data), PIECE):
            made = self._decode(bytes(data[at : at + PIECE]))
            if len(self._head) < HEAD:
                self._head += made[: HEAD - len(self._head)]
            self._tail += made
            del self._tail[:-HEAD]
            self._position += len(made)
            if self._position > self._most:
                raise CorruptSnapshotError(f"{self._request.name}: decompresses to far more bytes than it has elements")

    def looked(self) -> None:
        """Finish the scan."""
        head, tail, length = self._head, self._tail, self._position
        if length <= HEAD:
            tail = head
        stored = self._stored
        whole = msgspec.structs.replace(stored, byte_range=(0, length), serializer="torch_save")
        try:
            found = find_layout(self._request.name, whole, head, tail)
        except MoreBytesNeeded as short:
            raise CorruptSnapshotError(f"{self._request.name}: its archive is not one that torch writes") from short
        self._decode = make_decoder(self._request.name, stored)
        self._begin(found)

    def _begin(self, layout: EmbeddedLayout, position: int = 0) -> None:
        self._layout = layout
        self._requests = locate_embedded(self._request, layout)
        self._end = max((request.end for request in self._requests), default=0)
        self._position = position

    def take(self, data: memoryview) -> bool:
        """Deliver the requested part of the bytes. Return True if more bytes are needed."""
        for at in range(0, len(data), PIECE):
            if self._layout is None:
                head = bytes(data[: max(PIECE, HEAD)])
                self._begin(find_layout(self._request.name, self._stored, head, b""))
            if self._position >= self._end:
                return False
            self._held += self._decode(bytes(data[at : at + PIECE]))
            if len(self._held) >= ENOUGH:
                self._hand_on(len(self._held))
        return self._position < self._end

    def taken(self) -> None:
        """Finish: the range has no more bytes."""
        if self._position + len(self._held) < self._end:
            raise CorruptSnapshotError(f"{self._request.name}: its bytes end too early")
        self._hand_on(len(self._held), last=True)

    def _hand_on(self, count: int, *, last: bool = False) -> None:
        layout = self._layout
        if layout is None or not count:
            return
        if not last:
            count -= (self._position + count - layout.begin) % ALIGNED
        if count <= 0:
            return
        held = torch.frombuffer(self._held[:count], dtype=torch.uint8)
        deliver_bytes(self._requests, layout, self._stored.dtype, self._position, held)
        del self._held[:count]
        self._position += count
