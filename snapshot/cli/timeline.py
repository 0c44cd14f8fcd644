"""Timeline of one take from a trace: its spans, and the rank of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_SPANS = 50_000
_FILE = re.compile(r"data/([0-9a-f]+)-([0-9]+)-")


@dataclass
class Span:
    """One operation of a process. Times are in microseconds."""

    name: str
    process: str
    row: str
    begin: float
    length: float
    fields: Mapping[str, Any]
    take: str = ""
    """Save id of the take that the span belongs to."""

    @property
    def end(self) -> float:
        return self.begin + self.length

    @property
    def file(self) -> re.Match[str] | None:
        """Match of the save id and the rank in the name of the written file."""
        return _FILE.match(str(self.fields.get("file", "")))


def events_in(path: Path) -> list[Span]:
    """Return the spans of a trace file; raise ValueError if it is not one."""
    found = [event for event in _decoded(path) if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        made = [
            Span(
                str(event["name"]),
                str(event["pid"]),
                str(event["tid"]),
                float(event["ts"]),
                float(event["dur"]),
                dict(event.get("args", {})),
            )
            for event in found
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a timeline that SNAPSHOT_TRACE recorded: {error!r}") from None
    if not made:
        raise ValueError(f"{path}: has no timeline")
    return made


def timeline(spans: Sequence[Span], save_id: str) -> dict[str, Any]:
    """Return the data to draw: the spans of the take `save_id`, or all if the trace does not have that take."""
    takes = _attribute(spans)
    chosen = [span for span in spans if span.take == save_id] if save_id in takes else list(spans)
    ranks = {span.process: found[2] for span in spans if (found := span.file)}
    begin = min((span.begin for span in chosen), default=0.0)
    if len(chosen) > MOST_SPANS:
        chosen = sorted(chosen, key=lambda span: span.length, reverse=True)[:MOST_SPANS]
    several = save_id not in takes and len(takes) > 1

    def row(span: Span) -> str:
        rank = ranks.get(span.process)
        label = f"process {span.process}" if rank is None else f"rank {rank}"
        if rank is not None and len({process for process, each in ranks.items() if each == rank}) > 1:
            label += f", process {span.process}"  # a restarted rank, or one with a writer process
        return f"take {span.take}, {label}: {span.row}" if several else f"{label}: {span.row}"

    return {
        "spans": [
            [
                span.name,
                row(span),
                round((span.begin - begin) / 1000, 3),
                round(span.length / 1000, 3),
                ", ".join(f"{key} {value}" for key, value in span.fields.items())[:200],
            ]
            for span in sorted(chosen, key=lambda span: span.begin)
        ],
        "take": save_id if save_id in takes else "",
        "takes_left_out": len(takes) - 1 if save_id in takes else 0,
    }


def _attribute(spans: Iterable[Span]) -> set[str]:
    """Set the take of each span, and return the takes.

    A write names its file, and so its take. A process stages and digests before it writes, and commits afterwards.
    """
    by_process: dict[str, list[Span]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    everywhere = _ends(spans)
    for held in by_process.values():
        ends = _ends(held) or everywhere  # for a process that passes its bytes to a writer
        for span in held:
            if found := span.file:
                span.take = found[1]
            elif ends and span.name == "commit":
                before = [(end, take) for take, end in ends.items() if end <= span.begin]
                span.take = max(before)[1] if before else min((end, take) for take, end in ends.items())[1]
            elif ends:
                after = [(end, take) for take, end in ends.items() if end >= span.begin]
                span.take = min(after)[1] if after else max((end, take) for take, end in ends.items())[1]
    return set(everywhere)


def _ends(spans: Iterable[Span]) -> dict[str, float]:
    """Return the end of the last write of each take."""
    ends: dict[str, float] = {}
    for span in spans:
        if found := span.file:
            ends[found[1]] = max(span.end, ends.get(found[1], span.end))
    return ends


def _decoded(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text.rstrip().rstrip(",").rstrip("]") + "]" if text.lstrip().startswith("[") else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a timeline in Chrome's trace format: {error}") from None
    found = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(found, list):
        raise ValueError(f"{path}: not a timeline in Chrome's trace format")
    return found
