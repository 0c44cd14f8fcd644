"""Cost of saving in the background for the training meanwhile, and the time until the save is safe.

Each system runs in its own process, with one torch thread. First it saves without training. Then it saves in the
middle of steps that train a part of the saved model. Training has one thread, and this library one lane.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from signal import SIGKILL
from statistics import median
from typing import Any

from snapshot.cli.screen import say
from snapshot.text import counted, size_text
from snapshot_bench.child import Task
from snapshot_bench.results import align_columns, draw_svg
from snapshot_bench.rounds import Child, ChildFailed, Workspace, alternate, group_systems, start_children
from snapshot_bench.systems import installed
from tests.plugins.snapshot_bench.background_child import BARS, HELD, WAYS, family

BUDGETED = ("train", "single")
BUDGETS = (64 << 20, 256 << 20, 1 << 30)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of a run."""

    where: Workspace
    scale: float
    rounds: int
    systems: tuple[str, ...]
    trace: Path | None
    device: str = "cpu"


class _Child(Child):
    """A child with one thread, whose own processes end with it."""

    def __init__(self, task: Task, environment: dict[str, str]) -> None:
        super().__init__(task, "tests.plugins.snapshot_bench.background_child", ONE_THREAD | environment)

    def close(self) -> None:
        """End the process, and those that it started: they would go on writing."""
        processes = family(self.pid)
        super().close()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)


@dataclass(frozen=True, slots=True)
class _Seat:
    child: _Child
    row: Row


def compare(run: Run, cases: Sequence[str], figure: Path | None) -> Iterator[str]:
    """Yield the lines of the tables. Lines that begin with FAILED are failures of this library."""
    for case in cases:
        run.where.check_room(int(2.2 * HELD[case].nbytes(run.scale)), case)
    for file in (run.trace, figure):
        if file:
            file.open("a").close()  # fail now if it cannot be written
    if run.trace:
        run.trace.unlink()  # an older run has another clock
    for case in cases:
        table = Table(case)
        _measure(run, table)
        yield from saving(table, run.rounds)
        yield from training(table)
        yield from said(table)
        if figure and case == cases[0]:
            figure.write_text(draw(title(table), panels(table)))
    budgets = Table("budgets")
    yield from _budgets(run, budgets)
    yield from said(budgets)
    yield f"\n{READING}"


def _measure(run: Run, table: Table) -> None:
    """Let each system save, first alone, and then in the middle of steps with equal work."""
    work = 0
    for group in group_systems(run.systems, BARS, HELD[table.case].nbytes(run.scale), least=3):
        with _started(run, table, group) as seats:
            alone = alternate(seats, run.rounds, lambda seat, number: _repeat(run, table, seat, number, "save"))
            trained = [seat for seat in alone if WAYS[seat.row.system].trains]
            if not work and trained:
                work = (_ask(run, table, trained[0], "the work of a step", do="calibrate") or {"work": 1})["work"]
            train = partial(_repeat, run, table, do="train", work=work)
            alternate(trained, run.rounds, lambda seat, number: train(seat, number, check=not number))  # noqa: B023
        run.where.empty()


def _repeat(run: Run, table: Table, seat: _Seat, number: int, do: str, **question: Any) -> bool:
    """Run a repetition. The first one is marked, since it is not counted. Return False if it failed."""
    answer = _ask(run, table, seat, f"round {number} of {run.rounds}", do=do, row=seat.row.name, **question)
    if answer is not None:
        (seat.row.saved if do == "save" else seat.row.trained).append(answer | {"counts": number > 0})
    return answer is not None


@contextmanager
def _started(run: Run, table: Table, systems: Sequence[str]) -> Iterator[list[_Seat]]:
    """Start a child for each system. Yield the rows that they measure."""

    def begin(name: str) -> _Child:
        traced = {"SNAPSHOT_TRACE": str(run.trace)} if run.trace and _is_traced(name) else {}
        return _Child(Task(name, table.case, run.scale, "async", run.where.text(), run.device), traced)

    with start_children(begin(name) for name in systems) as children:
        seats = []
        for name, child in zip(systems, children, strict=True):
            try:
                ready = child.ask()
            except ChildFailed as failed:
                table.note(f"{name}: {failed}", fault=not WAYS[name].peer)
                continue
            seats += [_Seat(child, table.row(row, name, ready)) for row in ready["rows"]]
        yield seats
        if run.trace:
            _name(run.trace, table.case, [child for child in children if _is_traced(child.task.system)])


def _is_traced(name: str) -> bool:
    return WAYS[name].kind in ("ours", "bar")


def _name(trace: Path, case: str, children: Sequence[_Child]) -> None:
    """Name each process in the timeline."""
    with trace.open("a") as file:
        if not file.tell():
            file.write("[\n")
        for child in children:
            for pid in (child.pid, *family(child.pid)):
                named = {"name": f"{case}: {child.task.system}" + ", its writer" * (pid != child.pid)}
                file.write(json.dumps({"name": "process_name", "ph": "M", "pid": pid, "args": named}) + ",\n")


def _ask(run: Run, table: Table, seat: _Seat, what: str, **question: Any) -> dict[str, Any] | None:
    """Run a repetition on a synced disk. Return None, with a note in the table, if it failed."""
    say(f"{table.case}, {what}: {seat.row.name} ...")
    if run.where.local:
        os.sync()
    try:
        return seat.child.ask(**question)
    except ChildFailed as failed:
        table.note(f"{seat.row.name}: {failed}", fault=not WAYS[seat.row.system].peer)
        return None
    finally:
        say("")


def _budgets(run: Run, table: Table) -> Iterator[str]:
    """Yield the memory of saves with budgets below the payload. They rise, so the peak is that of the last one."""
    yield "\nMemory of an asynchronous take with a budget (blocking, thread)"
    lines: list[tuple[str, ...]] = [("payload", "budget", "peak MiB", "x budget", "blocked s", "written s")]
    for case in BUDGETED:
        table.case = case
        with _started(run, table, ["snapshot: blocking, thread"]) as seats:
            for seat in seats:
                payload = f"{size_text(table.nbytes)} in {counted(table.tensors, 'tensor')}"
                for budget in (max(1 << 20, int(full * min(1.0, run.scale))) for full in BUDGETS):
                    found = _ask(run, table, seat, size_text(budget), do="save", row=seat.row.name, budget=budget)
                    if found:
                        ratio = "?" if found["peak"] is None else f"{found['peak'] / budget:.2f}"
                        seconds = (f"{found[what]:.3f}" for what in ("blocked", "done"))
                        lines.append((payload, size_text(budget), mib(found["peak"]), ratio, *seconds))
    yield from align_columns(lines)


def systems(peers: Sequence[str], local: bool) -> tuple[tuple[str, ...], list[str]]:
    """Return the systems to measure, and the reasons why others are left out."""
    chosen, left_out = [], []
    for name, way in WAYS.items():
        if not way.peer:
            chosen.append(name)
        elif way.peer not in peers:
            continue
        elif not local:
            left_out.append(f"{name}: needs a file system")
        elif not installed(way.peer):
            left_out.append(f"{name}: not installed")
        else:
            chosen.append(name)
    return tuple(chosen), left_out


# Values, tables, and a figure with a stroke for each step.

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

SAVING = (
    "",
    "first ms",
    "blocked ms",
    "x copy",
    "staged ms",
    "written s",
    "x take",
    "x take med",
    "peak MiB",
    "synced",
)
TRAINING: tuple[str, ...] = (
    "",
    "blocked ms",
    "step ms",
    "beside ms",
    "inflation",
    "steps",
    "first + ms",
    "costs s",
    "exact",
)


@dataclass(slots=True)
class Row:
    """Repetitions of a system."""

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
        """Return a row, which is created by the first call."""
        self.nbytes, self.tensors = ready["bytes"], ready["tensors"]
        return self.rows.setdefault(name, Row(name, system, ready["kind"], ready["synced"]))

    def note(self, line: str, *, fault: bool) -> None:
        """Note a failure. That of this library is a fault, and that of a peer is only a line."""
        notes = self.failed if fault else self.notes
        if line not in notes:
            notes.append(line)


def saving(table: Table, rounds: int) -> Iterator[str]:
    yield (
        f"\n{table.case}: saved with nothing beside it "
        f"({size_text(table.nbytes)} in {table.tensors:,} tensors, {rounds} rounds after the first)"
    )
    lines = [SAVING]
    copies = [_least(row, "blocked") for row in table.rows.values() if row.kind == "copy" and row.saved]
    takes = [row for row in table.rows.values() if row.kind == "bar" and row.saved]
    for row in table.rows.values():
        if not row.saved:
            continue
        blocked, done = _least(row, "blocked"), _least(row, "done")
        sync = row.kind != "copy"
        peaks = [each["peak"] for each in row.saved if each["peak"] is not None]
        cells = (
            row.name,
            f"{row.saved[0]['blocked'] * 1e3:.1f}",
            f"{blocked * 1e3:.1f}",
            f"{blocked / min(copies):.2f}" if copies else "-",
            f"{_least(row, 'staged') * 1e3:.1f}",
            f"{done:.3f}" if sync else "-",
            f"{done / _least(takes[0], 'done'):.2f}" if sync and takes else "-",
            f"{_middle(row, 'done') / _middle(takes[0], 'done'):.2f}" if sync and takes else "-",
            mib(max(peaks, default=None)) if sync else "-",
            row.synced,
        )
        lines.append(cells)
    yield from align_columns(lines)


def training(table: Table) -> Iterator[str]:
    """Yield the table of saves in the middle of training."""
    yield f"\n{table.case}: saved in the middle of training (one thread, and one lane of ours)"
    lines = [TRAINING]
    for row in table.rows.values():
        if row.trained:
            made = _Beside(row.trained)
            cells = (
                row.name,
                f"{made.blocked * 1e3:.1f}",
                f"{made.quiet * 1e3:.1f}",
                f"{made.beside * 1e3:.1f}" if made.count else "-",
                f"{made.beside / made.quiet:.2f}" if made.count else "-",
                f"{made.count}",
                "-" if made.first is None else f"{made.first * 1e3:.1f}",
                f"{made.costs:.3f}",
                {True: "yes", False: "NO", None: "?"}[made.exact],
            )
            lines.append(cells)
    yield from align_columns(lines)


class _Beside:
    """Result of the steps of all counted rounds of a system."""

    def __init__(self, trained: list[dict[str, Any]]) -> None:
        self.exact: bool | None = trained[0]["exact"]
        quiet: list[float] = []
        beside: list[float] = []
        first: list[float] = []
        costs: list[float] = []
        for each in without_warm_up(trained):
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
        self.blocked = min(each["returned"] for each in without_warm_up(trained))
        self.quiet = median(quiet)
        self.count = len(beside)
        self.beside = median(beside) if beside else 0.0
        self.first = max(0.0, median(first)) if first else None
        self.costs = median(costs)


def said(table: Table) -> Iterator[str]:
    """Yield the rows that are missing from the tables, with the reasons."""
    yield from (f"  left out: {note}" for note in table.notes)
    yield from (f"  FAILED: {line}" for line in table.failed)


def title(table: Table) -> str:
    return f"Seconds of each training step, while {size_text(table.nbytes)} are saved in the background"


def panels(table: Table) -> list[Panel]:
    """Return the last round of each system."""
    panels = []
    for row in table.rows.values():
        if row.trained:
            last = row.trained[-1]
            panels.append(Panel(row.name, last["returned"], last["done"], last["steps"]))
    return panels


def without_warm_up(repetitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the repetitions without the warm-up, unless there are no others."""
    return [each for each in repetitions if each["counts"]] or repetitions


def _least(row: Row, what: str) -> float:
    return min(float(each[what]) for each in without_warm_up(row.saved))


def _middle(row: Row, what: str) -> float:
    return median(float(each[what]) for each in without_warm_up(row.saved))


def mib(nbytes: int | None) -> str:
    """Return a size in MiB, if it is known."""
    return "?" if nbytes is None else f"{nbytes / 2**20:.0f}"


# The figure: each training step as a stroke, one panel for each system.

WIDTH, HEIGHT = 860, 92
"""Width of the figure, and height of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 54, 40
PLOT = 56
"""Height of the strokes in a panel, below its name."""
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

STYLE = """\
.paper { fill: #ffffff } text { fill: #24292f; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px } .small { fill: #57606a; font-size: 11px }
.step { stroke: #0969da; stroke-width: 1.2 } .under { stroke: #bc4c00; stroke-width: 1.2 }
.call { fill: #cf222e; fill-opacity: 0.22 } .mark { stroke: #cf222e; stroke-width: 1 }
.end { stroke: #1a7f37; stroke-width: 1; stroke-dasharray: 3 2 } .axis { stroke: #8c959f; stroke-width: 0.6 }
@media (prefers-color-scheme: dark) {
.paper { fill: #131416 } text { fill: #e6edf3 } .small { fill: #9da7b3 }
.step { stroke: #58a6ff } .under { stroke: #f0883e } .call { fill: #ff7b72; fill-opacity: 0.3 }
.mark { stroke: #ff7b72 } .end { stroke: #56d364 } .axis { stroke: #6e7681 }
}"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A save in the middle of training. All times are seconds after the call began."""

    name: str
    returned: float
    done: float
    steps: Sequence[tuple[float, float]]
    """Begin and end of each step."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the figure as SVG. All panels have equal scales."""
    first = min((began for panel in panels for began, _ in panel.steps), default=0.0)
    last = max((ended for panel in panels for _, ended in panel.steps), default=1.0)
    most = max((ended - began for panel in panels for began, ended in panel.steps), default=1.0)
    scales = _Scales(first, max(last, first + 1e-6), most)
    height = TOP + HEIGHT * len(panels) + BOTTOM
    body = [line for number, panel in enumerate(panels) for line in _panel(panel, TOP + HEIGHT * number, scales)]
    axis = _axis(scales, TOP + HEIGHT * len(panels))
    return draw_svg((WIDTH, height), title, STYLE, [*_legend(), *body, *axis])


class _Scales:
    def __init__(self, first: float, last: float, most: float) -> None:
        self.first, self.last, self.most = first, last, most

    def x(self, seconds: float) -> float:
        return LEFT + (seconds - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def tall(self, seconds: float) -> float:
        return seconds / self.most * PLOT


def _legend() -> Iterator[str]:
    """Yield the meaning of strokes and marks."""
    at = LEFT
    for kind, text, wide in (
        ("step", "a step", 70),
        ("under", "a step with the save under way", 206),
        ("call", "the call", 78),
        ("end", "all is written and synced, as far as it syncs", 0),
    ):
        if kind == "call":
            yield f'<rect class="call" x="{at}" y="32" width="10" height="12"/>'
        else:
            yield f'<line class="{kind}" x1="{at + 5}" y1="32" x2="{at + 5}" y2="44"/>'
        yield f'<text class="small" x="{at + 14}" y="42">{text}</text>'
        at += wide


def _panel(panel: Panel, top: int, scales: _Scales) -> Iterator[str]:
    """Yield a system's steps above its base line."""
    base = top + HEIGHT - 8
    yield f'<text x="{LEFT}" y="{base - PLOT - 8}">{escape(panel.name)}</text>'
    yield f'<text class="small" x="{WIDTH - RIGHT}" y="{base - PLOT - 8}" text-anchor="end">{_sum(panel)}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>'
    for seconds in (tick for tick in TICKS if scales.most / 3 < tick <= scales.most):
        y = base - scales.tall(seconds)
        yield f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:g} s</text>'
        yield f'<line class="axis" x1="{LEFT - 3}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}"/>'
    call, end = scales.x(0.0), scales.x(panel.done)
    width = max(1.0, scales.x(panel.returned) - call)
    yield f'<rect class="call" x="{call:.1f}" y="{base - PLOT}" width="{width:.1f}" height="{PLOT}"/>'
    yield f'<line class="mark" x1="{call:.1f}" y1="{base - PLOT}" x2="{call:.1f}" y2="{base}"/>'
    yield f'<line class="end" x1="{end:.1f}" y1="{base - PLOT}" x2="{end:.1f}" y2="{base}"/>'
    for kind, chosen in (("step", False), ("under", True)):
        strokes = [
            f"M{scales.x(ended):.1f} {base}v-{scales.tall(ended - began):.1f}"
            for began, ended in panel.steps
            if (began >= 0 and began < panel.done) == chosen
        ]
        if strokes:
            yield f'<path class="{kind}" fill="none" d="{"".join(strokes)}"/>'


def _sum(panel: Panel) -> str:
    return f"call {panel.returned * 1e3:,.0f} ms, written after {panel.done:.2f} s"


def _axis(scales: _Scales, top: int) -> Iterator[str]:
    """Yield the axis: seconds since the call."""
    step = next((tick for tick in TICKS if (scales.last - scales.first) / tick <= 12), TICKS[-1])
    number = int(scales.first / step)
    while number * step <= scales.last:
        x = scales.x(number * step)
        yield f'<line class="axis" x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{top - 4}"/>'
        yield f'<text class="small" x="{x:.1f}" y="{top + 8}" text-anchor="middle">{number * step:g}</text>'
        number += 1
    at = f'x="{(LEFT + WIDTH) / 2}" y="{top + 26}"'
    yield f'<text class="small" {at} text-anchor="middle">seconds after the call</text>'
