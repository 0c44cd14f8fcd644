"""The commands on the pages of the command's chapter, and what they print: run, compared, or written anew.

    python tests/cli/pages.py [NAME...]

It runs the commands of all pages, or of some, and writes what they print into them.
"""

import contextlib
import glob
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from snapshot.cli import main

PAGES = Path(__file__).parents[2] / "docs/reference/cli"
HOME = "/home/me"
"""Where the pages say that they are."""
MACHINES = {"attempts", "bench", "doctor", "samples", "ui", "upload"}
"""Pages that are not run: the output depends on the machine, or on jobs there. `ui` ends only with a signal,
and `samples` needs a run with a data loader, which is a plugin's."""
_BLOCK = re.compile(r"^```console\n(.*?)^```$|^% (.*?)$", re.DOTALL | re.MULTILINE)
"""What a page shows; or, in a comment, what is done before: `% $ snapshot ...`, or `% flip SNAPSHOT`, a bit of it."""
STATUS = "echo $?"
_SAME = [
    (re.compile(r"[0-9a-f]{12,}"), "#"),
    (re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?"), "#"),
    (re.compile(r"-?\d+\.\d+(e[-+]?\d+)?"), "#"),
    (re.compile(r"[▁▂▃▄▅▆▇█ ]{8,}"), " "),
    (re.compile(r"\b(\d+(?= (ms|s|[KMGT]?i?B/s)\b))"), "#"),
    (re.compile(r"\s+"), " "),
]


class PageError(Exception):
    """A command on a page fails, and the page does not say so."""


def make(folder):
    """Run the script of the chapter's first page, and have its takes recorded in trace.json."""
    (script,) = re.findall(r"^```python\n(.*?)^```$", (PAGES / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's
        os.environ["SNAPSHOT_TRACE"] = "trace.json"
        try:
            exec(compile(script, "index.md", "exec"), {"__name__": "page"})
        finally:
            del os.environ["SNAPSHOT_TRACE"]


def names():
    return sorted(page.stem for page in PAGES.glob("*.md"))


def commands(block):
    """Each command of a block, with what the page says that it prints."""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def runs(command):
    """Whether a command can be run here: it is ours, and needs no shell."""
    return command.startswith("snapshot ") and not set(">|&$") & set(command)


def printed(command, folder, made):
    """Return the output of a command, as on a page, and its exit status. Manifests name the folder `made`."""
    folder = Path(folder).resolve()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        words = shlex.split(command)[1:]
        status = main([name for word in words for name in (sorted(glob.glob(word)) or [word])])
    out.seek(0)
    text = out.read().replace(str(folder), HOME).replace(str(Path(made).resolve()), HOME)
    return [line.rstrip() for line in text.split("\n")[:-1]], status


def expect(command, marked, told, status):
    """What a command printed, if its status is what the page says."""
    if status != marked:
        raise PageError(
            f"exit status {int(status)} of {command!r}, and the page says {marked} (a page marks a command that fails "
            f"with '$ {STATUS}' and its status):\n" + "\n".join(told)
        )
    return told


def damage_data(snapshot):
    """Change one bit of a snapshot's data."""
    file = next((snapshot / "data").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)


def replayed(page, made):
    """The page's text with what its commands print now. `made` is copied: commands may change it.

    Raise `PageError` if a command's exit status is not 0, unless `echo $?` follows it on the page, with that status.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)

        def replay(block):
            if block[2]:
                verb, _, rest = block[2].partition(" ")
                damage_data(Path(folder) / rest) if verb == "flip" else expect(rest, 0, *printed(rest, folder, made))
                return block[0]
            lines = []
            found = commands(block[1])
            for (command, shown), (following, status) in zip(found, [*found[1:], ("", [])], strict=True):
                lines.append(f"$ {command}")
                if runs(command):
                    marked = int(status[0]) if following == STATUS else 0
                    lines += expect(command, marked, *printed(command, folder, made))
                else:
                    lines += shown
            return "```console\n" + "\n".join(lines) + "\n```"

        return _BLOCK.sub(replay, page)


def alike(text):
    """A text without what differs from run to run."""
    for pattern, stands in _SAME:
        text = pattern.sub(stands, text)
    return text


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    with tempfile.TemporaryDirectory() as made:
        make(made)
        for name in sys.argv[1:] or [name for name in names() if name not in MACHINES]:
            page = PAGES / f"{name}.md"
            page.write_text(replayed(page.read_text(), made))
