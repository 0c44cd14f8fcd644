"""`snapshot bench --async`: what saving in the background costs the training beside it, and how soon it is safe.

Each system runs in a process of its own, with one torch thread. First it saves with nothing beside it; then, one lane
of ours against one thread of training, in the middle of steps that train a part of the very model that is saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from snapshot.bench.child import Task
from snapshot.bench.rounds import LIBRARIES, Child, ChildFailed, Workspace, available_memory
from snapshot.bench.systems import installed
from snapshot.cli.screen import say
from snapshot.io.system import hold_signals
from snapshot.text import size_text
from tests.benchmarks.background_child import family
from tests.benchmarks.background_report import READING, Row, Table, mib, panels, said, saving, title, training
from tests.benchmarks.background_systems import BARS, HELD, WAYS, RawCopy
from tests.benchmarks.figure import draw

BUDGETED = ("train", "single")
BUDGETS = (64 << 20, 256 << 20, 1 << 30)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for."""

    where: Workspace
    scale: float
    rounds: int
    systems: tuple[str, ...]
    trace: Path | None
    device: str = "cpu"


class _Child(Child):
    """As a child of any benchmark, with a program and an environment of its own."""

    def __init__(self, task: Task, environment: dict[str, str]) -> None:
        self.task = task
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.background_child", json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ | environment,
        )
        self.pid = self._process.pid

    def close(self) -> None:
        """End the process, and those that it started: they would go on writing."""
        helpers = family(self.pid)
        super().close()
        for pid in helpers:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)


@dataclass(frozen=True, slots=True)
class _Seat:
    child: _Child
    row: Row


def compare(run: Run, cases: Sequence[str], figure: Path | None) -> Iterator[str]:
    """Measure, and give the lines of the tables. Lines that begin with FAILED say what of ours did not work."""
    for case in cases:
        run.where.check_room(int(2.2 * HELD[case].nbytes(run.scale)), case)
    for file in (run.trace, figure):
        if file:
            file.open("a").close()  # so that a file that cannot be written is known now
    if run.trace:
        run.trace.unlink()  # what an older run recorded has another clock
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
    """Each system saves, first alone, and then in the middle of steps, of the same work for all."""
    work = 0
    for group in _groups(run.systems, HELD[table.case].nbytes(run.scale)):
        with _started(run, table, group) as seats:
            for number in range(run.rounds + 1):
                for seat in _turn(seats, number):
                    if not _repeat(run, table, seat, number, "save"):
                        seats.remove(seat)
            trained = [seat for seat in seats if WAYS[seat.row.system].trains]
            if not work and trained:
                work = (_ask(run, table, trained[0], "how much work is a step", do="calibrate") or {"work": 1})["work"]
            for number in range(run.rounds + 1):
                for seat in _turn(trained, number):
                    if not _repeat(run, table, seat, number, "train", work=work, check=not number):
                        trained.remove(seat)
        run.where.empty()


def _repeat(run: Run, table: Table, seat: _Seat, number: int, do: str, **question: Any) -> bool:
    """One repetition; the first is marked, since it is not counted. Whoever fails is not asked again."""
    answer = _ask(run, table, seat, f"round {number} of {run.rounds}", do=do, row=seat.row.name, **question)
    if answer is not None:
        (seat.row.saved if do == "save" else seat.row.trained).append(answer | {"counts": number > 0})
    return answer is not None


def _groups(systems: Sequence[str], nbytes: int) -> list[list[str]]:
    """All systems at once, or as many as memory holds, each group with the bars that are asked for."""
    fit = max(3, int(available_memory() * 0.9) // (3 * nbytes + LIBRARIES))
    bars = [system for system in systems if system in BARS]
    others = [system for system in systems if system not in BARS]
    step = max(1, fit - len(bars))
    return [bars + others[start : start + step] for start in range(0, len(others), step)] or [bars]


def _turn(seats: list[_Seat], number: int) -> list[_Seat]:
    turn = number % len(seats) if seats else 0
    return seats[turn:] + seats[:turn]


@contextmanager
def _started(run: Run, table: Table, systems: Sequence[str]) -> Iterator[list[_Seat]]:
    """A child for each system, and the rows that it fills; whatever happens, no process is left."""
    with ExitStack() as stack:
        children: dict[str, _Child] = {}
        for name in systems:
            traced = {"SNAPSHOT_TRACE": str(run.trace)} if run.trace and _traced(name) else {}
            task = Task(name, table.case, run.scale, "async", run.where.text(), run.device)
            with hold_signals():
                children[name] = _Child(task, ONE_THREAD | traced)
                stack.callback(children[name].close)
        seats = []
        for name, child in children.items():
            try:
                ready = child.ask()
            except ChildFailed as failed:
                table.note(f"{name}: {failed}", fault=not WAYS[name].peer)
                continue
            seats += [_Seat(child, table.row(row, name, ready)) for row in ready["rows"]]
        yield seats
        if run.trace:
            _name(run.trace, table.case, {name: child for name, child in children.items() if _traced(name)})


def _traced(name: str) -> bool:
    return WAYS[name].make is not RawCopy and not WAYS[name].peer


def _name(trace: Path, case: str, children: dict[str, _Child]) -> None:
    """Say in the timeline which process is which."""
    with trace.open("a") as file:
        if not file.tell():
            file.write("[\n")
        for name, child in children.items():
            for pid in (child.pid, *family(child.pid)):
                named = {"name": f"{case}: {name}" + ", its writer" * (pid != child.pid)}
                file.write(json.dumps({"name": "process_name", "ph": "M", "pid": pid, "args": named}) + ",\n")


def _ask(run: Run, table: Table, seat: _Seat, what: str, **question: Any) -> dict[str, Any] | None:
    """One repetition, begun on a quiet disk; None if it failed, which the table then says."""
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
    """How much memory a save of ours needs with budgets below its payload: they rise, so the peak is the last one's."""
    yield "\nMemory of an asynchronous take with a budget (blocking, thread)"
    yield f"  {'payload':<34} {'budget':>10} {'peak MiB':>9} {'x budget':>9} {'blocked s':>10} {'written s':>10}"
    for case in BUDGETED:
        table.case = case
        with _started(run, table, ["snapshot: blocking, thread"]) as seats:
            for seat in seats:
                payload = f"{size_text(table.nbytes)} in {table.tensors:,} tensor{'s' * (table.tensors > 1)}"
                for budget in (max(1 << 20, int(full * min(1.0, run.scale))) for full in BUDGETS):
                    made = _ask(run, table, seat, size_text(budget), do="save", row=seat.row.name, budget=budget)
                    if made:
                        ratio = "?" if made["peak"] is None else f"{made['peak'] / budget:.2f}"
                        yield (
                            f"  {payload:<34} {size_text(budget):>10} {mib(made['peak']):>9} {ratio:>9} "
                            f"{made['blocked']:>10.3f} {made['done']:>10.3f}"
                        )


def systems(peers: Sequence[str], local: bool) -> tuple[tuple[str, ...], list[str]]:
    """Who takes part, and why others do not."""
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
