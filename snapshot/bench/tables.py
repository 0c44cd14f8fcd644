"""Results of `snapshot bench`, as values and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from snapshot.bench.workloads import INCREMENTAL

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
does not). For an asynchronous save both include the part in the background. `x full` compares the times with
those of a save without a base, by minimum, median and mean; `written` is the share of the state's bytes that is
written.
Compare rows of one table, never of two runs."""

AGAINST_FULL = ("", "x full", "x full med", "x full mean", "written med", "written mean", "written most")


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
    written_bytes: list[int] = field(default_factory=list)
    """Bytes of the data files that this library wrote."""

    def add(self, repetition: dict[str, Any]) -> None:
        """Add one repetition."""
        self.seconds.append(repetition["seconds"])
        self.cpu_seconds.append(repetition["cpu_seconds"])
        self.peak_extra_bytes.append(repetition["peak_extra_bytes"])
        if repetition["written_bytes"] is not None:
            self.written_bytes.append(repetition["written_bytes"])

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

    def against_full(self) -> list[tuple[str, dict[str, float]]]:
        """Return the rows of takes with bases, compared with takes without a base.

        Times are relative to those of a full take, and written bytes to those of the state.
        """
        full = next((row for row in self.rows if row.name == "snapshot" and row.seconds), None)
        if full is None or self.case not in INCREMENTAL:
            return []
        return [
            (
                row.name,
                {
                    "min": min(row.seconds) / min(full.seconds),
                    "median": median(row.seconds) / median(full.seconds),
                    "mean": mean(row.seconds) / mean(full.seconds),
                    "written_median": median(row.written_bytes) / self.nbytes,
                    "written_mean": mean(row.written_bytes) / self.nbytes,
                    "written_most": max(row.written_bytes) / self.nbytes,
                },
            )
            for row in self.rows
            if row is not full and row.written_bytes
        ]

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
            "against_full": dict(self.against_full()),
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
        compared = [AGAINST_FULL, *(compared_row(*each) for each in self.against_full())]
        marked = (("left out", self.left_out), ("note", self.notes), ("FAILED", self.failed))
        notes = [f"  {mark}: {note}" for mark, found in marked for note in found]
        tables = [line for each in (lines, compared) if len(each) > 1 for line in align_columns(each)]
        return "\n".join([head, *tables, *notes])


def compared_row(name: str, shares: Mapping[str, float]) -> tuple[str, ...]:
    """Return the cells of a row of `against_full`."""
    times = (f"{shares[each]:.3f}" for each in ("min", "median", "mean"))
    written = (f"{shares[each]:.2%}" for each in ("written_median", "written_mean", "written_most"))
    return (name, *times, *written)


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
        "written_bytes": row.written_bytes,
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
