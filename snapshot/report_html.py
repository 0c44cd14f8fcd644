"""Reports as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = {"added": "#1a7f37", "removed": "#cf222e", "changed": "#9a6700", "renamed": "#0969da"}
"""The colour of each kind of change, which light and dark pages show."""
CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0"

Row = tuple[str, str, str] | str
"""A kind, a path and a text, or a text alone."""


def report_html(summary: str, rows: Iterable[Row]) -> str:
    """Return the summary of a report, and a table of its details."""
    table = "".join(_row(row) for row in rows)
    return f"<div><strong>{escape(summary)}</strong>{f'<table>{table}</table>' if table else ''}</div>"


def _row(row: Row) -> str:
    if isinstance(row, str):
        return f'<tr><td colspan="3" style="{CELL}">{escape(row)}</td></tr>'
    kind, path, said = map(escape, row)
    style = f"{CELL}; color: {COLOURS[kind]}" if row[0] in COLOURS else CELL
    return (
        f'<tr><td style="{style}">{kind}</td><td style="{CELL}"><code>{path}</code></td>'
        f'<td style="{CELL}">{said}</td></tr>'
    )
