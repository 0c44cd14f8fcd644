"""Total and available memory of the host."""

from __future__ import annotations

import os


def available_memory() -> int:
    """Return the memory that this process may still use: of the host, or of its control group if that is less."""
    free = _meminfo("MemAvailable")
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as most, open(usage) as used:
                free = min(free, int(most.read()) - int(used.read()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def _meminfo(name: str) -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
    except (OSError, StopIteration):  # not Linux
        total = _physical_memory()
        return total if name == "MemTotal" else total // 2


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return 8 << 30


def total_memory() -> int:
    """Return the host's total memory."""
    return _meminfo("MemTotal")
