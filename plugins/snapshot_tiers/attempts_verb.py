"""`snapshot attempts`: the attempts of a run with near folders, and the choice of a person after a fork."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Collection, Iterator
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, options_of
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, emit
from snapshot.errors import SnapshotNotFoundError
from snapshot.io.loop import run as on_loop
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.runs.facts import read_facts
from snapshot.runs.timeline import Attempt, Facts, RunLine

DESCRIPTION = (
    "List the attempts of a run with near folders: which of them the run consists of, and up to which step. If two "
    "jobs continued the run without seeing each other, it has forked, and a person chooses one of them. The steps "
    "of the other one are then removed. Attempts that this host has seen published, and that the root lacks now, are "
    "shown as rolled back."
)
EXAMPLES = [
    ("attempts s3://bucket/run --near /nvme/run", "with what this host knows"),
    ("attempts s3://bucket/run --near /nvme/run --choose 0123456789ab", "continue with this attempt"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("far", metavar="FAR", help="the far root")
    parser.add_argument("--near", metavar="FOLDER", help="the near folder of this host")
    parser.add_argument("--choose", metavar="NAME", help="the attempt that the run continues")
    add_json(parser)
    add_storage(parser)


def run(given: argparse.Namespace) -> ExitStatus:
    """List the attempts, after the choice if there is one."""
    from snapshot_tiers.facts import choose_attempt, find_left  # with torch, which the help does not need
    from snapshot_tiers.uploader_process import find_runs

    far = URL.parse(given.far)
    found = {} if given.near is None else find_runs(given.near, str(far))
    copies = [each for each in found.values() if each.far == str(far)]
    lost = set[str]()
    with Session(far, options_of(given)) as session:
        if given.choose is not None:
            facts = on_loop(choose_attempt(session.storage, copies, given.choose, socket.gethostname(), str(far)))
        else:
            root = on_loop(read_facts(session.storage))
            copies = on_loop(find_left(session.storage, root, copies))
            lost = {at.name for each in copies if root.was_rolled_back(each) for at in each.facts.published}
            facts = root.with_copies(copies)
    if facts.last is None:
        raise SnapshotNotFoundError(f"{far}: has no attempts; only managers with near folders leave them")
    rows = list(_rows(facts, lost))
    began = Column("began with", lambda row: row["began"])
    columns = [Column("number", right=True), Column("attempt"), Column("host"), began, Column("steps")]
    emit(given, {"url": str(far), "attempts": rows}, [ScreenTable(columns).fill(rows)])
    return ExitStatus.FOUND if facts.conflicts() or lost else ExitStatus.OK


def _rows(facts: Facts, lost: Collection[str]) -> Iterator[dict[str, Any]]:
    line, forked = RunLine(facts), facts.conflicts()
    for each in (*facts.published, *facts.pending):
        cut = line.cuts.get(each.name)
        if cut is not None:
            steps = "on the line" if cut.step is None else f"on the line up to {cut.step}"
        elif facts.has(each.name):
            steps = "off the line"
        elif each.name in lost:
            steps = "rolled back"
        else:
            steps = "forked" if each in forked else "undecided"
        yield {"number": each.number, "attempt": each.name, "host": each.host, "began": _began(each), "steps": steps}


def _began(attempt: Attempt) -> str:
    if attempt.parent is None:
        return ""
    return attempt.parent.attempt if attempt.parent.step is None else f"step-{attempt.parent.step}"
