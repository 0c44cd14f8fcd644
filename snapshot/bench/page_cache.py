"""Make files cold: a read from a device can only be measured when the page cache does not answer it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


class StaysCached(Exception):
    """Raised when files cannot be made cold."""


def drop(folder: Path) -> None:
    """Drop all files below `folder` from the page cache, and look whether they are gone.

    Only these files are asked for; the whole machine's cache is dropped only where that did not help, and root runs us.
    Raises `StaysCached` where they stay: on tmpfs the page cache is the storage.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # a page that is not yet written cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if _resident(files) > 0.01 and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    share = _resident(files)
    if share > 0.01:
        raise StaysCached(f"the page cache keeps {share:.0%} of the files: nothing cold to measure here")


def _resident(files: list[Path]) -> float:
    """Return the share of the files' pages that is in memory, as mincore(2) says."""
    held = total = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            flags = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapped)  # the mapping must be writable for this: hence the private copy
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), flags)
            del first
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file} failed")
        held += bytes(flags).count(1)
        total += pages
    return held / total if total else 0.0


_libc = ctypes.CDLL(None, use_errno=True)
