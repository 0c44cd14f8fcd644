"""A timeline of all operations: when each part was staged, digested and written, and when the commit happened.

With `SNAPSHOT_TRACE=FILE`, every operation appends its spans to the file in Chrome's trace format, for ui.perfetto.dev.
All ranks and writer processes may share one file. Overlapping spans of one name get rows of their own, so the rows show
how busy that step was.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from snapshot.per_process import PerProcess

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
