"""Run commands, and draw them with their real output as an animated SVG.

python docs/record_terminal.py docs/_static/terminal.svg

The commands run in a folder that holds the snapshots of the script in docs/reference/cli/index.md.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "python quickstart.py",
    "snapshot ls run",
    "snapshot verify run/step-300",
    "snapshot diff run/step-100 run/step-200 --values --select 'model/1.norm1.*'",
]
COLUMNS, LINE, CHARACTER, MARGIN, TYPING, PAUSE = 104, 19, 7.83, 14, 0.9, 0.12
NO_BREAK = "\u00a0"
STYLE = """\
.frame { fill: #161b22 } text { fill: #e6edf3; font: 13px ui-monospace, Menlo, Consolas, monospace }
.command { fill: #7ee787 }
.line { animation: show 0.01s linear both }
@keyframes show { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { .line { animation: none } }"""


def output(command: str, folder: Path) -> list[str]:
    """Return the lines that a command prints in a folder."""
    words = shlex.split(command)
    if words[0] == "snapshot":
        words = [sys.executable, "-m", "snapshot", *words[1:]]
    else:
        words = [sys.executable, str(ROOT / "examples" / words[1])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    done = subprocess.run(  # noqa: S603 - the commands above
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return done.stdout.replace(f"{folder}/", "").rstrip("\n").split("\n")


def record(folder: Path) -> list[tuple[str, str, float]]:
    """Return each line with its style and the second when it appears."""
    page = (ROOT / "docs" / "cli" / "index.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    subprocess.run(  # noqa: S603 - the script of a page
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    lines, now = [], 0.3
    for command in COMMANDS:
        lines.append((f"$ {command}", "command", now))
        now += TYPING
        for line in output(command, folder):
            lines.append((line, "", now))
            now += PAUSE
        lines.append(("", "", now))
        now += TYPING
    return lines[:-1]


def draw(lines: list[tuple[str, str, float]]) -> str:
    """Return the recording as SVG."""
    width = round(2 * MARGIN + CHARACTER * max(len(line) for line, _, _ in lines))
    height = 2 * MARGIN + LINE * len(lines)
    body = [
        f'<text class="line {style}" style="animation-delay: {when:.2f}s" x="{MARGIN}" '
        f'y="{MARGIN + LINE * number + 13}">{escape(line).replace(" ", NO_BREAK)}</text>'
        for number, (line, style, when) in enumerate(lines)
        if line
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-label="A terminal: the quickstart, then snapshot ls, verify and diff">',
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="frame" width="{width}" height="{height}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        Path(sys.argv[1]).write_text(draw(record(Path(made))))
