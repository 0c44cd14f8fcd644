"""Typed settings with their defaults, and the environment variables that override them.

Settings are for tuning to a machine; the defaults are safe.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from snapshot.io.system import count_cores, count_processes

MiB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. The environment variable of a field is `SNAPSHOT_` and its name in capitals."""

    direct_io: str = "auto"
    """Use of direct I/O for bulk data: `auto`, `always` or `never`.

    `auto` uses it, if the file system supports it, for durable writes unless at least half of the memory is free, and
    for reads of files that are not in the page cache. Ranks of one host that read the same bytes read them through the
    page cache.
    """
    file_io: str = "auto"
    """System calls for data files: `auto` or `portable`.

    `auto` uses vectored calls if the platform has them. `portable` uses `aiofiles`, as on macOS and Windows. It is
    slower, and does not use direct I/O. Near folders ignore it.
    """
    lanes: int = 0
    """Number of threads for data files. 0 means the number of cores, at most 4; or up to 12, if each process has more.

    On files, half as many are written at once, but at least 2. Reads use 4 threads, or up to 8 for an
    accelerator.
    """
    io_threads: int = 0
    """Number of threads for system calls and digests; 0 means the number of cores plus 2, at most 16."""
    part_bytes: int = 0
    """Bytes per request; 0 means the storage's preferred size."""
    memory_budget_bytes: int = 0
    """Memory for staging and read buffers of calls without a budget of their own.

    0 means, for an asynchronous take, half of the host's free memory, shared by the processes of a job. For all other
    operations it means 64 MiB on files, and 256 MiB elsewhere or in a process that uses an accelerator.
    """
    arena_bytes: int = -1
    """Staging memory kept between snapshots; -1 means a quarter of the host's memory, shared by a job's processes."""
    manifest_bytes: int = 1 << 30
    """The maximum size of a manifest. Larger manifests are refused."""
    trace: str = ""
    """A file that every operation appends its timeline to, in Chrome's trace format."""
    metrics: str = ""
    """An address, such as `127.0.0.1:9400`, on which the uploader of a host offers metrics to Prometheus."""
    pending: int = 3
    """The maximum number of concurrent asynchronous takes in a process. Further takes wait, or raise."""
    storage_options: str = ""
    """Storage options for the URLs of the `snapshot` command: a JSON object, or the name of a JSON or YAML file.

    The library itself uses `storage_options`.
    """
    timeout: float = 600.0
    """Seconds without a heartbeat after which a rank counts as dead."""

    deadline: str = ""
    """Time from a stop signal until the scheduler kills the job, such as `30s`, for managers without `deadline`."""

    @classmethod
    def current(cls) -> Settings:
        """Return the current settings: the defaults, overridden by the environment."""
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
                raise ValueError(f"{name} must be {_ARTICLE[kind]}, got {text!r}") from None
        made = cls(**given)  # type: ignore[arg-type]
        if made.direct_io not in ("auto", "always", "never"):
            raise ValueError(f"SNAPSHOT_DIRECT_IO must be auto, always or never, got {made.direct_io!r}")
        if made.file_io not in ("auto", "portable"):
            raise ValueError(f"SNAPSHOT_FILE_IO must be auto or portable, got {made.file_io!r}")
        if made.pending < 1:
            raise ValueError(f"SNAPSHOT_PENDING must be at least 1, got {made.pending}")
        return made

    @staticmethod
    def processes() -> int:
        """Return the number of this job's processes on this host, as set by the launcher."""
        return count_processes()

    def cores(self) -> int:
        """Return the number of cores that this process may use."""
        return count_cores()

    def lane_count(self) -> int:
        """Return the number of threads for data files: more than 4 if each process of the job has cores for it."""
        cores = self.cores()
        return self.lanes or max(min(cores, 4), min(cores // self.processes(), 12))

    def thread_count(self) -> int:
        return self.io_threads or min(self.cores() + 2, 16)


_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}


def expect_positive(name: str, value: float | None) -> None:
    """Raise `ValueError` if a given argument is not above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
