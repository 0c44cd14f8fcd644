"""Validation of a manager's arguments at creation, so that they cannot fail in the middle of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from snapshot.io.system import expect_linux, find_signals
from snapshot.io.url import URL
from snapshot.manager.policies import Policy
from snapshot.save.compression import expect_compression
from snapshot.tiers.join import TierOptions


def checked_root(root: Any) -> str:
    """Return the root as a str; raise TypeError or ValueError if invalid."""
    text = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"root must be a path or a URL, got {root!r}")
    if not text:
        raise ValueError("root must be a path or a URL, got ''")
    return text


def checked_policy(keep: Any) -> Policy | None:
    """Return the policy; raise TypeError if invalid."""
    if keep is not None and not isinstance(keep, Policy):
        raise TypeError(
            f"keep must be a policy (KeepLatest(n), KeepBest(metric), ..., or several with |), got {keep!r}"
        )
    return keep


def checked_timeout(timeout: Any) -> float | None:
    """Return the timeout in seconds; raise TypeError or ValueError if not a number above 0."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
    return timeout


def checked_signals(signals: Any) -> list[signal.Signals]:
    """Return signals that a process can handle; raise TypeError or ValueError for other values."""
    if not isinstance(signals, Iterable) or isinstance(signals, (str, bytes)):
        raise TypeError(f"signals must be an iterable such as (signal.SIGTERM, signal.SIGUSR1), or (), got {signals!r}")
    found = []
    for each in signals:
        if isinstance(each, bool) or not isinstance(each, int) or each not in signal.valid_signals():
            raise ValueError(f"signals must be valid signals such as signal.SIGTERM, got {each!r}")
        if each in find_signals("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals must not include {signal.Signals(each).name}: no process can handle it")
        found.append(signal.Signals(each))
    return found


def checked_tiers(
    near: Any, far: URL, options: Mapping[str, Any] | None, *, upload: Any, replicas: Any, rate: Any, compression: Any
) -> TierOptions:
    """Return the arguments about tiers; raise TypeError or ValueError if invalid."""
    folder = os.fspath(near) if isinstance(near, (str, os.PathLike)) else None
    if not isinstance(folder, str) or not folder or "://" in folder:
        raise ValueError(f"near must be a folder of this host, such as '/dev/shm/run', got {near!r}")
    expect_linux("near")
    if far.scheme == "memory":
        raise ValueError("root must be a storage that the uploader can reach, not the memory of this process")
    whole = isinstance(upload, int) and not isinstance(upload, bool) and upload >= 1
    if upload not in ("latest", None) and not whole:
        raise ValueError(f"upload must be 'latest', a number of steps, or None, got {upload!r}")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        raise ValueError(f"replicas must be a number of hosts, at least 0, got {replicas!r}")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0):
        raise ValueError(f"rate must be a number of bytes per second above 0, got {rate!r}")
    if compression not in (None, "zstd"):
        raise ValueError(f"upload_compression must be None or 'zstd', got {compression!r}")
    expect_compression(compression)
    given = dict(options or {})
    try:
        msgspec.json.encode(given)
    except TypeError as error:
        raise TypeError(f"storage_options must be JSON values for a manager with near: {error}") from error
    path = os.path.abspath(os.path.expanduser(folder))
    if far.scheme == "file" and os.path.realpath(far.location) == os.path.realpath(path):
        raise ValueError(f"near must be another folder than root, got {near!r} for both")
    return TierOptions(
        near=path, far=far, options=given, upload=upload, replicas=replicas, rate=rate, compression=compression
    )


def checked_grace(grace: Any) -> float:
    """Return the grace in seconds; raise ValueError if it is not a number of at least 0."""
    if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not grace >= 0:
        raise ValueError(f"grace must be a number of seconds, at least 0, got {grace!r}")
    return grace
