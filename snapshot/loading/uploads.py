"""Uploads: bytes that arrived in staging memory are copied to accelerators on side streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snapshot.loading.requests import ReadRequest
from snapshot.runtime.accelerators import await_events, on_stream, side_stream
from snapshot.runtime.arena import SEGMENT, Slot
from snapshot.runtime.pinning import Pinning


class Uploads:
    """The copies to the accelerators of some requests.

    The caller has waited for the current streams of these devices. While one part is copied, other threads read.
    """

    def __init__(self, requests: Sequence[ReadRequest], limit: int) -> None:
        devices = sorted({request.device for request in requests if request.device is not None}, key=str)
        sides = {device: side_stream(device) for device in devices}
        self._sides: dict[torch.device, Any] = {device: side for device, side in sides.items() if side is not None}
        total = sum(request.end - request.begin for request in requests if request.device is not None)
        self._pinning = Pinning(next(iter(self._sides)), limit, min(total, SEGMENT)) if self._sides else None

    def pinning(self, requests: Iterator[ReadRequest]) -> Pinning | None:
        """Return the pinned memory that is useful for some requests; None if their bytes stay on the host."""
        if self._pinning is None or all(request.device is None for request in requests):
            return None
        return self._pinning

    @contextlib.contextmanager
    def part(self) -> Iterator[UploadedPart]:
        """Yield the copies of one part. At the end, all of them have ended, even after an error."""
        copies = UploadedPart(self._sides)
        try:
            yield copies
        finally:
            copies.wait()


class UploadedPart:
    """The copies of one part. Its slot must not be reused before they have ended."""

    def __init__(self, sides: dict[torch.device, Any]) -> None:
        self._sides = sides
        self._used: set[torch.device] = set()

    def place(self, request: ReadRequest, start: int, slot: Slot, at: int, length: int) -> None:
        """Copy bytes from a slot to the destination of their request. The copy may still run on return."""
        assert request.place is not None
        device = request.device
        side = self._sides.get(device) if device is not None else None
        if device is None or side is None:
            request.place(start, slot, at, length)
            return
        self._used.add(device)
        with on_stream(side):
            request.place(start, slot, at, length)

    def wait(self) -> None:
        """Wait for the copies."""
        await_events([self._sides[device].record_event() for device in self._used])
