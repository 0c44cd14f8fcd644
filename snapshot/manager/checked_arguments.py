"""What a manager is made with, checked where it is made: else it would fail in the middle of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

from snapshot.manager.policies import Policy


def checked_root(root: Any) -> str:
    """Return the root as a text; `TypeError` or `ValueError` if it is none."""
    text = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"root={root!r}: it is a path or a URL")
    if not text:
        raise ValueError("root='': it is a path or a URL, and may not be empty")
    return text


def checked_policy(keep: Any) -> Policy | None:
    """Return the policy; `TypeError` if it is none."""
    if keep is not None and not isinstance(keep, Policy):
        raise TypeError(f"keep={keep!r} is no policy: KeepLatest(n), KeepBest(metric), ..., or several with |")
    return keep


def checked_timeout(timeout: Any) -> float | None:
    """Seconds; `TypeError` or `ValueError` if it is no time above 0."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r}: it is a number of seconds")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: it is a number of seconds above 0")
    return timeout


def checked_signals(signals: Any) -> list[signal.Signals]:
    """Signals that a process can handle; `TypeError` or `ValueError` for anything else."""
    if not isinstance(signals, Iterable) or isinstance(signals, (str, bytes)):
        raise TypeError(f"signals={signals!r}: they are several, such as (signal.SIGTERM, signal.SIGUSR1), or ()")
    found = []
    for each in signals:
        if isinstance(each, bool) or not isinstance(each, int) or each not in signal.valid_signals():
            raise ValueError(f"signals: {each!r} is no signal, such as signal.SIGTERM")
        if each in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals: {signal.Signals(each).name} cannot be handled by any process")
        found.append(signal.Signals(each))
    return found
