"""A timeline of a take: when each part was staged, digested and written, and when all was committed.

Set `SNAPSHOT_TRACE=FILE`, and every verb appends what it did to the file, in Chrome's trace format: open it at
ui.perfetto.dev. All ranks, and writer processes, may share one file. Spans of one name that overlap stand in rows of
their own, so a row shows how busy that step was.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()
_path = ""
_lock = threading.Lock()
_spans: list[str] = []
_rows: dict[str, tuple[list[int], list[int]]] = {}
"""For each name: the rows that are free, and how many there are."""


def to(path: str) -> None:
    """Record into a file from now on; nothing if the path is empty."""
    global _path  # noqa: PLW0603 - one timeline for a process
    _path = path


def span(name: str, **fields: Any) -> AbstractContextManager[Any]:
    """Record what is done inside the context, with some fields that say of what."""
    return _Span(name, fields) if _path else _NOTHING


class _Span:
    __slots__ = ("_began", "_fields", "_name", "_row")

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self._name = name
        self._fields = fields

    def __enter__(self) -> None:
        with _lock:
            free, count = _rows.setdefault(self._name, ([], [0]))
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
        with _lock:
            heapq.heappush(_rows[self._name][0], self._row)
            _spans.append(line)


def save() -> None:
    """Append what was recorded to the file. The format leaves the closing bracket out, so that it can go on."""
    with _lock:
        lines, path = list(_spans), _path
        _spans.clear()
    if not lines or not path:
        return
    with suppress(FileExistsError), open(path, "x") as file:
        file.write("[\n")
    with open(path, "a") as file:
        file.write("".join(f"{line},\n" for line in lines))


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    _spans.clear()
    _rows.clear()


os.register_at_fork(after_in_child=_after_fork)
