"""Copies to accelerators: bytes in staging memory fill tensors there, on side streams, and are verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from snapshot.events import log
from snapshot.io.accelerators import await_events, on_stream, side_stream
from snapshot.io.arena import SEGMENT, Pinning, Slot
from snapshot.io.storage import Buffer
from snapshot.loading.read_requests import Copy, FlatPlace, ReadRequest, copy_all, copy_into
from snapshot.plan.layout import ReadPart

if TYPE_CHECKING:
    from snapshot.tensors.device_digest import DeviceDigests

DEVICE_PART = 16 << 20
"""The length of reads for accelerators: each has steps of the interpreter that no two threads run at once."""
DEVICE_LANES = 8
_ALIGNED = 16
"""Memory of digests begins at a multiple of this."""
WORTH = 8 << 30
"""Bytes for one accelerator from which it verifies them itself: the first launch of a process may take seconds."""


class DeviceFills:
    """The copies to the accelerators of some requests.

    The caller has waited for the current streams of these devices. While one part is copied, other threads read.

    Args:
        limit: The memory budget, for pinned memory.
        verify: Whether bytes are verified, by the accelerators if that is faster.
    """

    def __init__(self, requests: Sequence[ReadRequest], limit: int, *, verify: bool) -> None:
        totals: defaultdict[torch.device, int] = defaultdict(int)
        for request in requests:
            if request.device is not None:
                totals[request.device] += request.end - request.begin
        sides = {device: side_stream(device) for device in sorted(totals, key=str)}
        self._sides: dict[torch.device, Any] = {device: side for device, side in sides.items() if side is not None}
        total = sum(totals.values())
        self._pinning = Pinning(next(iter(self._sides)), limit, min(total, SEGMENT)) if self._sides else None
        self._digesting: set[torch.device] = set()
        for device, side in self._sides.items() if verify else ():
            if totals[device] >= WORTH:
                from snapshot.tensors.device_digest import is_usable  # nothing else needs it for fewer bytes

                with on_stream(side):
                    if is_usable(device):
                        self._digesting.add(device)

    def pinning(self, requests: Iterator[ReadRequest]) -> Pinning | None:
        """Return the pinned memory that is useful for some requests; None if their bytes stay on the host."""
        if self._pinning is None or all(request.device is None for request in requests):
            return None
        return self._pinning

    def scratch_bytes(self, part: ReadPart, requests: Sequence[ReadRequest]) -> int:
        """Return the memory in a part's slot, beside its bytes, for digests by accelerators."""
        lengths = [
            segment.end - segment.begin
            for segment in part.segments
            if requests[segment.request].device in self._digesting
        ]
        if not lengths:
            return 0
        from snapshot.tensors.device_digest import scratch_bytes

        return scratch_bytes(lengths) + _ALIGNED * len(self._digesting)

    def part(self, slot: Slot | None, nbytes: int) -> PartFill:
        """Return the copies of one part, whose bytes take `nbytes` of its slot."""
        return PartFill(self._sides, self._digesting if slot is not None and slot.pinned else set(), slot, nbytes)


class _Checked(NamedTuple):
    """Bytes that an accelerator verifies: their request, the first byte in the file, and the bytes in host memory."""

    request: ReadRequest
    begin: int
    share: Buffer
    address: int


class PartFill:
    """The copies of one part to several tensors. Its slot must not be reused before they have ended."""

    def __init__(
        self, sides: dict[torch.device, Any], digesting: set[torch.device], slot: Slot | None, nbytes: int
    ) -> None:
        self.slot = slot
        self._sides = sides
        self._digesting = digesting
        self._scratch = nbytes
        """The first free byte of the slot, from which on the digests have memory."""
        self._copies: defaultdict[torch.device, list[Copy]] = defaultdict(list)
        self._checked: defaultdict[torch.device, list[_Checked]] = defaultdict(list)

    def verifies(self, request: ReadRequest, begin: int, share: Buffer) -> bool:
        """Return True if an accelerator verifies these bytes after their copy."""
        place, device = request.place, request.device
        if device not in self._digesting or not isinstance(place, FlatPlace) or request.stored.digest is None:
            return False
        from snapshot.tensors.device_digest import supports

        address = place.address + begin - request.stored.byte_range[0]
        if device is None or not supports(address, len(share)):
            return False
        self._checked[device].append(_Checked(request, begin, share, address))
        return True

    def place(self, request: ReadRequest, start: int, data: torch.Tensor) -> None:
        """Copy bytes to the destination of their request: at once on the host, with others on an accelerator."""
        assert request.place is not None
        copies = request.place(start, data)
        device = request.device
        if device is not None and device in self._sides:
            self._copies[device].extend(copies)
            return
        for copy in copies:
            copy_into(*copy)

    def finish(self) -> Iterator[tuple[_Checked, tuple[str, bytes] | None]]:
        """Make the copies to accelerators, and wait for them, even after an error.

        Return the bytes that accelerators had to verify, with their digests and tables; None if one failed.
        """
        used, launched = [], []
        try:
            for device, copies in self._copies.items():
                assert self.slot is not None
                side, checked = self._sides[device], self._checked[device]
                used.append(side)
                with on_stream(side):
                    copy_all(copies, non_blocking=self.slot.pinned)
                    if checked:
                        launched.append((checked, self._launch(checked, self.slot, device)))
        finally:
            await_events([side.record_event() for side in used])
        for checked, work in launched:
            yield from zip(checked, _finish_digests(work, len(checked)), strict=True)

    def _launch(self, checked: Sequence[_Checked], slot: Slot, device: torch.device) -> DeviceDigests | None:
        from snapshot.tensors.device_digest import DeviceDigests, scratch_bytes

        lengths = [len(each.share) for each in checked]
        scratch = slot.tensor[self._scratch :]
        self._scratch += scratch_bytes(lengths)
        try:
            work = DeviceDigests([each.address for each in checked], lengths, scratch, device)
            work.launch()
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise errors of any class
            log.warning("%s: the host computes the digests: %s", device, error)
            return None
        return work


def _finish_digests(work: DeviceDigests | None, count: int) -> Sequence[tuple[str, bytes] | None]:
    try:
        return work.finish() if work is not None else [None] * count
    except RuntimeError as error:
        log.warning("the host computes the digests: %s", error)
        return [None] * count
