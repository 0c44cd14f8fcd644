"""Speed of a storage with different settings, measured until the measurements agree."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from snapshot.cli.doctor_findings import Findings, MiB, existing_folder
from snapshot.cli.screen import say
from snapshot.errors import SnapshotError
from snapshot.registry import open_storage
from snapshot.runtime.loop import run as wait
from snapshot.snapshot import Snapshot
from snapshot.state.stateful import StateDict
from snapshot.system_calls import count_cores
from snapshot.text import counted
from snapshot.url import URL

BETTER = 1.15
"""Minimum speed-up over the defaults for settings to be proposed."""
AGREEING = 1.1
"""Maximum ratio of the best to the second best measurement of a setting if the two agree."""
FEWEST, MOST = 2, 8
"""Minimum and maximum rounds of measurements: they end when those of each setting agree."""
FILE, REMOTE = ("write",), ("write", "read")
"""Measurements that count. A file that was just written is read from memory, which says nothing about its disk."""


@dataclass
class Trial:
    """One choice of settings, with its measurements."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    write: list[float] = field(default_factory=list)
    """Bytes per second, by round."""
    read: list[float] = field(default_factory=list)

    def best(self, what: str) -> float:
        return max(getattr(self, what), default=0.0)

    def spread(self, what: str) -> float:
        """Return the ratio of the best to the second best measurement; infinite before there are two."""
        rates = sorted(getattr(self, what))
        return rates[-1] / rates[-2] if len(rates) >= FEWEST else float("inf")

    def agrees(self, matters: Sequence[str]) -> bool:
        """Return True if the two best measurements are about equal: noise only ever makes one slower."""
        return all(self.spread(what) <= AGREEING for what in matters)


def measure_speeds(url: URL, options: Mapping[str, Any], nbytes: int, seconds: int, findings: Findings) -> None:
    """Take and restore with some settings, and propose those that are clearly better than the defaults.

    Each setting is measured again until its measurements agree. If they do not, nothing is proposed.
    """
    if url.scheme == "file" and shutil.disk_usage(existing_folder(url)).free < 3 * nbytes:
        findings.advice.append("not enough free space to measure: pass a smaller --size")
        return
    tensors = {f"t{i}": torch.randint(0, 255, (max(1, nbytes // 8),), dtype=torch.uint8) for i in range(8)}
    matters = FILE if url.scheme == "file" else REMOTE
    trials = list(_trials(url, options))
    if not _measure_all(
        trials, url, options, tensors, ends=time.monotonic() + seconds, matters=matters, findings=findings
    ):
        return
    measured = [trial for trial in trials if trial.write]
    findings.speeds = [
        {
            "settings": trial.name,
            "write": trial.best("write"),
            "read": trial.best("read"),
            "repeats": len(trial.write),
            "agrees": trial.agrees(matters),
        }
        for trial in measured
    ]
    repeated = [trial for trial in measured if len(trial.write) >= FEWEST]
    noisy = [trial for trial in repeated if not trial.agrees(matters)]
    if trials[0] not in repeated:
        findings.settings.append("none: no time to measure twice; pass more --seconds")
    elif noisy:
        findings.settings.append(
            f"none: this machine is too noisy: the best of {counted(len(noisy[0].write), 'measurement')} of "
            f"{noisy[0].name} differ by more than {AGREEING - 1:.0%}; retry when nothing else runs, or with more "
            "--seconds or a larger --size"
        )
    else:
        _propose(repeated, matters, findings)


def _measure_all(
    trials: Sequence[Trial],
    url: URL,
    options: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    ends: float,
    matters: Sequence[str],
    findings: Findings,
) -> bool:
    """Measure in rounds, and repeat settings whose measurements do not agree yet. Return False if the storage failed.

    The first round measures the defaults, regardless of the time; later rounds each setting that was measured.
    """
    try:
        for turn in range(MOST):
            left = [trial for trial in trials if len(trial.write) == turn and not trial.agrees(matters)]
            for trial in left:
                if time.monotonic() > ends and trials[0].write:
                    return True
                say(f"measuring {trial.name} ...")
                write, read = _measured(url, {**options, **trial.options}, trial.environment, tensors)
                trial.write.append(write)
                trial.read.append(read)
    except SnapshotError as error:
        findings.note("speed", f"{trial.name}: {error}", ok=False)
        return False
    finally:
        say("")
    return True


def _propose(measured: Sequence[Trial], matters: Sequence[str], findings: Findings) -> None:
    """Add the settings that are clearly better than the defaults, if any."""
    defaults = measured[0]

    def gains(trial: Trial) -> list[float]:
        return [trial.best(what) / defaults.best(what) for what in matters]

    best = max(measured, key=lambda trial: min(gains(trial)))
    if min(gains(best)) > 1 / BETTER and max(gains(best)) >= BETTER:
        findings.settings += [f"export {key}={value}" for key, value in best.environment.items()]
        if best.options:
            findings.settings.append(f"storage_options={best.options!r}")
    else:
        findings.settings.append("none: no tried setting is clearly better than the defaults")


def _trials(url: URL, options: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield the settings to try, the defaults first."""
    yield Trial("the defaults")
    if url.scheme == "file":
        for direct in ("never", "always"):
            for lanes in sorted({1, min(4, max(2, count_cores()))}):
                given = {"SNAPSHOT_LANES": str(lanes), "SNAPSHOT_DIRECT_IO": direct}
                name = " ".join(f"{key.removeprefix('SNAPSHOT_').lower()}={each}" for key, each in given.items())
                yield Trial(name, environment=given)
        return
    for part in (8 * MiB, 32 * MiB):
        for at_once in (4, 16, 48):
            given_options = {"part_bytes": part, "concurrency": at_once}
            if _accepts(url, {**options, **given_options}):
                yield Trial(f"part_bytes={part // MiB}MiB concurrency={at_once}", options=given_options)
        if not _accepts(url, {**options, "part_bytes": part, "concurrency": 4}) and _accepts(
            url, {**options, "part_bytes": part}
        ):
            yield Trial(f"part_bytes={part // MiB}MiB", options={"part_bytes": part})


def _accepts(url: URL, options: Mapping[str, Any]) -> bool:
    try:
        open_once(url, options)
    except (ValueError, TypeError):
        return False
    return True


def open_once(url: URL, options: Mapping[str, Any]) -> None:
    """Open and close the storage, to raise errors in the URL or options."""
    wait(open_storage(url, options).close())


def _measured(
    url: URL, options: Mapping[str, Any], environment: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the bytes per second of a durable take, and of a restore."""
    nbytes = sum(tensor.numel() for tensor in tensors.values())
    state = {"doctor": StateDict(tensors)}
    place = url.join(f"snapshot-doctor-{secrets.token_hex(6)}").reveal()
    snapshot = Snapshot(place, storage_options=options)
    with _set(environment):
        try:
            began = time.perf_counter()
            Snapshot.take(place, state, storage_options=options)
            taken = time.perf_counter()
            snapshot.restore(state)
            restored = time.perf_counter()
        finally:
            with suppress(SnapshotError):
                snapshot.delete()
    return nbytes / (taken - began), nbytes / (restored - taken)


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
