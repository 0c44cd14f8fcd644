"""Validation of a manager's arguments at creation, so that they cannot fail in the middle of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

from snapshot.manager.policies import Policy


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
        if each in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals must not include {signal.Signals(each).name}: no process can handle it")
        found.append(signal.Signals(each))
    return found
