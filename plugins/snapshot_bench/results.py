"""Results of `snapshot bench`: values, tables, figures and a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import mean, median
from typing import Any

from snapshot.manager.schedule import lost_share, young_interval
from snapshot.text import counted, duration_text, size_text
from snapshot_bench.names import INCREMENTAL

# Results of `snapshot bench`, as values and as text.

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

Result = Mapping[str, Any]
"""A result of `snapshot bench`, or a part of it, as `--json` prints it."""

COLUMNS = ("", "min s", "median s", "max s", "GB/s", "x raw", "x raw med", "CPU s", "peak MiB")
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
        self.seconds.append(repetition["seconds"])
        self.cpu_seconds.append(repetition["cpu_seconds"])
        self.peak_extra_bytes.append(repetition["peak_extra_bytes"])
        if repetition["written_bytes"] is not None:
            self.written_bytes.append(repetition["written_bytes"])

    def peak(self) -> int | None:
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
        moves = self.operation != "open"
        size = f"{_size(self.nbytes)} in {self.tensors:,} tensors"
        if self.manifest_bytes is not None and not moves:
            size = f"{self.tensors:,} tensors, a manifest of {_size(self.manifest_bytes)}"
        head = f"{self.case}: {OPERATIONS[self.operation]} ({size})"
        table = self.as_json()
        lines = [COLUMNS, *(_row_cells(table, row) for row in table["rows"])]
        compared = [AGAINST_FULL, *(compared_row(*each) for each in table["against_full"].items())]
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


def _row_cells(table: Result, row: Result) -> tuple[str, ...]:
    peak = row["peak_extra_bytes"]
    return (
        row["name"],
        *(f"{seconds:.4f}" for seconds in (row["min"], row["median"], max(row["seconds"]))),
        f"{row['gb_per_second']:.2f}" if table["operation"] != "open" else "-",
        _number(row["ratio"]),
        _number(row["ratio_median"]),
        f"{row['cpu_seconds']:.3f}",
        "?" if peak is None else f"{peak / 2**20:,.0f}",
    )


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


# Drawing of benchmark results as SVG: a panel per operation, and a bar per system.

WIDTH, LEFT, RIGHT = 760, 160, 150
BAR, GAP, HEAD = 16, 6, 26
NAMES: Mapping[str, str] = {"dcp": "DCP"}
STYLE = """\
.paper { fill: #ffffff } text { fill: #24292f; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px } .small { fill: #57606a; font-size: 11px }
.own { fill: #1a7f37 } .peer { fill: #8c959f } .raw { fill: #d0d7de } .spread { opacity: 0.4 }
@media (prefers-color-scheme: dark) {
.paper { fill: #131416 } text { fill: #e6edf3 } .small { fill: #9da7b3 }
.own { fill: #3fb950 } .peer { fill: #6e7681 } .raw { fill: #30363d }
}"""


def draw_case(result: Result, case: str) -> str:
    """Return the figure of one case as SVG."""
    tables = [table for table in result["tables"] if table["case"] == case and find_bars(table)]
    return _figure(result, tables, _describe_size(tables[0]) if tables else case)


def draw_result(result: Result) -> str:
    """Return one figure with all cases as SVG."""
    tables = [table for table in result["tables"] if find_bars(table)]
    one = len({table["case"] for table in tables}) == 1
    return _figure(result, tables, _describe_size(tables[0]) if one else "All cases")


def find_bars(table: Result) -> list[tuple[str, str, float, float]]:
    """Return name, kind, minimum and median of each system, fastest first. Of raw rows, keep only the fastest."""
    raw = sorted((row for row in table["rows"] if row["kind"] == "raw"), key=lambda row: row["min"])[:1]
    chosen = sorted(default_rows(table).values(), key=lambda row: row["min"])
    named = [("raw I/O, nothing else", row) for row in raw]
    named += [(NAMES.get(system, system), row) for row in chosen for system in [str(row["system"])]]
    return [(name, row["kind"], row["min"], row["median"]) for name, row in named]


def default_rows(table: Result) -> dict[str, Result]:
    """Return the row of each system that uses its defaults: it has the system's name."""
    return {row["system"]: row for row in table["rows"] if row["name"] == row["system"]}


def describe_run(result: Result) -> str:
    """Return the rounds, the machine and the versions in one line."""
    host = result["host"]
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    return f"{result['settings']['rounds']} rounds on {host['cores']} cores, {host['file_system']}; {versions}"


def name_device(result: Result) -> str:
    """Return the accelerator with its name, such as `cuda:0 (NVIDIA H100)`; empty for results of the CPU."""
    device = result["host"].get("device")
    return f"{device['device']} ({device['name']})" if device else ""


def describe_device(result: Result) -> str:
    """Return the accelerator and the speed of its link in one line; empty for results of the CPU."""
    device = result["host"].get("device")
    if not device:
        return ""
    speeds = [f"{device[f'to_{side}_gb_per_second']:.3g} GB/s to the {side}" for side in ("host", "device")]
    return f"{name_device(result)}, {'pinned' if device['pinned'] else 'pageable'} copies: {', '.join(speeds)}"


def _describe_size(table: Result) -> str:
    return f"{table['case']}: {size_text(table['bytes'])} in {counted(table['tensors'], 'tensor')}"


def _figure(result: Result, tables: Sequence[Result], title: str) -> str:
    cases = {table["case"] for table in tables}
    about = ["Bar: minimum, and in pale the median, of each system's defaults", describe_run(result)]
    about += filter(None, [describe_device(result)])
    top, body = 42 + 15 * len(about), list[str]()
    for table in tables:
        what = OPERATIONS[table["operation"]]
        lines, top = _panel(find_bars(table), f"{_describe_size(table)}: {what}" if len(cases) > 1 else what, top)
        body += lines
    notes = (f'<text class="small" x="16" y="{42 + 15 * n}">{escape(line)}</text>' for n, line in enumerate(about))
    return draw_svg((WIDTH, top), f"{title}: seconds, less is better", STYLE, [*notes, *body])


def draw_svg(size: tuple[int, int], title: str, style: str, lines: Iterable[str]) -> str:
    """Return a figure: a title on paper, and the lines of SVG below it."""
    width, height = size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>\n{style}\n</style>",
            f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
            f'<text class="title" x="16" y="24">{escape(title)}</text>',
            *lines,
            "</svg>\n",
        ]
    )


def _panel(bars: Sequence[tuple[str, str, float, float]], title: str, top: int) -> tuple[list[str], int]:
    """Return the lines of one panel, and the begin of the next one."""
    most = max(1e-9, *(max(least, middle) for _, _, least, middle in bars))
    scale = (WIDTH - LEFT - RIGHT) / most
    lines = [f'<text class="title" x="16" y="{top + 16}">{escape(title[:1].upper() + title[1:])}</text>']
    y = top + HEAD
    for name, kind, least, middle in bars:
        style = {"ours": "own", "raw": "raw"}.get(kind, "peer")
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            _bar(f"{style} spread", y, middle * scale),
            _bar(style, y, least * scale),
            f'<text class="small" x="{LEFT + middle * scale + 7:.1f}" y="{y + 12}">'
            f"{least:.3f} s, median {middle:.3f}</text>",
        ]
        y += BAR + GAP
    return lines, y + 10


def _bar(style: str, y: int, length: float) -> str:
    return f'<rect class="{style}" x="{LEFT}" y="{y}" width="{max(1.0, length):.1f}" height="{BAR}" rx="2"/>'


# Goodput: the training time that a job loses to saves, restores and repeated work, from measured times.
#
# The model is that of `manager.advice`. A save blocks training for `blocked` seconds, and is complete after `lag`
# more seconds. A failure happens once in `mtbf` seconds on average. It repeats the work since the last complete save,
# after a restore. The lag of an asynchronous save is not measured: it is estimated as the time of a durable save.

DAY = 86_400.0
GOODPUT = ("system", "case", "save", "blocks", "complete after", "restore", "best interval", "lost per day")


@dataclass(frozen=True, slots=True)
class Goodput:
    """The best interval of saves for one system, and the time that is lost nevertheless."""

    case: str
    system: str
    way: str
    """The kind of save: `blocking` or `asynchronous`."""
    blocked: float
    lag: float
    restore: float
    mtbf: float

    @property
    def interval(self) -> float:
        """The seconds between saves with the least loss, never less than a save takes to complete."""
        return max(young_interval(self.blocked, self.mtbf), self.blocked + self.lag, 1e-9)

    @property
    def lost(self) -> float:
        """The seconds of training that are lost per day."""
        rest = self.lag + self.restore
        return DAY * lost_share(self.interval - self.blocked, self.blocked, self.mtbf, rest)

    def as_json(self) -> dict[str, Any]:
        names = ("case", "system", "way", "blocked", "lag", "restore", "interval", "lost")
        return {name: getattr(self, name) for name in names}


def compute_goodput(result: Mapping[str, Any], mtbf: float) -> list[Goodput]:
    """Return the goodput of each measured system that has a save and a restore, least loss first."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for table in result["tables"]:
        for system, row in default_rows(table).items():
            times.setdefault((table["case"], system), {})[table["operation"]] = row["median"]
    found = []
    for (case, system), held in times.items():
        restore = held.get("cold", held.get("restore"))
        save = held.get("durable", held.get("take"))
        if restore is None or save is None:
            continue
        found.append(Goodput(case, system, "blocking", save, 0.0, restore, mtbf))
        if "async" in held:
            found.append(Goodput(case, system, "asynchronous", held["async"], save, restore, mtbf))
    return sorted(found, key=lambda each: (each.case, each.lost))


def goodput_text(goodput: Sequence[Goodput], result: Result) -> str:
    """Return the table of goodput for people."""
    return "\n".join([goodput_title(goodput, result), *align_columns([GOODPUT, *map(_goodput_cells, goodput)])])


def goodput_title(goodput: Sequence[Goodput], result: Mapping[str, Any]) -> str:
    """Return the title of a table of goodput. It names the accelerator, if there is one."""
    device = name_device(result)
    on_device = f" on {device}" if device else ""
    return f"training time lost{on_device}, with a failure every {duration_text(goodput[0].mtbf)}"


# A benchmark result as one HTML page: figures, tables, the machine, and what the numbers mean.

PAGE_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #24292f }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #d0d7de; white-space: nowrap }
th:first-child, td:first-child { text-align: left } svg { max-width: 100%; height: auto }
.note { color: #57606a }
@media (prefers-color-scheme: dark) { body { background: #131416; color: #e6edf3 } th, td { border-color: #30363d }
.note { color: #9da7b3 } }"""


def draw_page(result: Result, goodput: Sequence[Goodput] = ()) -> str:
    """Return the page. It loads nothing from the network."""
    cases = list(dict.fromkeys(table["case"] for table in result["tables"]))
    host = result["host"]
    body = [
        "<h1>snapshot bench</h1>",
        f"<p>{escape(describe_run(result))}. Python {escape(host['python'])}, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB of memory, load {host['load']:g}, {escape(host['when'])}. "
        f"Scale {result['settings']['scale']:g}.</p>",
        *(f"<p>{escape(line)}.</p>" for line in [describe_device(result)] if line),
    ]
    for case in cases:
        tables = [table for table in result["tables"] if table["case"] == case]
        body.append(f"<h2>{escape(case)}</h2>")
        if any(find_bars(table) for table in tables):
            body.append(draw_case(result, case))
        for table in tables:
            body += _table_of(table)
    if goodput:
        title = goodput_title(goodput, result)
        body.append(f"<h2>{escape(title[:1].upper() + title[1:])}</h2>")
        body.append(_html_table(GOODPUT, [_goodput_cells(each) for each in goodput]))
    body.append(
        f"<h2>How to read this</h2><p>{escape(' '.join(READING.split()).removeprefix('How to read this: '))}</p>"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>snapshot bench</title>'
        f"<style>{PAGE_STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _table_of(table: Result) -> Iterable[str]:
    yield f"<h3>{escape(OPERATIONS[table['operation']])}</h3>"
    yield _html_table(COLUMNS, [_row_cells(table, row) for row in table["rows"]])
    if compared := table.get("against_full"):
        yield _html_table(AGAINST_FULL, [compared_row(*each) for each in compared.items()])
    marked = (("left out", table["left_out"]), ("note", table["notes"]), ("failed", table["failed"]))
    for mark, notes in marked:
        yield from (f'<p class="note">{mark}: {escape(note)}</p>' for note in notes)


def _goodput_cells(each: Goodput) -> tuple[str, ...]:
    """Return the cells of one line: system, case, kind of save, times, interval and loss."""
    times = (each.blocked, each.blocked + each.lag, each.restore, each.interval, each.lost)
    return (each.system, each.case, each.way, *map(duration_text, times))


def _html_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
