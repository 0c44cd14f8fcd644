"""A benchmark result as one HTML page: figures, tables, the machine, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from snapshot.bench.figure import Result, describe_device, describe_run, draw_case, find_bars
from snapshot.bench.goodput import Goodput, goodput_title
from snapshot.bench.tables import AGAINST_FULL, OPERATIONS, READING, compared_row
from snapshot.durations import duration_text

STYLE = """\
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
        body += _goodput_table(goodput, goodput_title(goodput, result))
    body.append(
        f"<h2>How to read this</h2><p>{escape(' '.join(READING.split()).removeprefix('How to read this: '))}</p>"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>snapshot bench</title>'
        f"<style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _table_of(table: Result) -> Iterable[str]:
    yield f"<h3>{escape(OPERATIONS[table['operation']])}</h3>"
    rows: list[tuple[str, ...]] = [
        (
            row["name"],
            f"{row['min']:.4f}",
            f"{row['median']:.4f}",
            f"{max(row['seconds']):.4f}",
            f"{row['gb_per_second']:.2f}" if table["operation"] != "open" else "-",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "-" if row["ratio_median"] is None else f"{row['ratio_median']:.2f}",
            f"{row['cpu_seconds']:.3f}",
            "?" if row["peak_extra_bytes"] is None else f"{row['peak_extra_bytes'] / 2**20:,.0f}",
        )
        for row in table["rows"]
    ]
    names = ("", "min s", "median s", "max s", "GB/s", "x raw", "x raw med", "CPU s", "peak MiB")
    yield _html_table(names, rows)
    if compared := table.get("against_full"):
        yield _html_table(AGAINST_FULL, [compared_row(*each) for each in compared.items()])
    marked = (("left out", table["left_out"]), ("note", table["notes"]), ("failed", table["failed"]))
    for mark, notes in marked:
        yield from (f'<p class="note">{mark}: {escape(note)}</p>' for note in notes)


def _goodput_table(goodput: Sequence[Goodput], title: str) -> Iterable[str]:
    yield f"<h2>{escape(title[:1].upper() + title[1:])}</h2>"
    names = ("system", "case", "save", "blocks", "complete after", "restore", "best interval", "lost per day")
    yield _html_table(names, [goodput_row(each) for each in goodput])


def goodput_row(each: Goodput) -> tuple[str, ...]:
    """Return the cells of one line: system, case, kind of save, times, interval and loss."""
    times = (each.blocked, each.blocked + each.lag, each.restore, each.interval, each.lost)
    return (each.system, each.case, each.way, *map(duration_text, times))


def _html_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
