"""Cost of saving in the background for the training meanwhile, and the time until the save is safe.

Each system runs in its own process, with one torch thread. First it saves without training. Then it saves in the
middle of steps that train a part of the saved model. Training has one thread, and this library one lane.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

from snapshot.bench.child import Task
from snapshot.bench.results import align_columns
from snapshot.bench.rounds import Child, ChildFailed, Workspace, alternate, group_systems, start_children
from snapshot.bench.systems import installed
from snapshot.cli.screen import say
from snapshot.text import counted, size_text
from tests.benchmarks.background_child import BARS, HELD, WAYS, family
from tests.benchmarks.background_report import READING, Row, Table, draw, mib, panels, said, saving, title, training

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
        super().__init__(task, "tests.benchmarks.background_child", ONE_THREAD | environment)

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
