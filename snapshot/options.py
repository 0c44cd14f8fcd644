"""Typed settings with their defaults, and the environment variables that override them.

A setting is for those who know their machine better than the library does; nobody needs one to be safe.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. `SNAPSHOT_` and a field's name in capitals is the environment variable that sets it."""

    direct_io: str = "auto"
    """`auto`, `always` or `never`. Bulk bytes go around the page cache: in `auto`, durable writes, and reads of files
    that are not in the page cache, on file systems that allow it."""
    lanes: int = 0
    """How many data files one process writes side by side; 0: as many as there are cores, at most 4."""
    io_threads: int = 0
    """Threads for system calls and digests; 0: the number of cores and 2 more, at most 16."""
    part_bytes: int = 0
    """How many bytes go in one request; 0: what the storage prefers."""
    memory_budget_bytes: int = 0
    """Memory for staging and bouncing, where a call gives no budget of its own; 0: half of what the host has free for
    an asynchronous take, shared by the processes of a job; for all else 64 MiB on files, 256 MiB elsewhere."""
    arena_bytes: int = -1
    """How much staging memory is kept between snapshots; -1: a quarter of the host's memory,
    shared by the processes of a job."""
    manifest_bytes: int = 1 << 30
    """A manifest larger than this is refused when it is read."""
    trace: str = ""
    """A file to which every verb appends a timeline of what it did, in Chrome's trace format."""
    pending: int = 3
    """How many asynchronous takes may be under way at once in a process; another one waits, or is refused."""
    storage_options: str = ""
    """What the storage plugins of the `snapshot` command's URLs should know: a JSON object, or the name of a file of
    JSON or YAML. The library itself is given `storage_options`."""
    timeout: float = 600.0
    """Seconds without a sign of life after which a rank counts as dead."""

    @classmethod
    def current(cls) -> Settings:
        """Return the settings in force: the defaults, overridden by the environment."""
        given: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            name = f"SNAPSHOT_{field.name.upper()}"
            text = os.environ.get(name)
            if text is None:
                continue
            kind = type(getattr(cls(), field.name))
            try:
                given[field.name] = kind(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} is not {_ARTICLE[kind]}") from None
        made = cls(**given)  # type: ignore[arg-type]
        if made.direct_io not in ("auto", "always", "never"):
            raise ValueError(f"SNAPSHOT_DIRECT_IO={made.direct_io!r} is none of auto, always, never")
        if made.pending < 1:
            raise ValueError(f"SNAPSHOT_PENDING={made.pending} would let no asynchronous take begin")
        return made

    @staticmethod
    def processes() -> int:
        """How many processes of one job share this host, as far as their launcher says."""
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        return max(1, int(text)) if text.isdecimal() else 1

    def cores(self) -> int:
        """Return the cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def lane_count(self) -> int:
        return self.lanes or min(self.cores(), 4)

    def thread_count(self) -> int:
        return self.io_threads or min(self.cores() + 2, 16)


_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}


def expect_positive(name: str, value: float | None) -> None:
    """Raise `ValueError` if an argument was given that is not above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be more than 0, got {value}")
