"""Drawing of benchmark results as SVG: a panel per operation, and a bar per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from snapshot.bench.tables import OPERATIONS
from snapshot.text import counted, size_text

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

Result = Mapping[str, Any]
"""A result of `snapshot bench`, as `--json` prints it."""


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
    title = f"{title}: seconds, less is better"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="paper" width="{WIDTH}" height="{top}" rx="6"/>',
            f'<text class="title" x="16" y="24">{escape(title)}</text>',
            *(f'<text class="small" x="16" y="{42 + 15 * n}">{escape(line)}</text>' for n, line in enumerate(about)),
            *body,
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
