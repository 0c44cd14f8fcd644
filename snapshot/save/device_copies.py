"""Copies from accelerators to staging memory: on side streams, batched, and without memory of the device.

Torch copies a strided tensor through a contiguous one, and a full device has no memory for that. Here the memory of
such a tensor crosses in contiguous pieces, and the host arranges the elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from snapshot.errors import SnapshotError
from snapshot.io.accelerators import accelerator_of, await_events, on_stream, side_stream
from snapshot.io.arena import Pinning, Slot
from snapshot.io.budget import MemoryBudget
from snapshot.state.leaves import Leaf
from snapshot.tensors.geometry import boxes_of_range
from snapshot.tensors.memory import is_flat

_SMALL = 1 << 20
"""Tensors up to this size are copied several per call."""
_PIECE = 4 << 20
"""The maximum memory of a strided tensor that crosses at once, with its gaps."""


class DeviceCopies:
    """Copies from the accelerators of some tensors.

    They begin after all work that the application's current streams hold at this moment.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sides: dict[torch.device, Any] = {}
        for device in sorted({device for device in map(accelerator_of, tensors) if device is not None}, key=str):
            _refuse_capture(device)
            side = side_stream(device)
            if side is not None:
                side.wait_stream(torch.accelerator.current_stream(device))
                self._sides[device] = side

    def pinning(self, budget: MemoryBudget, total: int) -> Pinning | None:
        """Return the pinned memory to copy to, for an operation of `total` bytes; None without an accelerator."""
        device = next(iter(self._sides), None)
        return None if device is None else Pinning(device, budget.total, total)

    def has_stream(self, device: torch.device) -> bool:
        """Return True if tensors of a device are copied on a side stream."""
        return device in self._sides

    def keep_memory(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory during its copy, even if the application frees it."""
        side = self._sides.get(tensor.device)
        if side is not None:
            tensor.record_stream(side)

    def stream(self, device: torch.device) -> Any:
        """Return the context in which tensors of a device are copied."""
        side = self._sides.get(device)
        return contextlib.nullcontext() if side is None else on_stream(side)

    def mark(self, devices: set[torch.device]) -> list[Any]:
        """Return events that occur when the copies so far have ended."""
        return [self._sides[device].record_event() for device in devices if device in self._sides]


class PartCopies:
    """The copies of one part to its slot."""

    def __init__(self, copies: DeviceCopies, slot: Slot) -> None:
        self._copies = copies
        self._slot = slot
        self._batch: list[torch.Tensor] = []
        self._begin = self._end = 0
        """The range of the slot that the pending small tensors fill."""
        self._used: set[torch.device] = set()

    def copy(self, leaf: Leaf, start: int, nbytes: int, at: int) -> None:
        """Start the copy of some bytes of a leaf, in C order from byte `start` on, to byte `at` of the slot."""
        tensor = leaf.tensor
        if not is_flat(tensor):
            self._copy_strided(tensor.detach(), leaf, start, nbytes, at)
        elif nbytes == leaf.nbytes <= _SMALL and at % tensor.itemsize == 0:
            self._add(tensor, nbytes, at)
        else:
            with torch.no_grad(), self._on(tensor.device):
                source = tensor.detach().view(-1).view(torch.uint8)[start : start + nbytes]
                self._slot.tensor[at : at + nbytes].copy_(source, non_blocking=self._slot.pinned)

    def end(self) -> list[Any]:
        """Return events that occur when all bytes are in the slot."""
        self._flush()
        return self._copies.mark(self._used)

    def wait(self) -> None:
        """Wait for the copies that were started."""
        self._batch = []
        await_events(self.end())

    def _add(self, tensor: torch.Tensor, nbytes: int, at: int) -> None:
        """Collect a small tensor. Those that are adjacent, with one dtype and device, are copied together."""
        if self._batch:
            last = self._batch[-1]
            if self._end != at or last.dtype != tensor.dtype or last.device != tensor.device:
                self._flush()
        if not self._batch:
            self._begin = at
        self._batch.append(tensor)
        self._end = at + nbytes

    def _flush(self) -> None:
        """Copy the collected tensors: two calls, however many they are."""
        batch, self._batch = self._batch, []
        if batch:
            flat = self._slot.tensor[self._begin : self._end].view(batch[0].dtype)
            with torch.no_grad(), self._on(batch[0].device):
                targets = _unflatten_dense_tensors(flat, batch)  # type: ignore[no-untyped-call]
                torch._foreach_copy_(targets, batch, non_blocking=self._slot.pinned)

    def _copy_strided(self, tensor: torch.Tensor, leaf: Leaf, start: int, nbytes: int, at: int) -> None:
        itemsize = leaf.nbytes // tensor.numel()
        first, count = start // itemsize, nbytes // itemsize
        room = self._slot.tensor[at : at + nbytes]
        aligned = at % itemsize == 0
        values = room.view(tensor.dtype) if aligned else torch.empty(count, dtype=tensor.dtype)
        for position, box in boxes_of_range(leaf.shape, first, first + count):
            target = values[position - first : position - first + box.numel].view(box.sizes)
            self._gather(tensor[box.slices()], target)
        if not aligned:
            room.copy_(values.view(torch.uint8))

    def _gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a strided tensor to host memory, and return when it is there."""
        if source.is_cpu:
            with torch.no_grad():
                target.copy_(source)
            return
        for axis in range(source.dim()):  # an expanded axis repeats the same elements
            if source.stride(axis) == 0 and source.shape[axis] > 1:
                source = source.narrow(axis, 0, 1)
        span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        longest = max(range(source.dim()), key=lambda axis: (source.shape[axis] > 1) * source.stride(axis), default=0)
        if span * source.itemsize <= _PIECE or source.numel() == 1:
            self._gather_piece(source, target, span)
            return
        step = max(1, _PIECE // (source.stride(longest) * source.itemsize))
        step = min(step, -(-source.shape[longest] // 2))  # elements that overlap are fewer than their span
        for begin in range(0, source.shape[longest], step):
            length = min(step, source.shape[longest] - begin)
            self._gather(source.narrow(longest, begin, length), target.narrow(longest, begin, length))

    def _gather_piece(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        conj, neg = source.is_conj(), source.is_neg()
        held = torch.empty(span, dtype=source.dtype)
        with torch.no_grad(), self._on(source.device):
            source = source.conj() if conj else source
            source = torch._neg_view(source) if neg else source
            held.copy_(source.as_strided((span,), (1,)))
        values = held.as_strided(source.shape, source.stride(), 0)
        values = values.conj() if conj else values
        target.copy_(torch._neg_view(values) if neg else values)

    def _on(self, device: torch.device) -> Any:
        self._used.add(device)
        return self._copies.stream(device)


def _refuse_capture(device: torch.device) -> None:
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise SnapshotError(f"{device}: cannot take a snapshot while a graph is captured")
