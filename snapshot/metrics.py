"""Metrics: the numbers that events add up to, for Prometheus, OpenTelemetry and others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from snapshot.events import Event

PREFIX = "snapshot_"
COUNTERS = {
    "operations": "Operations that ended, by verb and outcome (ok or failed)",
    "bytes": "Bytes that operations wrote or read, by verb",
    "retries": "Requests that were repeated, by verb",
    "incidents": "Events beside operations, by their name: healed, rerouted, damaged, fell_back and others",
}
DURATION = "seconds"
DURATION_HELP = (
    "Duration of operations, by verb and phase: blocked (until the call returned), staged (until the tensors may "
    "change) and done (until the snapshot was committed, or read)"
)
GAUGES = {
    "goodput_ratio": "Share of this process's time in which no take or restore blocked it",
    "newest_commit_age_seconds": "Seconds since the begin of the newest take that was committed",
    "steps": "Near steps on this host, by the state of their upload",
    "upload_pending_bytes": "Bytes that this host has still to upload",
    "newest_step": "The newest committed step, by tier",
    "newest_step_age_seconds": "Seconds since the newest committed step was taken, by tier",
}
ENDINGS = frozenset(
    (
        "committed",
        "restored",
        "loaded",
        "verified",
        "converted",
        "merged",
        "copied",
        "compared",
        "uploaded",
        "pulled",
        "signed",
    )
)
"""Events at the end of an operation that succeeded."""
INCIDENTS = frozenset(
    (
        "healed",
        "rerouted",
        "replicated",
        "dropped",
        "damaged",
        "degraded",
        "fell_back",
        "tolerated",
        "rotten",
        "pruned",
        "replaced",
    )
)
Labels = tuple[tuple[str, str], ...]


class Change(NamedTuple):
    """An increase of a counter, or a duration."""

    name: str
    value: float
    labels: Labels


def changes_of(event: Event) -> Iterator[Change]:
    """Yield what an event changes."""
    verb, fields = ("verb", event.verb), event.fields
    if event.name in ENDINGS or event.name == "failed":
        outcome = "ok" if event.name in ENDINGS and fields.get("ok", True) else "failed"
        yield Change("operations", 1, (("outcome", outcome), verb))
        if event.name in ENDINGS:
            yield Change("bytes", float(fields.get("bytes", 0)), (verb,))
            if "seconds" in fields:
                yield Change(DURATION, float(fields["seconds"]), (("phase", "done"), verb))
    elif event.name in ("blocked", "staged"):
        yield Change(DURATION, float(fields.get("seconds", 0)), (("phase", event.name), verb))
    elif event.name == "retry":
        yield Change("retries", 1, (verb,))
    elif event.name in INCIDENTS:
        yield Change("incidents", 1, (("event", event.name),))


class Readings(msgspec.Struct):
    """All metrics of a process at one time."""

    pid: int
    began: float
    counters: dict[str, list[tuple[Labels, float]]]
    durations: list[tuple[Labels, int, float]]
    """For each verb and phase: how many there were, and their sum in seconds."""
    lost: float
    """Seconds in which a take or a restore blocked the process."""
    newest: float | None
    """Time when the newest committed take began."""

    def gauges(self, now: float) -> dict[str, list[tuple[Labels, float]]]:
        """Return the metrics that depend on the time."""
        elapsed = max(now - self.began, self.lost, 1e-9)
        found: dict[str, list[tuple[Labels, float]]] = {"goodput_ratio": [((), 1 - self.lost / elapsed)]}
        if self.newest is not None:
            found["newest_commit_age_seconds"] = [((), max(0.0, now - self.newest))]
        return found


class Metrics:
    """An event handler that counts: `add_handler(metrics)`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time()
        self._counters: dict[str, dict[Labels, float]] = {}
        self._durations: dict[Labels, tuple[int, float]] = {}
        self._lost = 0.0
        self._newest: float | None = None

    def __call__(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            for name, value, labels in changes_of(event):
                if name == DURATION:
                    count, total = self._durations.get(labels, (0, 0.0))
                    self._durations[labels] = (count + 1, total + value)
                else:
                    held = self._counters.setdefault(name, {})
                    held[labels] = held.get(labels, 0.0) + value
            seconds = float(event.fields.get("seconds", 0.0))
            if event.name in ("blocked", "restored"):
                self._lost += seconds
            if event.name == "committed" and event.verb != "publish":
                self._newest = time.time() - seconds

    def read(self) -> Readings:
        """Return all metrics."""
        with self._lock:
            counters = {name: list(held.items()) for name, held in self._counters.items()}
            durations = [(labels, count, total) for labels, (count, total) in self._durations.items()]
            return Readings(os.getpid(), self._began, counters, durations, self._lost, self._newest)


def as_prometheus(
    processes: Sequence[tuple[Labels, Readings]], gauges: Mapping[str, Iterable[tuple[Labels, float]]], now: float
) -> str:
    """Return metrics in Prometheus' text format. Those of a process get its labels."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, rows: Sequence[tuple[str, Labels, float]]) -> None:
        if rows:
            lines.extend((f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"))
            lines.extend(f"{PREFIX}{name}{suffix}{_labels(labels)} {value:.17g}" for suffix, labels, value in rows)

    for name, text in COUNTERS.items():
        each = [(own, held) for own, readings in processes for held in readings.counters.get(name, ())]
        add(f"{name}_total", "counter", text, [("", own + labels, value) for own, (labels, value) in each])
    rows = []
    for own, readings in processes:
        for labels, count, total in readings.durations:
            rows += [("_count", own + labels, float(count)), ("_sum", own + labels, total)]
    add(DURATION, "summary", DURATION_HELP, rows)
    for name, text in GAUGES.items():
        held = [(own + labels, value) for own, r in processes for labels, value in r.gauges(now).get(name, ())]
        add(name, "gauge", text, [("", labels, value) for labels, value in [*held, *gauges.get(name, ())]])
    return "\n".join([*lines, ""])


def _labels(labels: Labels) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels)
    return "{" + ",".join(pairs) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
