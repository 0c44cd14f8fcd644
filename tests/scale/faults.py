"""One of many ranks is killed or stopped at a phase of a verb: when the others raise, and whether they name it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from snapshot import RestoreOptions, Snapshot, SnapshotError, StateDict
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.file.files import LocalFileWriter
from tests.scale.job import Job, Rank, Report
from tests.scale.verbs import BACKEND, PATIENCE, make_own, make_state

LIMIT = 15.0
"""Seconds in which all survivors must raise."""
HUNG = 60.0
"""Seconds after which a survivor counts as hung."""
ACTS = ("kill", "stop")


@dataclass(frozen=True)
class Fault:
    """A rank dies or stops at the first time that it comes to a phase of a verb."""

    verb: str
    phase: str
    act: str
    leader: bool = False

    def culprit(self, world: int) -> int:
        """Return the rank: the leader, or one from the middle."""
        return 0 if self.leader else world // 2


PHASES = {
    "before the call": None,
    "state_dict": (StateDict, "state_dict"),
    "create a data file": (FileStorage, "_create"),
    "write": (LocalFileWriter, "_write"),
    "finish a data file": (LocalFileWriter, "_finish"),
    "commit": (FileStorage, "_commit"),
    "read the manifest": (FileStorage, "_get"),
    "read data": (FileStorage, "_read"),
    "load_state_dict": (StateDict, "load_state_dict"),
}
"""The function whose call is the phase."""
SAVE = ("before the call", "state_dict", "create a data file", "write", "finish a data file")
LOAD = ("before the call", "read the manifest", "read data", "load_state_dict")
FAULTS = [
    *(Fault(verb, phase, act) for verb in ("take", "async_take") for phase in SAVE for act in ACTS),
    *(Fault(verb, "commit", act, leader=True) for verb in ("take", "async_take") for act in ACTS),
    *(Fault("restore", phase, act) for phase in LOAD for act in ACTS),
    *(Fault("restore", "read the manifest", act, leader=True) for act in ACTS),
]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    fault: Fault
    survivors: int
    raised: int
    """Survivors that raised."""
    named: int
    """Survivors whose error names the culprit."""
    slowest: float
    """Seconds from the fault until the last survivor raised or returned."""
    example: str
    """The first line of an error."""

    @property
    def is_good(self) -> bool:
        """True if each survivor raised in time and named the culprit."""
        return self.raised == self.named == self.survivors and self.slowest <= LIMIT


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # another thread may be the one that the signal meets first


def stop() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def acting(rank: Rank, act: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the act before its first call."""
    once = threading.Lock()

    def acts(*arguments: Any, **options: Any) -> Any:
        if once.acquire(blocking=False):
            rank.report("fault")
            die() if act == "kill" else stop()
        return function(*arguments, **options)

    return acts


def break_at(rank: Rank, fault: Fault, phases: dict[str, Any]) -> None:
    """Let this rank die or stop at the phase, if it is the culprit. It never ends otherwise."""
    if rank.number != fault.culprit(rank.world):
        return
    if phases[fault.phase] is None:
        rank.wait()
        acting(rank, fault.act, die)()
    owner, name = phases[fault.phase]
    mock.patch.object(owner, name, acting(rank, fault.act, getattr(owner, name))).start()


def call(rank: Rank, verb: str, path: str, timeout: float) -> None:
    """Save or restore on this rank."""
    app = {"s": make_state(rank, 2.0), "own": make_own(rank, 2.0)}
    if verb == "restore":
        Snapshot(path).restore(app, timeout=timeout, options=RestoreOptions(read_once=False))
        return
    replicated = ["s/shared", "s/step"]
    made = getattr(Snapshot, verb)(path, app, replicated=replicated, timeout=timeout)
    if verb == "async_take":
        made.wait()


def _work(fault: Fault, folder: str, timeout: float, rank: Rank) -> None:
    rank.join(BACKEND, PATIENCE)
    if fault.verb == "restore":
        call(rank, "take", f"{folder}/kept", PATIENCE)
    rank.report("ready")
    break_at(rank, fault, PHASES)
    path = f"{folder}/{'kept' if fault.verb == 'restore' else 'new'}"
    rank.measure("ended", partial(call, rank, fault.verb, path, timeout))


def names_rank(report: Report, culprit: int) -> bool:
    """Return True if an error names the culprit."""
    return report.culprit == culprit or bool(re.search(rf"\branks?\W{{0,3}}{culprit}\b", report.text, re.IGNORECASE))


def attempt(world: int, fault: Fault, work: Callable[[Rank], None], folder: Path) -> Outcome:
    """Let all ranks call, and one of them break. Return what the others saw."""
    culprit = fault.culprit(world)
    others = [rank for rank in range(world) if rank != culprit]
    with Job(world, work, folder, gates=1) as job:
        job.expect("ready", PATIENCE)
        job.open_gate()
        broke = job.reports("fault", [culprit], HUNG).get(culprit)
        ended = job.reports("ended", others, HUNG)
    raised = [each for each in ended.values() if each.error]
    example = f"{raised[0].error}: {raised[0].text}".splitlines()[0] if raised else ""
    if broke is None:
        raise RuntimeError(f"{fault}: rank {culprit} never came to this phase; the others: {example or len(ended)}")
    slowest = max((each.at - broke.at for each in ended.values()), default=HUNG) if len(ended) == len(others) else HUNG
    return Outcome(
        fault,
        len(others),
        len(raised),
        sum(names_rank(each, culprit) for each in raised),
        slowest,
        example,
    )


def describe(path: Path) -> str:
    """Return what is at the path of a save that broke."""
    if not Snapshot(str(path)).exists():
        return "nothing committed"
    try:
        return "a whole snapshot" if Snapshot(str(path)).verify() else "A DAMAGED SNAPSHOT"
    except SnapshotError as error:
        return f"A DAMAGED SNAPSHOT: {error}"


def try_faults(world: int, faults: list[Fault], timeout: float, folder: Path) -> Iterator[tuple[Fault, Outcome, str]]:
    """Try faults one after the other, each on new ranks. Yield what came of it, and what is at the path afterwards."""
    for number, fault in enumerate(faults):
        where = folder / f"fault-{number}"
        where.mkdir()
        work = partial(_work, fault, str(where), timeout)
        outcome = attempt(world, fault, work, where)
        yield fault, outcome, describe(where / ("kept" if fault.verb == "restore" else "new"))
