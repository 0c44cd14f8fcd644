"""`snapshot verify`: is every byte of a snapshot what was written?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tqdm import tqdm

from snapshot.cli.arguments import add_options
from snapshot.cli.status import ExitStatus
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.report import Progress, VerifyReport
from snapshot.snapshot import Snapshot
from snapshot.storage import URL


def add(verbs: Any) -> None:
    """Describe the verb's arguments."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "verify",
        help="read every byte of a snapshot, and compare it with its digest",
        description="Read every byte, and compare it with its digest. Nothing is unpickled, and nothing changed.",
        epilog="Exit status: 0 if all is as it was written, 1 if something is not, 2 if that could not be found out.",
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="a snapshot")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="how much memory to use at most, about")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line, one for each snapshot")
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Verify each snapshot, also behind one that is damaged."""
    status = ExitStatus.OK
    for url in arguments.urls:
        try:
            report = _verified(url, arguments.options, arguments.memory)
        except (SnapshotError, OSError) as error:
            print(f"snapshot: error: {' '.join(str(error).split())}", file=sys.stderr)
            status = ExitStatus.FAILED
            continue
        name = str(URL.parse(url))
        if arguments.json:
            print(json.dumps({"url": name, "ok": report.ok, **_fields(report)}), flush=True)
        else:
            print(f"{name}: {report}", flush=True)
        status = max(status, ExitStatus.OK if report else ExitStatus.FOUND)
    return status


def _verified(url: str, options: dict[str, Any] | None, memory: int | None) -> VerifyReport:
    """The report on one snapshot; of one whose manifest is damaged, that."""
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, delay=1.0, leave=False, disable=None) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total
            bar.update(progress.done - bar.n)

        try:
            return Snapshot(url, storage_options=options).verify(memory_budget_bytes=memory, progress=show)
        except CorruptSnapshotError as error:
            return VerifyReport(0, 0, 0.0, (str(error),))


def _fields(report: VerifyReport) -> dict[str, Any]:
    return {
        "entries": report.entries,
        "bytes_read": report.bytes_read,
        "seconds": round(report.seconds, 6),
        "faults": report.faults,
        "unverifiable": report.unverifiable,
    }
