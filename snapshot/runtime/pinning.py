"""Pinned memory: host memory that an accelerator's driver copies directly, near the accelerator.

Memory is registered with the driver where the driver allows that. Torch's own pinned memory is rounded up to powers of
two and never given back. It is used only for accelerators that cannot register memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from snapshot.runtime.accelerators import on_stream, side_stream
from snapshot.system_calls import libc

PCI_DEVICES = Path("/sys/bus/pci/devices")
_PORTABLE_MAPPED = 1 | 2
"""Pinned for all devices of the process, which can also access it."""
_RELAXED = 2
"""A capture mode: this thread's calls do not disturb the graph that another thread captures."""
_CAPTURING = frozenset(range(900, 908))
"""Errors of the driver because a graph is captured: the next call may succeed."""
_PREFERRED = 1
"""A policy of mbind: take memory of the node while it has any."""
_MBIND = {"x86_64": 237, "aarch64": 235}


class Pinning(NamedTuple):
    """The pinned memory that an operation wants."""

    device: torch.device
    limit: int
    """The operation's memory budget. With this much memory pinned, further slots are not pinned."""
    total: int
    """The bytes that the operation copies."""


class PinningRefused(Exception):
    """The driver did not pin memory."""

    def __init__(self, reason: object, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later
        """True if another attempt may succeed."""


def _runtime(device: torch.device) -> Any:
    """Return the driver's functions to register memory, or None."""
    make = getattr(torch.get_device_module(device), "cudart", None)
    runtime = make() if make is not None and side_stream(device) is not None else None
    return runtime if hasattr(runtime, "cudaHostRegister") else None


def can_register(device: torch.device) -> bool:
    """Return True if existing memory can be registered with the device's driver."""
    return _runtime(device) is not None


def register_memory(address: int, nbytes: int, device: torch.device) -> None:
    """Pin existing memory, or raise `PinningRefused`."""
    try:
        code = _call_driver(device, lambda: _runtime(device).cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))
    except _Interrupted as interrupted:
        if not interrupted.code:
            unregister_memory(address, device)
        raise interrupted.error from None
    if code:
        raise PinningRefused(f"error {code} of the driver", later=code in _CAPTURING)


def unregister_memory(address: int, device: torch.device) -> bool:
    """Undo `register_memory`, after copies that use the memory. Return False if the memory stays registered."""
    try:
        return not _call_driver(device, lambda: _runtime(device).cudaHostUnregister(address))
    except _Interrupted as interrupted:
        if interrupted.code:
            return False
        raise interrupted.error from None


class _Interrupted(Exception):
    """A signal arrived during a call of the driver, which was finished nevertheless."""

    def __init__(self, error: BaseException, code: int) -> None:
        super().__init__(error)
        self.error = error
        self.code = code


def _call_driver(device: torch.device, call: Callable[[], Any]) -> int:
    """Return the error code of a driver's function, or 1 for an exception.

    A thread of its own calls it. The driver keeps the last error per thread, and torch would raise the error of a
    refusal in the application's next operation.
    """
    codes: list[int] = []
    done = threading.Event()

    def run() -> None:
        try:
            permit_capture()
            with on_stream(side_stream(device)):  # its device: otherwise the driver would start on device 0, too
                codes.append(int(call()))
        except RuntimeError:
            codes.append(1)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="snapshot-io-pin", daemon=True)
    interrupt: BaseException | None = None
    try:
        thread.start()
    except RuntimeError:  # no further thread
        return 1
    except BaseException as error:  # noqa: BLE001 - raised below: memory must not be unmapped during the call
        interrupt = error
    while not done.is_set():
        try:
            if not done.wait(10) and thread.ident is None:
                break  # interrupted before it began
        except BaseException as error:  # noqa: BLE001 - as above
            interrupt = error
    code = codes[0] if codes else 1
    if interrupt is not None:
        raise _Interrupted(interrupt, code)
    return code


def permit_capture() -> None:
    """Permit calls of this thread while another one captures a graph, and captures during these calls."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
            return


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
    if number is None or libc.syscall is None or not 0 <= node < 1024:
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(1024),
        ctypes.c_ulong(0),
    )
    return bool(done == 0)
