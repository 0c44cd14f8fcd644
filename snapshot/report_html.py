"""Reports as HTML, for notebooks."""

from __future__ import annotations

from html import escape
from itertools import islice

from snapshot.reports import MARKS, Change, Line, Report

COLOURS = {"added": "#1a7f37", "removed": "#cf222e", "changed": "#9a6700", "renamed": "#0969da"}
"""The colour of each kind of change, which light and dark pages show."""
CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0"


def report_html(report: Report, most: int) -> str:
    """Return the summary of a report, and a row for each of its first `most` details."""
    rows = [_row(each) for each in islice(report.details, most)]
    rest = len(report.details) - len(rows)
    if rest > 0:
        rows.append(f'<tr><td colspan="3" style="{CELL}">... {rest:,} more</td></tr>')
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    return f"<div><strong>{escape(report.summary)}</strong>{table}</div>"


def _row(detail: object) -> str:
    if isinstance(detail, Line):
        return _cells(detail.kind, detail.path, detail.detail)
    if isinstance(detail, Change):
        name = f"{detail.before} -> {detail.path}" if detail.kind == "renamed" else detail.path
        said = str(detail).partition(f"{MARKS[detail.kind]} {name}")[2].removeprefix(": ")
        return _cells(detail.kind, name, said, COLOURS[detail.kind])
    return f'<tr><td colspan="3" style="{CELL}">{escape(str(detail))}</td></tr>'


def _cells(kind: str, path: str, said: str, colour: str = "") -> str:
    style = f"{CELL}; color: {colour}" if colour else CELL
    return (
        f'<tr><td style="{style}">{escape(kind)}</td><td style="{CELL}"><code>{escape(path)}</code></td>'
        f'<td style="{CELL}">{escape(said)}</td></tr>'
    )
