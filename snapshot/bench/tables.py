"""Results of `snapshot bench`, as values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OPERATIONS = {
    "take": "save, not durable",
    "durable": "save, durable (files and folders synced)",
    "restore": "restore, files in the page cache",
    "cold": "restore, files not in the page cache",
    "async": "asynchronous save: time until the call returns",
    "open": "open a manifest",
}

READING = """\
How to read this: each row ran in its own process, rows alternate within each round, and the first repetition
of each is not counted. `x raw` is the fastest repetition over the fastest of any raw row in the table; `x raw med`
is that ratio of medians. Raw rows move the same bytes and record no names and no digests. `CPU s` is the whole
process's time, over all threads; `peak MiB` is the rise of its resident memory (mapped pages count, the page cache
does not). For an asynchronous save both include the part in the background.
Compare rows of one table, never of two runs."""


@dataclass(slots=True)
class Row:
    """One system's way to run an operation, with the measurements of its repetitions."""

    system: str
    kind: str
    """`raw`, `ours` or `peer`."""
    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_extra_bytes: list[int | None] = field(default_factory=list)

    def add(self, repetition: dict[str, Any]) -> None:
        """Add one repetition."""
        self.seconds.append(repetition["seconds"])
        self.cpu_seconds.append(repetition["cpu_seconds"])
        self.peak_extra_bytes.append(repetition["peak_extra_bytes"])

    def peak(self) -> int | None:
        """Return the highest peak of all repetitions."""
        return max((peak for peak in self.peak_extra_bytes if peak is not None), default=None)


@dataclass(slots=True)
class ResultTable:
    """One operation of one case, over all systems."""

    case: str
    about: str
    operation: str
    nbytes: int = 0
    tensors: int = 0
    manifest_bytes: int | None = None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Failures of this library, or of raw baselines, which should always work."""

    def raw(self) -> tuple[float, float] | None:
        """Return the fastest raw row's fastest repetition, and the fastest raw row's median."""
        rows = [row.seconds for row in self.rows if row.kind == "raw" and row.seconds]
        return (min(map(min, rows)), min(map(median, rows))) if rows else None

    def as_json(self) -> dict[str, Any]:
        """Return the table for programs."""
        raw = self.raw()
        return {
            "case": self.case,
            "operation": self.operation,
            "about": OPERATIONS[self.operation],
            "bytes": self.nbytes,
            "tensors": self.tensors,
            "manifest_bytes": self.manifest_bytes,
            "rows": [_row_json(row, self.nbytes, raw) for row in self.rows if row.seconds],
            "left_out": self.left_out,
            "notes": self.notes,
            "failed": self.failed,
        }

    def as_text(self) -> str:
        """Return the table for people."""
        raw = self.raw()
        moves = self.operation != "open"
        size = f"{_size(self.nbytes)} in {self.tensors:,} tensors"
        if self.manifest_bytes is not None and not moves:
            size = f"{self.tensors:,} tensors, a manifest of {_size(self.manifest_bytes)}"
        head = f"{self.case}: {OPERATIONS[self.operation]} ({size})"
        lines = [("", "min s", "median s", "GB/s", "x raw", "x raw med", "CPU s", "peak MiB")]
        for row in self.rows:
            if row.seconds:
                made = _row_json(row, self.nbytes, raw)
                lines.append(
                    (
                        row.name,
                        f"{made['min']:.4f}",
                        f"{made['median']:.4f}",
                        f"{made['gb_per_second']:.2f}" if moves else "-",
                        _number(made["ratio"]),
                        _number(made["ratio_median"]),
                        f"{made['cpu_seconds']:.3f}",
                        "?" if made["peak_extra_bytes"] is None else f"{made['peak_extra_bytes'] / 2**20:.0f}",
                    )
                )
        marked = (("left out", self.left_out), ("note", self.notes), ("FAILED", self.failed))
        notes = [f"  {mark}: {note}" for mark, found in marked for note in found]
        return "\n".join([head, *(align_columns(lines) if len(lines) > 1 else ()), *notes])


def _row_json(row: Row, nbytes: int, raw: tuple[float, float] | None) -> dict[str, Any]:
    least, middle = min(row.seconds), median(row.seconds)
    return {
        "name": row.name,
        "system": row.system,
        "kind": row.kind,
        "seconds": row.seconds,
        "min": least,
        "median": middle,
        "gb_per_second": nbytes / least / 1e9,
        "ratio": least / raw[0] if raw else None,
        "ratio_median": middle / raw[1] if raw else None,
        "cpu_seconds": median(row.cpu_seconds),
        "peak_extra_bytes": row.peak(),
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:,.1f} KiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def align_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
