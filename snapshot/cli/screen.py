"""Output for people: tables that fit their terminal, colours, a progress bar, a question, the exit status."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

from snapshot.errors import RestoreError, SnapshotError, SnapshotExistsError
from snapshot.io.url import URL

if TYPE_CHECKING:
    from snapshot.progress import Progress
    from snapshot.reports import Report

# Exit status of the command: in one place, since scripts depend on it.


class ExitStatus(IntEnum):
    """The exit status of every verb."""

    OK = 0
    FOUND = 1
    """The command ran, and found a difference or a fault."""
    FAILED = 2
    """The command could not run."""


# Suppression of torch's own warnings, which users of the command cannot act on.


@contextmanager
def mute_torch_warnings() -> Iterator[None]:
    """Hide the warnings of torch, but not those of this library."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*(Triggered internally at|ComplexHalf support)")
        warnings.filterwarnings("ignore", module=r"torch\b")
        yield


# Output for people
#
# In a pipe all output is plain, complete text. Names come from snapshots, which may be hostile, so they are escaped:
# none can move the cursor.

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
NARROWEST = 12
"""Cells that a shrinking column keeps while optional columns can be left out."""
NAME_CELLS = 24
"""Cells that a shrinking column of names keeps."""
SHORTEST = 8
"""Cells that a column keeps after that, if the terminal is wide enough."""


def coloured() -> bool:
    """Return True if standard output is a terminal with colours. NO_COLOR and FORCE_COLOR override that."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def paint(text: str, style: str) -> str:
    """Return the text in a style of `STYLES`, if colours are shown."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text and coloured() else text


def width() -> int | None:
    """Return the terminal's width in cells; None (no limit) if the output is not a terminal."""
    return max(20, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def printable(text: str) -> str:
    """Return the text with all invisible characters escaped.

    >>> print(printable("a\\x1b[2Jb"))
    a\\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def wrapped(text: str, indent: str = "  ") -> str:
    """Return the text in lines that fit the terminal, broken only at spaces."""
    most = width()
    if most is None or cells(text) <= most:
        return text
    return "\n".join(
        textwrap.wrap(
            text,
            most,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
    )


def cells(text: str) -> int:
    """Return the number of terminal cells of a text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def fit(text: str, most: int, *, keep_end: bool = False) -> str:
    """Return the text in at most `most` cells, without its middle if it is too long.

    With `keep_end`, leave out the beginning instead, but not the indent.

    >>> fit("model/layers.0.attention.weight", 20, keep_end=True)[1:]
    '.0.attention.weight'
    """
    if cells(text) <= most:
        return text
    try:
        "…".encode(getattr(sys.stdout, "encoding", None) or "ascii")
        mark = "…"
    except UnicodeEncodeError:
        mark = "~"
    head, tail = list(text), []
    indent = len(text) - len(text.lstrip(" "))
    kept = indent if keep_end and indent < most // 2 else 0 if keep_end else most // 2
    while cells("".join(head)) > kept:
        tail.append(head.pop())
    tail.reverse()
    while tail and cells("".join(head)) + 1 + cells("".join(tail)) > most:
        tail.pop(0)
    return "".join(head) + mark + "".join(tail)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    of: Callable[[Any], str] | None = None
    """Returns the text for the value of a row. By default, a row is a mapping with the column's name as a key."""
    right: bool = False
    """True for numbers, which are aligned to the right."""
    shrinks: bool = False
    """True if texts may be shortened on a narrow terminal."""
    optional: int = 0
    """Above 0 if the column may be left out there: those with the highest number first, the last of them first."""
    style: str = ""
    is_name: bool = False
    """True for names: their ends tell them apart, so the beginning is left out first."""

    @property
    def least(self) -> int:
        """Cells that the column keeps while optional columns can be left out."""
        return NAME_CELLS if self.is_name else NARROWEST

    def text(self, value: Any) -> str:
        """Return the text for the value of a row."""
        return str(value.get(self.name, "")) if self.of is None else self.of(value)


class ScreenTable:
    """Rows below a heading, as wide as their texts, but not wider than the terminal.

    >>> print(ScreenTable([Column("name"), Column("size", right=True)], [("a", "1 B"), ("bc", "12 B")]))
    name  size
    a      1 B
    bc    12 B
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]] = ()) -> None:
        self.columns = columns
        self.rows: list[tuple[Sequence[str], str]] = []
        for row in rows:
            self.add(*row)

    def add(self, *row: str, style: str = "") -> None:
        """Add a row. Its own style overrides those of the columns."""
        self.rows.append(([printable(each) if i < len(self.columns) else each for i, each in enumerate(row)], style))

    def fill(self, values: Iterable[Any], style: Callable[[Any], str] = lambda value: "") -> Self:
        """Add a row for each value. Return the table."""
        for value in values:
            self.add(*(column.text(value) for column in self.columns), style=style(value))
        return self

    def lines(self) -> Iterator[str]:
        kept = list(range(len(self.columns)))
        texts = [[column.name, *(row[i] for row, _ in self.rows)] for i, column in enumerate(self.columns)]
        widths = [max(map(cells, each)) for each in texts]
        most = width()
        if most is not None:
            kept = self._fit(widths, most)
        if any(column.name for column in self.columns):
            yield paint(self._line([column.name for column in self.columns], kept, widths, None), "dim")
        for row, style in self.rows:
            yield self._line(row, kept, widths, style)

    def _fit(self, widths: list[int], most: int) -> list[int]:
        """Shorten columns, and leave some out. Return the indices of those kept."""
        kept = list(range(len(self.columns)))
        if sum(widths) + 2 * (len(kept) - 1) > most:
            kept = [i for i in kept if any(row[i] for row, _ in self.rows)]
        while True:
            shrinking = [i for i in kept if self.columns[i].shrinks]
            over = sum(widths[i] for i in kept) + 2 * (len(kept) - 1) - most
            for i in sorted(shrinking, key=lambda i: -widths[i]):
                less = min(max(over, 0), max(0, widths[i] - self.columns[i].least))
                if over - less > 0 and any(self.columns[j].optional for j in kept):
                    break
                widths[i] -= less
                over -= less
            if over <= 0:
                return kept
            optional = [i for i in kept if self.columns[i].optional]
            if not optional:
                break
            kept.remove(max(optional, key=lambda i: (self.columns[i].optional, i)))
        for least in (SHORTEST, 1):  # the only way left is to shorten all
            for i in sorted(kept, key=lambda i: (not self.columns[i].shrinks, -widths[i])):
                less = min(max(over, 0), max(0, widths[i] - least))
                widths[i] -= less
                over -= less
        return kept

    def _line(self, row: Sequence[str], kept: Sequence[int], widths: Sequence[int], style: str | None) -> str:
        parts = []
        for i in kept:
            text = fit(row[i], widths[i], keep_end=self.columns[i].is_name)
            space = " " * (widths[i] - cells(text))
            if i == kept[-1] and not self.columns[i].right:
                space = ""
            shown = text if style is None else paint(text, style or self.columns[i].style)
            parts.append(space + shown if self.columns[i].right else shown + space)
        return "  ".join(parts).rstrip()

    def __str__(self) -> str:
        return "\n".join(self.lines())


def as_json(value: Any) -> str:
    """Return JSON that any program reads: numbers that are not finite, and unknown types, become strings.

    >>> as_json({"loss": float("nan"), "at": (1, 2)})
    '{"loss": "nan", "at": [1, 2]}'
    """
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    return str(value)


def line(text: str, style: str = "", indent: str = "  ") -> str:
    """Return a text for the screen: escaped, in lines that fit the terminal, and painted."""
    return paint(wrapped(printable(text), indent), style)


def emit(arguments: argparse.Namespace, value: Mapping[str, Any], text: Iterable[object]) -> None:
    """Print the result of a verb: `value` as one line with `--json`, otherwise the lines and tables of `text`."""
    for part in [as_json(value)] if arguments.json else text:
        print(part)
    sys.stdout.flush()


def emit_report(arguments: argparse.Namespace, url: str, report: Report, style: str = "") -> None:
    """Print a report about the checkpoint at a URL. The style is that of its first line."""
    name = str(URL.parse(url))
    head, *details = f"{name}: {report}".split("\n")
    lines = [line(head, style, "    "), *(line(each, indent="    ") for each in details)]
    emit(arguments, {"url": name, **report.as_json()}, lines)


@contextmanager
def bar(verb: str, *, ranks: bool = False) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar with rate and remaining time, on standard error if that is a terminal.

    It appears after a second, and is erased at the end. Yield the function that updates it. Of several `ranks`, only
    rank 0 shows one, for its own share.
    """
    from tqdm import tqdm  # not needed for help

    if not hasattr(tqdm, "_lock"):  # its default is for several processes, and starts one with Python 3.14
        tqdm.set_lock(threading.RLock())
    rank = os.environ.get("RANK", "0") if ranks else "0"
    label = f"{verb}, rank 0 of {os.environ.get('WORLD_SIZE')}" if ranks else verb
    hidden = None if rank == "0" else True
    look: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "delay": 1.0, "leave": False}
    with tqdm(desc=label, disable=hidden, **look) as shown:

        def show(progress: Progress) -> None:
            shown.total = progress.total
            shown.update(progress.done - shown.n)

        yield show


CURES: dict[type[SnapshotError], str] = {
    SnapshotExistsError: "name another place, or pass --overwrite",
    RestoreError: "pass --others first to keep the first source's values, or --exclude them",
}
"""Advice that names options of the command. It replaces an error's advice about arguments of the library."""


def complain(kind: str, what: object) -> None:
    """Print a line about an error or a warning on standard error."""
    if isinstance(what, SnapshotError) and what.cure:
        what.cure = CURES.get(type(what), what.cure)
    with suppress(OSError, ValueError):  # standard error may be closed
        print(f"snapshot: {kind}: {printable(' '.join(str(what).split()))}", file=sys.stderr)


def say(text: str) -> None:
    """Show a status line on a terminal. The next one replaces it, and an empty text erases it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def repr_text(value: Any) -> str:
    """Return a value's repr; if that fails, its type and the error."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - repr may be any code
        kind = type(value)
        return f"<a {kind.__module__}.{kind.__qualname__} that cannot be printed: {type(error).__name__}: {error}>"


def ask(question: str) -> bool:
    """Return True if the user at the terminal answers yes; False without a terminal."""
    if not (sys.stdin and sys.stdin.isatty()):
        return False
    sys.stdout.flush()
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
