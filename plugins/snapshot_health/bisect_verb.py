"""`snapshot bisect`: find the first step of a run with a bad state."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_json, add_storage, options_of
from snapshot.cli.screen import ExitStatus, emit_report
from snapshot.errors import SnapshotNotFoundError
from snapshot.io.loop import run as on_loop
from snapshot.io.url import URL

DESCRIPTION = (
    "Find the first step of a run with a bad state, such as NaN. The oldest step counts as good, and a bad state must "
    "stay bad. Few steps are read, and of them only the tensors that are bad later. Exit status: 0 if the newest step "
    "is good, 1 if a bad one was found."
)
EXAMPLES = [
    ("bisect run", "the first step with NaN or infinity"),
    ("bisect run --check norm", "also norms that are 100 times as large as in the first step"),
    ("bisect run --check checks:is_good", "the first step that a function of a snapshot does not accept"),
    ("bisect s3://bucket/run --first 1000 --last 9000", "among some steps"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", nargs="?", default=".", metavar="URL", help="the folder of the steps")
    parser.add_argument(
        "--check",
        default="finite",
        metavar="CHECK",
        help="finite, norm, or MODULE:FUNCTION, which is called with a Snapshot and returns True if it is good",
    )
    parser.add_argument("--first", type=int, metavar="STEP", help="the first step, which is good (default: the oldest)")
    parser.add_argument("--last", type=int, metavar="STEP", help="the last step (default: the newest)")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Bisect the run at the URL."""
    from snapshot.manager.root import Root
    from snapshot.snapshot import Snapshot  # with torch, which the help does not need
    from snapshot_health.bisection import expect_steps, find_check, find_first_bad

    options = options_of(arguments)
    root = Root(URL.parse(arguments.url), options)
    known = on_loop(root.on_line(on_loop(root.folders()).committed))
    if not known:
        raise SnapshotNotFoundError(f"{root.url}: has no steps")

    def open_step(step: int) -> Snapshot:
        return Snapshot(root.step_url(step).reveal(), storage_options=options)

    steps = expect_steps(known, arguments.first, arguments.last)
    report = find_first_bad(steps, open_step, find_check(arguments.check))
    emit_report(arguments, arguments.url, report, "red" if report.step is not None else "")
    return ExitStatus.FOUND if report.step is not None else ExitStatus.OK
