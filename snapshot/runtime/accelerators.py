"""Accelerators: host memory that is pinned for their copies, and streams beside those of the application.

Memory is registered with the driver where the driver allows that. Torch's own pinned memory is rounded up to powers of
two and never given back. It is used only for accelerators that cannot register memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from snapshot.events import log
from snapshot.per_process import PerProcess

PCI_DEVICES = Path("/sys/bus/pci/devices")
_PORTABLE = 1
"""Pinned for all devices of the process."""
_PREFERRED = 1
"""A policy of mbind: take memory of the node while it has any."""
_MBIND = {"x86_64": 237, "aarch64": 235}
_libc = ctypes.CDLL(None, use_errno=True)


class Pinning(NamedTuple):
    """The pinned memory that an operation wants."""

    device: torch.device
    limit: int
    """The operation's memory budget. With this much memory pinned, further slots are not pinned."""
    total: int
    """The bytes that the operation copies."""


def _runtime(device: torch.device) -> Any:
    """Return the driver's functions to register memory, or None."""
    make = getattr(torch.get_device_module(device), "cudart", None)
    runtime = make() if make is not None and side_stream(device) is not None else None
    return runtime if hasattr(runtime, "cudaHostRegister") else None


def can_register(device: torch.device) -> bool:
    """Return True if existing memory can be registered with the device's driver."""
    return _runtime(device) is not None


def register_memory(address: int, nbytes: int, device: torch.device) -> bool:
    """Pin existing memory; return False if the driver refuses.

    A thread of its own calls the driver, which keeps the last error per thread. Torch would raise the error of a
    refusal in the application's next operation.
    """
    refused: list[object] = []

    def call() -> None:
        try:
            with side_stream(device):  # its device: otherwise the driver would start on device 0, too
                code = int(_runtime(device).cudaHostRegister(address, nbytes, _PORTABLE))
        except RuntimeError as error:
            refused.append(error)
        else:
            if code:
                refused.append(f"error {code} of the driver")

    _in_thread(call)
    if refused:
        log.warning("cannot pin %s bytes for %s, so copies are slower: %s", f"{nbytes:,}", device, refused[0])
    return not refused


def unregister_memory(address: int, device: torch.device) -> None:
    """Undo `register_memory`. The driver waits for copies that use the memory."""

    def call() -> None:
        with contextlib.suppress(RuntimeError), side_stream(device):
            _runtime(device).cudaHostUnregister(address)

    _in_thread(call)


def _in_thread(call: Any) -> None:
    thread = threading.Thread(target=call, name="snapshot-io-pin", daemon=True)
    thread.start()
    thread.join()


def allocate_pinned(nbytes: int) -> torch.Tensor | None:
    """Return memory of torch's pinned allocator, or None if the accelerator has none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return None


def find_numa_node(device: torch.device) -> int:
    """Return the NUMA node that is nearest to a device, or -1 if it is unknown."""
    try:
        found = torch.get_device_module(device).get_device_properties(device)
        name = f"{getattr(found, 'pci_domain_id', 0):04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return int((PCI_DEVICES / name / "numa_node").read_text())
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        return -1


def bind_to_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer a NUMA node for pages that are not allocated yet; return False if the system does not support it."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 1024:
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    done = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(1024),
        ctypes.c_ulong(0),
    )
    return bool(done == 0)


_sides: PerProcess[dict[torch.device, Any]] = PerProcess(dict)
"""One side stream per device: torch has few of them, which it gives to several users in turn."""


def side_stream(device: torch.device) -> Any:
    """Return this library's stream of a device; None if the accelerator has no streams."""
    sides = _sides.get()
    if device not in sides:
        try:
            sides[device] = torch.Stream(device=device)
            torch.accelerator.current_stream(device)
        except (RuntimeError, NotImplementedError, AttributeError):
            sides[device] = None
    return sides[device]


def await_current_streams(devices: Iterable[torch.device | None]) -> None:
    """Wait for the work of the application's current streams on some devices."""
    for device in devices:
        if device is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # an accelerator without streams
                torch.accelerator.current_stream(device).synchronize()
