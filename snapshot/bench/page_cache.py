"""Removal of files from the page cache, so that a read measures the device."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from snapshot.io.system import libc


class StaysCached(Exception):
    """Files cannot be dropped from the page cache."""


def drop(folder: Path) -> None:
    """Drop all files below `folder` from the page cache, and check the result.

    Only these files are dropped. If that fails, and this process runs as root, the whole machine's cache is dropped.
    Raises StaysCached if the files stay cached: on tmpfs the page cache is the storage.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # a dirty page cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if _resident(files) > 0.01 and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    share = _resident(files)
    if share > 0.01:
        raise StaysCached(f"cannot measure cold reads: the page cache keeps {share:.0%} of the files")


def _resident(files: list[Path]) -> float:
    """Return the share of the files' pages in memory, according to mincore(2)."""
    held = total = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            flags = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapped)  # this needs a writable mapping, so it is a private copy
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), flags)
            del first
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file} failed")
        held += bytes(flags).count(1)
        total += pages
    return held / total if total else 0.0
