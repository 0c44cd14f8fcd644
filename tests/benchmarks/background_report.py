"""What `snapshot bench --async` measured, as values, and as the tables that people read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from snapshot.text import size_text
from tests.benchmarks.figure import Panel

READING = """\
How to read this: `first` is the first save of a process, which also makes its staging memory; `blocked` the least of
the rounds after it, until the call returns, and `x copy` that over the fastest raw copy of the same bytes into memory
that is there. `staged` is the time until tensors may change, `written` the least until all that a system syncs is
synced, and `x take` that over a synchronous, durable `Snapshot.take`; `x take med` is the same with medians. `peak MiB`
is how far the process rose above where it stood before its first save, and all that processes which it started hold of
their own. Beside training: `step` is the median step with no save under way, `beside` the one with a save under way,
`inflation` their ratio. Where tensors may not change yet when the call returns, the step after it waits: it does not
count there, and stands as `first +`, by how much it is above the median step. `costs` is how much longer training takes
for one save, the call included: the median of the rounds. `exact`: whether what was saved is the state at the moment of
the call. Compare rows of one table only."""


@dataclass(slots=True)
class Row:
    """What a system's repetitions took."""

    name: str
    system: str
    kind: str = ""
    synced: str = ""
    saved: list[dict[str, Any]] = field(default_factory=list)
    trained: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Table:
    """All systems with one case."""

    case: str
    nbytes: int = 0
    tensors: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def row(self, name: str, system: str, ready: dict[str, Any]) -> Row:
        """A row, made when it is first asked for."""
        self.nbytes, self.tensors = ready["bytes"], ready["tensors"]
        return self.rows.setdefault(name, Row(name, system, ready["kind"], ready["synced"]))

    def note(self, line: str, *, fault: bool) -> None:
        """A failure of ours is a fault; one of a peer is a line."""
        notes = self.failed if fault else self.notes
        if line not in notes:
            notes.append(line)


def saving(table: Table, rounds: int) -> Iterator[str]:
    """The table of saves with nothing beside them."""
    yield (
        f"\n{table.case}: saved with nothing beside it "
        f"({size_text(table.nbytes)} in {table.tensors:,} tensors, {rounds} rounds after the first)"
    )
    yield (
        f"  {'':<30} {'first ms':>9} {'blocked ms':>11} {'x copy':>7} {'staged ms':>10} {'written s':>10} "
        f"{'x take':>7} {'x take med':>11} {'peak MiB':>9}  synced"
    )
    copies = [_least(row, "blocked") for row in table.rows.values() if row.kind == "copy" and row.saved]
    takes = [row for row in table.rows.values() if row.kind == "bar" and row.saved]
    for row in table.rows.values():
        if not row.saved:
            continue
        blocked, done = _least(row, "blocked"), _least(row, "done")
        sync = row.kind != "copy"
        peaks = [each["peak"] for each in row.saved if each["peak"] is not None]
        cells = (
            f"{row.saved[0]['blocked'] * 1e3:.1f}",
            f"{blocked * 1e3:.1f}",
            f"{blocked / min(copies):.2f}" if copies else "-",
            f"{_least(row, 'staged') * 1e3:.1f}",
            f"{done:.3f}" if sync else "-",
            f"{done / _least(takes[0], 'done'):.2f}" if sync and takes else "-",
            f"{_middle(row, 'done') / _middle(takes[0], 'done'):.2f}" if sync and takes else "-",
            mib(max(peaks, default=None)) if sync else "-",
        )
        wide = " ".join(cell.rjust(width) for cell, width in zip(cells, (9, 11, 7, 10, 10, 7, 11, 9), strict=True))
        yield f"  {row.name:<30} {wide}  {row.synced}"


def training(table: Table) -> Iterator[str]:
    """The table of saves in the middle of training."""
    yield f"\n{table.case}: saved in the middle of training (one thread, and one lane of ours)"
    yield (
        f"  {'':<30} {'blocked ms':>11} {'step ms':>8} {'beside ms':>10} {'inflation':>10} {'steps':>6} "
        f"{'first + ms':>11} {'costs s':>8} {'exact':>6}"
    )
    for row in table.rows.values():
        if row.trained:
            made = _Beside(row.trained)
            cells = (
                f"{made.blocked * 1e3:.1f}",
                f"{made.quiet * 1e3:.1f}",
                f"{made.beside * 1e3:.1f}" if made.count else "-",
                f"{made.beside / made.quiet:.2f}" if made.count else "-",
                f"{made.count}",
                "-" if made.first is None else f"{made.first * 1e3:.1f}",
                f"{made.costs:.3f}",
                {True: "yes", False: "NO", None: "?"}[made.exact],
            )
            wide = " ".join(cell.rjust(width) for cell, width in zip(cells, (11, 8, 10, 10, 6, 11, 8, 6), strict=True))
            yield f"  {row.name:<30} {wide}"


class _Beside:
    """What the steps of all counted rounds say of one system."""

    def __init__(self, trained: list[dict[str, Any]]) -> None:
        self.exact: bool | None = trained[0]["exact"]
        quiet: list[float] = []
        beside: list[float] = []
        first: list[float] = []
        costs: list[float] = []
        for each in counted(trained):
            returned, done, steps = each["returned"], each["done"], each["steps"]
            waits = each["waited"]
            before = [ended - began for began, ended in steps if ended <= 0]
            after = [(began, ended) for began, ended in steps if began >= returned]
            under_way = [(began, ended) for began, ended in after if began < done]
            quiet += before
            beside += [ended - began for began, ended in under_way[waits:] if ended <= done]
            if waits:
                first.append(after[0][1] - after[0][0] - median(before))
            last = under_way[-1][1] if under_way else returned
            costs.append(last - len(under_way) * median(before))
        self.blocked = min(each["returned"] for each in counted(trained))
        self.quiet = median(quiet)
        self.count = len(beside)
        self.beside = median(beside) if beside else 0.0
        self.first = max(0.0, median(first)) if first else None
        self.costs = median(costs)


def said(table: Table) -> Iterator[str]:
    """What is missing from the tables, and why."""
    yield from (f"  left out: {note}" for note in table.notes)
    yield from (f"  FAILED: {line}" for line in table.failed)


def title(table: Table) -> str:
    """What the figure shows."""
    return f"Seconds of each training step, while {size_text(table.nbytes)} are saved in the background"


def panels(table: Table) -> list[Panel]:
    """The last round of each system."""
    panels = []
    for row in table.rows.values():
        if row.trained:
            last = row.trained[-1]
            panels.append(Panel(row.name, last["returned"], last["done"], last["steps"]))
    return panels


def counted(repetitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but those which only warmed up; these, if there are no others."""
    return [each for each in repetitions if each["counts"]] or repetitions


def _least(row: Row, what: str) -> float:
    return min(float(each[what]) for each in counted(row.saved))


def _middle(row: Row, what: str) -> float:
    return median(float(each[what]) for each in counted(row.saved))


def mib(nbytes: int | None) -> str:
    """Memory, as far as it is known."""
    return "?" if nbytes is None else f"{nbytes / 2**20:.0f}"
