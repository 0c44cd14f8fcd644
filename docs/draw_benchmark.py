"""Draw the result of `snapshot bench --json` as an SVG with one bar for each system.

python -m snapshot bench --case train --json >docs/_static/benchmark.json
python docs/draw_benchmark.py docs/_static/benchmark.json docs/_static/benchmark.svg
"""

import json
import sys
from html import escape
from pathlib import Path

WIDTH, LEFT, RIGHT = 760, 160, 70
BAR, GAP, HEAD = 16, 6, 34
NAMES = {
    "snapshot": "snapshot",
    "torch.save": "torch.save",
    "dcp": "DCP",
    "safetensors": "safetensors",
    "torchsnapshot": "torchsnapshot",
}
TITLES = {
    "take": "Save, without fsync",
    "durable": "Save, durable (fsync)",
    "restore": "Restore (page cache)",
    "async": "Asynchronous save: time until the call returns",
}
STYLE = """\
.paper { fill: #ffffff } text { fill: #24292f; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px } .small { fill: #57606a; font-size: 11px }
.ours { fill: #1a7f37 } .peer { fill: #8c959f } .raw { fill: #d0d7de }
@media (prefers-color-scheme: dark) {
.paper { fill: #131416 } text { fill: #e6edf3 } .small { fill: #9da7b3 }
.ours { fill: #3fb950 } .peer { fill: #6e7681 } .raw { fill: #30363d }
}"""


def bars(table: dict) -> list[tuple[str, str, float]]:
    """Return the name, the style and the seconds of each bar; of all raw rows, only the fastest."""
    found = []
    for row in table["rows"]:
        if row["kind"] != "raw" and row["name"] in NAMES:
            found.append((NAMES[row["name"]], "ours" if row["kind"] == "ours" else "peer", row["min"]))
    found.sort(key=lambda bar: bar[2])
    raw = [row["min"] for row in table["rows"] if row["kind"] == "raw"]
    return ([("raw I/O, nothing else", "raw", min(raw))] if raw else []) + found


def panel(table: dict, top: int) -> tuple[list[str], int]:
    """Return the lines of one panel, and where the next one begins."""
    found = bars(table)
    most = max(seconds for _, _, seconds in found)
    lines = [f'<text class="title" x="16" y="{top + 16}">{escape(TITLES[table["operation"]])}</text>']
    y = top + HEAD - 8
    for name, style, seconds in found:
        length = max(1.0, (WIDTH - LEFT - RIGHT) * seconds / most)
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{style}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>',
            f'<text class="small" x="{LEFT + length + 6:.1f}" y="{y + 12}">{seconds:.3f} s</text>',
        ]
        y += BAR + GAP
    return lines, y + 10


def draw(result: dict, case: str) -> str:
    """Return the figure of one case as SVG."""
    tables = [table for table in result["tables"] if table["case"] == case and table["operation"] in TITLES]
    nbytes, tensors = tables[0]["bytes"], tables[0]["tensors"]
    title = f"{nbytes / 2**20:,.0f} MiB in {tensors:,} tensors: seconds, less is better"
    top, body = 56, []
    for table in tables:
        lines, top = panel(table, top)
        body += lines
    host, rounds = result["host"], result["settings"]["rounds"]
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    about = f"Minimum of {rounds} rounds on {host['cores']} cores, {host['file_system']}; {versions}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="paper" width="{WIDTH}" height="{top}" rx="6"/>',
            f'<text class="title" x="16" y="24">{escape(title)}</text>',
            f'<text class="small" x="16" y="42">{escape(about)}</text>',
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(json.loads(source.read_text()), "train"))
