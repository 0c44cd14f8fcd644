"""Measurement of one operation by `snapshot bench`: children alternate, so that noise affects all."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from snapshot.errors import StorageError
from snapshot.io.host_memory import available_memory
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import map_exceptions
from snapshot.io.system import file_system, hold_signals, without_new_folders
from snapshot.io.url import URL, options_from_environment
from snapshot.save.reuse import OLDEST
from snapshot.settings import Settings
from snapshot.text import counted
from snapshot_bench.child import Task
from snapshot_bench.raw_io import measure_link
from snapshot_bench.results import ResultTable, Row
from snapshot_bench.systems import SYSTEMS
from snapshot_bench.workloads import INCREMENTAL, Case

# Working place of `snapshot bench` below the URL, removed at the end, and a description of the machine.

PACKAGES = ("snapshot-torch", "torch", "numpy", "safetensors", "torchsnapshot")


@dataclass(frozen=True, slots=True)
class Workspace:
    """A new, empty, writable place."""

    url: URL
    local: bool
    """True for a folder of a file system, where raw baselines and peers can work, too."""

    def text(self) -> str:
        """Return the place for systems: a plain path on a file system, since not all of them understand `file://`."""
        return self.url.location if self.local else self.url.reveal()

    def empty(self) -> None:
        """Remove the files of a finished step, to free space for the next one."""
        if self.local:
            for folder in Path(self.url.location).iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        else:
            _clear(self.url)

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise StorageError if `nbytes` bytes do not fit."""
        if self.local:
            free = shutil.disk_usage(self.url.location).free
            if free < nbytes:
                raise StorageError(
                    f"{self.url}: {what} needs {nbytes / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free; "
                    "pass a smaller --scale, or another URL"
                )


@contextmanager
def place(url: str) -> Iterator[Workspace]:
    """Create a place below `url`, and always remove it."""
    parsed = URL.parse(url)
    if parsed.scheme == "file":
        with _folder(parsed) as folder:
            yield Workspace(URL.parse(str(folder)), local=True)
        return
    below = parsed.join(f"snapshot-bench-{uuid.uuid4().hex[:12]}")
    _probe(below)
    try:
        yield Workspace(below, local=False)
    finally:
        _clear(below)


@contextmanager
def _folder(parsed: URL) -> Iterator[Path]:
    base = Path(parsed.location)
    made: Path | None = None
    with without_new_folders(base):
        try:
            with hold_signals(), map_exceptions(parsed):
                base.mkdir(parents=True, exist_ok=True)
                made = Path(tempfile.mkdtemp(prefix="snapshot-bench-", dir=base))
            yield made
        finally:
            if made:
                shutil.rmtree(made, ignore_errors=True)


def _probe(url: URL) -> None:
    with Session(url, options_from_environment()) as session:
        run(session.storage.put("probe", b"probe"))
        run(session.storage.delete(["probe"]))


def _clear(url: URL) -> None:
    with Session(url, options_from_environment()) as session:
        run(session.storage.delete(run(session.storage.list())))


def describe(where: Workspace) -> dict[str, Any]:
    """Return the machine, the file system and the versions, which the results depend on."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "where": str(where.url),
        "file_system": file_system(Path(where.url.location)) if where.local else where.url.scheme,
        "cores": Settings.current().cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def find_devices() -> list[str]:
    """Return the devices that torch can use: the CPU, and each accelerator of this machine."""
    try:
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator() if count else None
    except RuntimeError:  # torch 2.7 for CUDA, without a driver
        return ["cpu"]
    return ["cpu", *(f"{kind.type}:{index}" for index in range(count) if kind)]


def measure_device(device: str) -> dict[str, Any]:
    """Return an accelerator's name, and the measured speed of its link to the host."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    name = name_of(device) if name_of else torch.device(device).type
    return {"device": device, "name": name, **measure_link(torch.device(device))}


def available_device_memory(device: str) -> int | None:
    """Return the free memory of an accelerator in bytes; None if the device is the CPU, or does not report it."""
    read = None if device == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return read(device)[0] if read else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Measurement of one operation by `snapshot bench`

Seated = TypeVar("Seated")
AnyChild = TypeVar("AnyChild", bound="Child")

LIBRARIES = 400 << 20
"""Memory of a child in addition to its payload."""
CONTEXT = 1 << 30
"""Device memory of a child in addition to its payload."""


class ChildFailed(Exception):
    """A child could not run its task; the message is the child's own."""

    def __init__(self, message: str, excused: bool = False) -> None:
        super().__init__(message)
        self.excused = excused
        """True if this operation cannot be measured in this place, which is not a fault."""


class Child:
    """A process that measures one system; see `child` for its other end."""

    def __init__(
        self, task: Task, module: str = "snapshot_bench.child", environment: Mapping[str, str] | None = None
    ) -> None:
        self.task = task
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`, with the process that writes to it)
        self._process = subprocess.Popen(  # noqa: S603  (this interpreter, and this library's module)
            [sys.executable, "-m", module, json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children
            env=os.environ | dict(environment or {}),
        )
        self.pid = self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a request, if given, and wait for the response."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            if question:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildFailed(f"its process ended with status {self._process.wait()}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ChildFailed(answer["failed"], answer["excused"])
        return answer

    def close(self) -> None:
        """Kill the process: it has no state worth keeping."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            try:
                stream.close()
            except BrokenPipeError:  # a request that was never read
                continue
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Step:
    """One table to measure."""

    case: Case
    operation: str
    systems: tuple[str, ...]
    left_out: tuple[str, ...]

    def room(self, scale: float) -> int:
        """Return the bytes of storage needed at once: all files for restores, and one save's files for saves."""
        files = len(self.systems) if self.operation in ("restore", "cold", "open") else 1
        if self.case.name in INCREMENTAL:
            files = 4  # the bases of both chains, and the save that is measured
        return int((self.case.nbytes(scale) * 1.05 + (1 << 20)) * files)


@dataclass(frozen=True, slots=True)
class Seat:
    """A row of the table, and the child that measures it."""

    child: Child
    row: Row


def measure(step: Step, where: Workspace, scale: float, rounds: int, device: str = "cpu") -> ResultTable:
    """Measure one operation of one case with all systems, in rounds."""
    case = step.case
    table = ResultTable(case.name, case.about, step.operation, left_out=list(step.left_out))
    if case.name in INCREMENTAL:
        table.notes.append(
            f"means are of {counted(rounds, 'take')}; with one base, a file is linked at most {OLDEST} times in a row, "
            "and the next take writes it again; with two bases, the newest two snapshots have two physical copies"
        )
    bars = [system for system in step.systems if SYSTEMS[system].kind == "raw"]
    groups = group_systems(step.systems, bars, case.nbytes(scale), device)
    if len(groups) > 1:
        table.notes.append("not enough memory: systems ran in groups, each with the raw baselines")
    for group in groups:
        tasks = [Task(system, case.name, scale, step.operation, where.text(), device) for system in group]
        with start_children(Child(task) for task in tasks) as children:
            seats = [seat for child in children for seat in _seats(child, table)]
            alternate(seats, rounds, partial(_repeat, table, where))
        where.empty()
    return table


def alternate(rows: Sequence[Seated], rounds: int, repeat: Callable[[Seated, int], bool]) -> list[Seated]:
    """Repeat each row once per round, after a warm-up round with the number 0.

    The first row of a round changes, so that none always follows the same one. A row whose `repeat` returns False is
    not repeated again. Return the others.
    """
    seated = list(rows)
    for number in range(rounds + 1):
        turn = number % len(seated) if seated else 0
        for row in seated[turn:] + seated[:turn]:
            if not repeat(row, number):
                seated.remove(row)
    return seated


def group_systems(
    systems: Sequence[str], bars: Collection[str], nbytes: int, device: str = "cpu", least: int = 2
) -> list[list[str]]:
    """Return groups of systems that fit into memory, each with the bars that the others are compared with.

    Each system needs twice its payload, and its files in the page cache.
    """
    each = 3 * nbytes + LIBRARIES
    fit = int(available_memory() * 0.9) // each
    free = available_device_memory(device)
    if free is not None:
        fit = min(fit, int(free * 0.9) // (2 * nbytes + CONTEXT))
    fit = max(least, fit)
    if len(systems) <= fit:
        return [list(systems)]
    always = [system for system in systems if system in bars]
    others = [system for system in systems if system not in bars]
    step = max(1, fit - len(always))
    return [always + others[start : start + step] for start in range(0, len(others), step)] or [always]


@contextmanager
def start_children(begin: Iterable[AnyChild]) -> Iterator[list[AnyChild]]:
    """Start the children, and end all of them with the context."""
    with ExitStack() as stack:
        children = []
        pending = iter(begin)
        while True:
            with hold_signals():
                child = next(pending, None)
                if child is None:
                    break
                stack.callback(child.close)
            children.append(child)
        yield children


def _seats(child: Child, table: ResultTable) -> list[Seat]:
    """Return the rows that a child measures, once it is ready."""
    try:
        ready = child.ask()
    except ChildFailed as failed:
        _note(table, child.task.system, child.task.system, failed)
        return []
    table.nbytes, table.tensors = ready["bytes"], ready["tensors"]
    table.manifest_bytes = ready["manifest_bytes"] or table.manifest_bytes
    seats = []
    for name in ready["rows"]:
        row = next((row for row in table.rows if row.name == name), None)
        if row is None:
            row = Row(child.task.system, SYSTEMS[child.task.system].kind, name)
            table.rows.append(row)
        seats.append(Seat(child, row))
    return seats


def _repeat(table: ResultTable, where: Workspace, seat: Seat, number: int) -> bool:
    """Run one repetition on a synced disk. Return False, with a note in the table, if it failed."""
    check = not number
    if where.local and (check or table.operation in ("take", "durable", "async")):
        os.sync()
    try:
        repetition = seat.child.ask(row=seat.row.name, check=check)
    except ChildFailed as failed:
        _note(table, seat.row.system, seat.row.name, failed)
        return False
    if number:
        seat.row.add(repetition)
    return True


def _note(table: ResultTable, system: str, name: str, failed: ChildFailed) -> None:
    """Add a failure to the table. Failures of peers, and of O_DIRECT on a file system without it, are excused."""
    excused = failed.excused or SYSTEMS[system].kind == "peer" or name.endswith("O_DIRECT")
    notes = table.left_out if excused else table.failed
    line = f"{name}: {failed}"
    if line not in notes:
        notes.append(line)
