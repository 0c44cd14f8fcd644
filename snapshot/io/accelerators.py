"""Accelerators: a stream beside those of the application, and waiting for work of the application."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from snapshot.io.system import PerProcess

_sides: PerProcess[dict[torch.device, Any]] = PerProcess(dict)
"""One side stream per device: torch has few of them, which it gives to several users in turn."""


def accelerator_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the accelerator that a tensor is on; None if it is on the host."""
    return None if tensor.device.type in ("cpu", "meta") else tensor.device


def side_stream(device: torch.device) -> Any:
    """Return this library's stream of a device; None if the accelerator has no streams."""
    sides = _sides.get()
    if device not in sides:
        try:
            torch.accelerator.current_stream(device)
            sides.setdefault(device, torch.Stream(device=device))
        except (RuntimeError, NotImplementedError, AttributeError):
            sides.setdefault(device, None)
    return sides[device]


def current_device_index() -> int:
    """Return the index of the accelerator that is current in this thread."""
    accelerator = torch.accelerator
    index_of = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx  # before torch 2.7
    return int(index_of())


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make a stream and its device current in this thread.

    Entering the stream itself would keep the previous stream on it, and other threads use it at the same time.
    """
    accelerator = torch.accelerator
    device, before = current_device_index(), accelerator.current_stream(stream.device)
    try:
        accelerator.set_stream(stream)
        yield
    finally:
        accelerator.set_stream(before)
        if current_device_index() != device:
            module = torch.get_device_module(stream.device)
            getattr(module, "_maybe_exchange_device", module.set_device)(device)


def await_events(events: Iterable[Any]) -> None:
    """Wait for all events, even if a signal interrupts: afterwards, no copy uses its memory any more."""
    error: BaseException | None = None
    for event in events:
        for _ in range(100):
            try:
                event.synchronize()
                break
            except Exception as failed:  # noqa: BLE001 - of the device, which runs nothing any more
                error = error or failed
                break
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                error = interrupt
    if error is not None:
        raise error


def await_current_streams(devices: Iterable[torch.device | None]) -> None:
    """Wait for the work of the application's current streams on some devices."""
    for device in devices:
        if device is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # an accelerator without streams
                torch.accelerator.current_stream(device).synchronize()


def await_host_copies(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all accelerators if one may still be copying to, or from, some of these tensors in host memory.

    Only pinned memory takes part in copies that the host does not wait for. They may run on any stream of any device.
    """
    accelerator = _initialized_accelerator()
    if accelerator is not None and any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors):
        for index in _used_devices(accelerator.type):
            torch.accelerator.synchronize(index)


def uses_accelerator() -> bool:
    """Return True if this process has used an accelerator."""
    return _initialized_accelerator() is not None


def _initialized_accelerator() -> torch.device | None:
    accelerator = _current_accelerator()
    is_initialized = accelerator and getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return accelerator if is_initialized and is_initialized() else None


def _current_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process may use."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises this if there is not one, and later versions return None
        return None


def _used_devices(kind: str) -> Sequence[int]:
    """Return the devices that this process uses. Waiting for another one would start it, and take its memory."""
    is_used = getattr(torch._C, f"_{kind}_hasPrimaryContext", None)  # noqa: SLF001 - torch has no public name for it
    return [index for index in range(torch.accelerator.device_count()) if is_used is None or is_used(index)]
