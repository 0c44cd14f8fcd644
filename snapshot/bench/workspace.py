"""Working place of `snapshot bench` below the URL, removed at the end, and a description of the machine."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from snapshot.bench.raw_io import measure_link
from snapshot.errors import StorageError
from snapshot.options import Settings
from snapshot.registry import open_storage
from snapshot.runtime.cleanup_signals import hold_signals
from snapshot.storage import map_exceptions
from snapshot.storage_options import options_from_environment
from snapshot.url import URL

PACKAGES = ("snapshot-torch", "torch", "numpy", "safetensors", "torchsnapshot")


@dataclass(frozen=True, slots=True)
class Workspace:
    """A new, empty, writable place."""

    url: URL
    local: bool
    """True for a folder of a file system, where raw baselines and peers can work, too."""

    def text(self) -> str:
        """Return the place for systems: a plain path on a file system, since not all of them understand `file://`."""
        return self.url.location if self.local else self.url.reveal()

    def empty(self) -> None:
        """Remove the files of a finished step, to free space for the next one."""
        if self.local:
            for folder in Path(self.url.location).iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        else:
            asyncio.run(_clear(self.url))

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise StorageError if `nbytes` bytes do not fit."""
        if self.local:
            free = shutil.disk_usage(self.url.location).free
            if free < nbytes:
                raise StorageError(
                    f"{self.url}: {what} needs {nbytes / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free; "
                    "pass a smaller --scale, or another URL"
                )


@contextmanager
def place(url: str) -> Iterator[Workspace]:
    """Create a place below `url`, and always remove it."""
    parsed = URL.parse(url)
    if parsed.scheme == "file":
        with _folder(parsed) as folder:
            yield Workspace(URL.parse(str(folder)), local=True)
        return
    below = parsed.join(f"snapshot-bench-{uuid.uuid4().hex[:12]}")
    asyncio.run(_probe(below))
    try:
        yield Workspace(below, local=False)
    finally:
        asyncio.run(_clear(below))


@contextmanager
def _folder(parsed: URL) -> Iterator[Path]:
    base = Path(parsed.location)
    missing = [folder for folder in (base, *base.parents) if not folder.exists()]
    made: Path | None = None
    try:
        with hold_signals(), map_exceptions(parsed):
            base.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix="snapshot-bench-", dir=base))
        yield made
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)
        for folder in missing:
            try:
                folder.rmdir()
            except OSError:  # another process has written to it meanwhile
                break


async def _probe(url: URL) -> None:
    storage = open_storage(url, options_from_environment())
    try:
        await storage.put("probe", b"probe")
        await storage.delete(["probe"])
    finally:
        await storage.close()


async def _clear(url: URL) -> None:
    storage = open_storage(url, options_from_environment())
    try:
        await storage.delete(await storage.list())
    finally:
        await storage.close()


def describe(where: Workspace) -> dict[str, Any]:
    """Return the machine, the file system and the versions, which the results depend on."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "where": str(where.url),
        "file_system": file_system(Path(where.url.location)) if where.local else where.url.scheme,
        "cores": Settings.current().cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def find_devices() -> list[str]:
    """Return the devices that torch can use: the CPU, and each accelerator of this machine."""
    try:
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator() if count else None
    except RuntimeError:  # torch 2.7 for CUDA, without a driver
        return ["cpu"]
    return ["cpu", *(f"{kind.type}:{index}" for index in range(count) if kind)]


def measure_device(device: str) -> dict[str, Any]:
    """Return an accelerator's name, and the measured speed of its link to the host."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    name = name_of(device) if name_of else torch.device(device).type
    return {"device": device, "name": name, **measure_link(torch.device(device))}


def available_device_memory(device: str) -> int | None:
    """Return the free memory of an accelerator in bytes; None if the device is the CPU, or does not report it."""
    read = None if device == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return read(device)[0] if read else None


def available_memory() -> int:
    """Return the memory in bytes that is available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 4 << 30


def file_system(path: Path) -> str:
    """Return the type of the file system at a path: that of the deepest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if path.is_relative_to(point.encode().decode("unicode_escape"))]
    return max(above, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
