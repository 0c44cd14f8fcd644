"""The option `near` of a manager: takes in a folder of each host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import msgspec

from snapshot.io.system import expect_linux
from snapshot.io.url import URL
from snapshot.manager.policies import KeepLatest, Policy, checked_policy
from snapshot.save.compression import expect_compression
from snapshot_tiers.control import Upload
from snapshot_tiers.join import TierOptions

_KEEP = KeepLatest(2)


@dataclass(frozen=True)
class Near:
    """For `SnapshotManager(near=...)`: takes are committed in a folder of each host, and uploaded in the background.

    See docs/guides/tiers.md.

    Args:
        folder: A folder of each host, on a local disk or in memory (`/dev/shm/run`).
        keep: Policy of the near steps to keep, or a number of the latest. Those that are still wanted far are kept,
            too. None keeps all.
        upload: Steps that are uploaded: `"latest"` (the newest one, again and again), each multiple of a number, or
            None for those that `wait("far")` or `close` ask for.
        replicas: Number of other hosts that keep a copy of each near file.
        rate: Maximum bytes per second of a host's uploads.
        compression: `"zstd"`: the uploader compresses files on their way to the root.
        grace: Seconds that `close`, and a take after `should_stop` returned True, wait for the upload, if the
            manager's deadline is not nearer.
        survives: True if the folder is still there after the job was stopped, as on a host that stays. A manager with a
            `deadline` then saves there if there is no time for the upload. Copies on other hosts count as well.

    >>> from snapshot_tiers import Near
    >>> Near("/dev/shm/run", replicas=2).keep
    KeepLatest(n=2)
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    keep: Policy | int | None = _KEEP
    upload: Upload = "latest"
    replicas: int = 1
    rate: float | None = None
    compression: Literal["zstd"] | None = None
    grace: float = 300.0
    survives: bool = False

    def __post_init__(self) -> None:
        folder = os.fspath(self.folder) if isinstance(self.folder, (str, os.PathLike)) else None
        if not isinstance(folder, str) or not folder or "://" in folder:
            raise ValueError(f"near must be a folder of this host, such as '/dev/shm/run', got {self.folder!r}")
        checked_policy(self.keep)
        whole = isinstance(self.upload, int) and not isinstance(self.upload, bool) and self.upload >= 1
        if self.upload not in ("latest", None) and not whole:
            raise ValueError(f"upload must be 'latest', a number of steps, or None, got {self.upload!r}")
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 0:
            raise ValueError(f"replicas must be a number of hosts, at least 0, got {self.replicas!r}")
        rate, grace = self.rate, self.grace
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0):
            raise ValueError(f"rate must be a number of bytes per second above 0, got {rate!r}")
        if self.compression not in (None, "zstd"):
            raise ValueError(f"compression must be None or 'zstd', got {self.compression!r}")
        expect_compression(self.compression)
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not grace >= 0:
            raise ValueError(f"grace must be a number of seconds, at least 0, got {grace!r}")

        if not isinstance(self.survives, bool):
            raise TypeError(f"survives must be True or False, got {self.survives!r}")

    def below(self, far: URL, options: Mapping[str, Any] | None) -> TierOptions:
        """Return the options of the tiers of a run whose root is `far`; raise TypeError or ValueError if invalid."""
        expect_linux("near")
        if far.scheme == "memory":
            raise ValueError("root must be a storage that the uploader can reach, not the memory of this process")
        given = dict(options or {})
        try:
            msgspec.json.encode(given)
        except TypeError as error:
            raise TypeError(f"storage_options must be JSON values for a manager with near: {error}") from error
        path = os.path.abspath(os.path.expanduser(self.folder))
        if far.scheme == "file" and os.path.realpath(far.location) == os.path.realpath(path):
            raise ValueError(f"near must be another folder than root, got {self.folder!r} for both")
        return TierOptions(
            near=str(path),
            far=far,
            options=given,
            upload=self.upload,
            replicas=self.replicas,
            rate=self.rate,
            compression=self.compression,
        )
