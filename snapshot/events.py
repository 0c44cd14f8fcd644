"""Events: one log line per operation, handlers, the numbers that events add up to, and traces."""

from __future__ import annotations

import heapq
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from snapshot import extensions
from snapshot.errors import SnapshotError
from snapshot.io.system import PerProcess

# Events: one log line per operation, and handlers that are called with each event.

log = logging.getLogger("snapshot")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an operation.

    Its name is `start`, `staged`, `committed`, `restored`, `loaded`, `verified`, `deleted`, `converted`, `merged`,
    `copied`, `compared`, `signed`, `failed` or `cleaned`. A manager also sends `pruned`, `fell_back` and `stopping`.

    A take sends `blocked` when its call returns, with the `seconds` that the call took.

    A take sends `committed` with its `bytes`, `shared_bytes` and `seconds`, the `digest` at the end of its manifest,
    from which every other byte of the snapshot follows, why it is `suspect`, and other `findings` of guards, or `()`.

    A take with `compression="auto"` sends `compression`: whether it is `chosen`, and the expected bytes per second,
    `raw` and `compressed`.

    A take with a `base` sends `shared` with the number of `files` and their `bytes`, and `rotten` with a damaged
    `file` of the base and its `faults`.

    A manager with `near` sends `degraded` for a take that is written directly to the far root. It sends `replaced` for
    an uploader that hung, with its `pid`. It sends `rerouted` for a file that is read from another place than the
    `source` that failed. It sends `healed` for a damaged near file that was replaced. The events of an uploader are
    sent in its own process: `uploaded`, `replicated`, `dropped`, `damaged` and `healed`. With `on_error="warn"`, a
    manager sends `tolerated`, with the number of `failures`. It sends `overdue` if `every` has passed twice without a
    commit, with the `step` and a `text`. It sends `stalled` for uploads that do not advance, with their `steps` and the
    `error` that the uploader had. With `exports`, it sends `exported`, and `export_failed` with the `error`, the number
    of the `attempt`, and `gives_up`. The attempt is 0 if the step was removed before.

    A manager that was told to stop sends `stopping`, with the `reason` and the seconds that are `left`, and `preempted`
    for each take after that: what was `saved`, in which `step`, and the seconds that were `left` and `needed`.

    A manager whose root is a folder sends `nearly_full` before a take if less is `free` there than the last `step`
    `took`, in bytes, once until that changes.

    A take sends `guard` for each finding of a guard, with its name as `guard`, and a `text`. It sends `guard_failed` if
    a guard cannot examine a state.

    A `Publisher` sends `pruned` with the deleted `versions`, and `full_only` if deltas do not fit into its budget. A
    `Subscriber` sends `pulled`, and `fell_back` for a version that it cannot use. It sends `damaged` for a local
    version that changed. It sends `left_out` for a foreign file beside the weights that it does not pull. Both send
    `notify_failed` for a hook that failed.

    A `retry` event has a request as its verb and a file as its path, with `attempt`, `error` and `pause` (in seconds).
    A `swept` event has the number of `uploads` that were dropped.
    """

    name: str
    verb: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Event], None]
GROUP: extensions.Group = "snapshot.events"
"""The entry-point group for handlers of installed packages: `name = "package.module:function"`.

They are loaded with the first event of a process.
"""
_handlers: list[Handler] = []
_points = extensions.points(GROUP)
"""Entry points are listed at once, which takes 20 ms, but loaded later, since they import this library."""
_brought: list[Handler] = []
_loading = PerProcess(threading.RLock)
"""Held while entry points are loaded. A handler may send events itself while it is loaded."""


def add_handler(handler: Handler) -> None:
    """Call `handler` with every event. Exceptions of a handler are logged, and do not fail the operation."""
    _handlers.append(handler)


def remove_handler(handler: Handler) -> None:
    """Stop calling a handler."""
    _handlers.remove(handler)


def emit(name: str, verb: str, path: str, **fields: Any) -> None:
    """Call the handlers, and log the event if it ends an operation."""
    if name in LOGGED:
        shown = ", ".join(f"{key} {value}" for key, value in fields.items() if value != ())
        log.info("%s %s: %s", verb, path, shown)
    for handler in (*_installed(), *_handlers):
        try:
            handler(Event(name, verb, path, fields))
        except BaseException as error:
            if extensions.is_interrupt(error):
                raise
            log.exception("an event handler failed on %s of %s", name, path)


def _installed() -> list[Handler]:
    """Return the handlers of installed packages. A handler that cannot be loaded is logged and skipped."""
    with _loading.get():  # other threads wait: their events are for these handlers, too
        while _points:
            point = _points.pop()
            try:
                _brought.append(extensions.load(point, f"the event handler {point.name}"))
            except SnapshotError:
                log.exception("cannot load the event handler %s = %s", point.name, point.value)
    return _brought


def warn(message: str) -> None:
    """Warn with the location of the caller's code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and extensions.is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


# Metrics: the numbers that events add up to, for Prometheus, OpenTelemetry and others.

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
ENDINGS = frozenset((
    "committed", "restored", "loaded", "verified", "converted", "merged", "copied", "compared", "exported", "uploaded",
    "pulled", "signed",
))  # fmt: skip
"""Events at the end of an operation that succeeded."""
LOGGED = ENDINGS - {"uploaded", "pulled"} | {"deleted"}
INCIDENTS = frozenset((
    "healed", "rerouted", "replicated", "dropped", "damaged", "degraded", "fell_back", "tolerated", "rotten", "pruned",
    "replaced", "export_failed",
))  # fmt: skip
Labels = tuple[tuple[str, str], ...]


class MetricChange(NamedTuple):
    """An increase of a counter, or a duration."""

    name: str
    value: float
    labels: Labels


def changes_of(event: Event) -> Iterator[MetricChange]:
    """Yield what an event changes."""
    verb, fields = ("verb", event.verb), event.fields
    if event.name in ENDINGS or event.name == "failed":
        outcome = "ok" if event.name in ENDINGS and fields.get("ok", True) else "failed"
        yield MetricChange("operations", 1, (("outcome", outcome), verb))
        if event.name in ENDINGS:
            yield MetricChange("bytes", float(fields.get("bytes", 0)), (verb,))
            if "seconds" in fields:
                yield MetricChange(DURATION, float(fields["seconds"]), (("phase", "done"), verb))
    elif event.name in ("blocked", "staged"):
        yield MetricChange(DURATION, float(fields.get("seconds", 0)), (("phase", event.name), verb))
    elif event.name == "retry":
        yield MetricChange("retries", 1, (verb,))
    elif event.name in INCIDENTS:
        yield MetricChange("incidents", 1, (("event", event.name),))


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


# A timeline of all operations: when each part was staged, digested and written, and when the commit happened.
#
# With `SNAPSHOT_TRACE=FILE`, every operation appends its spans to the file in Chrome's trace format, for
# ui.perfetto.dev. All ranks and writer processes may share one file. Overlapping spans of one name get rows of their
# own, so the rows show how busy that step was.

_NOTHING: AbstractContextManager[Any] = nullcontext()


class _Timeline:
    """Spans that were recorded but not written yet."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.lock = threading.Lock()
        self.spans: list[str] = []
        self.rows: dict[str, tuple[list[int], list[int]]] = {}
        """For each name: the free rows, and the number of rows."""

    def forked(self) -> _Timeline:
        """Return a timeline for a forked child: the same file, without the parent's spans."""
        return _Timeline(self.path)


_timeline = PerProcess(_Timeline, _Timeline.forked)


def to(path: str) -> None:
    """Record into a file from now on. An empty path stops recording."""
    _timeline.get().path = path


def span(name: str, **fields: Any) -> AbstractContextManager[Any]:
    """Record the time spent in the context, with fields that describe the work."""
    timeline = _timeline.made()
    return _Span(timeline, name, fields) if timeline is not None and timeline.path else _NOTHING


class _Span:
    __slots__ = ("_began", "_fields", "_name", "_row", "_timeline")

    def __init__(self, timeline: _Timeline, name: str, fields: dict[str, Any]) -> None:
        self._timeline = timeline
        self._name = name
        self._fields = fields

    def __enter__(self) -> None:
        with self._timeline.lock:
            free, count = self._timeline.rows.setdefault(self._name, ([], [0]))
            if not free:
                count[0] += 1
                free.append(count[0])
            self._row = heapq.heappop(free)
        self._began = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter_ns()
        line = json.dumps(
            {
                "name": self._name,
                "ph": "X",
                "ts": self._began / 1000,
                "dur": (ended - self._began) / 1000,
                "pid": os.getpid(),
                "tid": f"{self._name} {self._row}",
                "args": self._fields,
            },
            default=str,
        )
        with self._timeline.lock:
            heapq.heappush(self._timeline.rows[self._name][0], self._row)
            self._timeline.spans.append(line)


def save() -> None:
    """Append the recorded spans to the file. The format needs no closing bracket, so further spans can follow."""
    timeline = _timeline.get()
    with timeline.lock:
        lines, path = timeline.spans, timeline.path
        timeline.spans = []
    if not lines or not path:
        return
    with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
        file.write("[\n")
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{line},\n" for line in lines))
