"""How much memory the host has, or the control group of this process: in all, available and free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from snapshot.io.system import CLOEXEC

_MOUNTS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Controllers of `/proc/self/cgroup`, where they are mounted, and their files, of versions 2 and 1."""
LOOK = 10.0
"""Seconds between two looks at the limits of control groups."""


def total_memory() -> int:
    """Return the host's total memory."""
    return _meminfo("MemTotal")[0]


def available_memory() -> int:
    """Return the memory that this process may still use: of the host, or of its control groups if that is less.

    What the kernel gives back for it, such as files in the page cache, counts as available.
    """
    return max(0, min([*_meminfo("MemAvailable"), *(limit - used + idle for limit, used, idle in _control_groups())]))


def memory_in_use() -> list[tuple[int, int]]:
    """Return the total and the used memory of the host, and of each control group with a limit.

    The page cache counts as used.
    """
    total, free = _meminfo("MemTotal", "MemFree")
    return [(total, total - free), *((limit, used) for limit, used, _ in _control_groups())]


def _control_groups() -> Iterator[tuple[int, int, int]]:
    """Yield limit and usage of the control groups of this process that have a limit, and their files not in use."""
    for limit, usage in _limits(_read("/proc/self/cgroup"), time.monotonic() // LOOK):
        with suppress(ValueError):
            yield limit, int(_read(usage)), _inactive(os.path.join(os.path.dirname(usage), "memory.stat"))


def _inactive(statistics: str) -> int:
    """Return the bytes of files that a control group gives back first; those of version 1 have two such lines."""
    found = dict(line.split()[:2] for line in _read(statistics).splitlines())
    return int(found.get(b"total_inactive_file", found.get(b"inactive_file", 0)))


@lru_cache(maxsize=1)
def _limits(groups: bytes, _time: float) -> list[tuple[int, str]]:
    """Return the limits of a process's groups and of those above them, and the files with the usage.

    A container may see its own group as the root.
    """
    found = {}
    total = total_memory()
    for line in groups.decode(errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, mount, limit, usage in _MOUNTS:
            folder = path.strip("/")
            while controller in controllers.split(","):
                at = os.path.join(mount, folder)
                with suppress(ValueError):  # "max", or there is no such file
                    found[os.path.join(at, usage)] = int(_read(os.path.join(at, limit)))
                if not folder:
                    break
                folder = os.path.dirname(folder)
    return [(limit, usage) for usage, limit in found.items() if 0 < limit < total]


def _meminfo(*names: str) -> list[int]:
    try:
        found = dict(line.split()[:2] for line in _read("/proc/meminfo").splitlines())
        return [int(found[f"{name}:".encode()]) << 10 for name in names]
    except KeyError:  # not Linux
        total = _physical_memory()
        return [total if name == "MemTotal" else total // 2 for name in names]


def _read(path: str) -> bytes:
    """Return a short file of the kernel; empty if it cannot be read."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | CLOEXEC)
        try:
            return os.read(descriptor, 64 << 10)
        finally:
            os.close(descriptor)
    return b""


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return 8 << 30
