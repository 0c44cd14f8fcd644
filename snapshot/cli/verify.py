"""`snapshot verify`: is every byte of a snapshot what was written?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from snapshot.cli.arguments import Verbs, add_json, add_memory, add_storage, options_of, verb
from snapshot.cli.locate import ENDINGS, explain_missing, snapshots_below
from snapshot.cli.screen import as_json, bar, paint, printable, wrapped
from snapshot.cli.status import ExitStatus
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError
from snapshot.formats.detect import UnknownFormatError
from snapshot.reports import VerifyReport
from snapshot.snapshot import Snapshot
from snapshot.url import URL


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "verify",
        "Read every byte, and compare it with its digest; each fault names the entry, the file and the range. Nothing "
        "is unpickled, and nothing changed. Exit status: 0 if all is as it was written, 1 if something is not, 2 if "
        "that could not be found out.",
        [
            ("verify run/step-100", "every byte"),
            ("verify run/step-*", "several"),
            ("verify run", "all snapshots in a folder"),
            ("verify --quick s3://bucket/run/step-100", "presence and sizes of its files only"),
            ("verify --resume ~/step-100.verify s3://bucket/run/step-100", "one that goes on where it was interrupted"),
        ],
        run,
    )
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="a snapshot, a folder of snapshots, or a checkpoint of another library"
    )
    parser.add_argument("--quick", action="store_true", help="only look at the files' presence and sizes")
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 where something can't be verified, having no digest"
    )
    parser.add_argument(
        "--resume", metavar="FILE", help="note here how far it has come; if the file is there, go on from there"
    )
    add_memory(parser)
    add_json(parser, "print a JSON object a line, one for each snapshot")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Verify each snapshot, also behind one that is damaged."""
    if arguments.resume and len(arguments.urls) > 1:
        raise ValueError("--resume: a file is of one snapshot, and there are several URLs")
    if arguments.resume and arguments.quick:
        raise ValueError("--resume and --quick: what takes no time is never resumed")
    status = ExitStatus.OK
    options = options_of(arguments)
    for url in arguments.urls:
        status = max(status, _verify_at(url, options, arguments))
    return status


def _verify_at(url: str, options: dict[str, Any], arguments: argparse.Namespace) -> ExitStatus:
    """Verify the snapshot at a URL, or all those in the folder there; the worst status."""
    try:
        return _verify_one(url, options, arguments)
    except SnapshotNotFoundError as error:
        place = URL.parse(url)
        try:
            names = snapshots_below(place, options)
        except (SnapshotError, OSError):  # what cannot be listed
            names = []
        if not names:
            return _say(error)
    if arguments.resume:
        raise ValueError(f"--resume: a file is of one snapshot, and {place} is a folder of {len(names):,}")
    status = ExitStatus.OK
    for name in names:
        try:
            status = max(status, _verify_one(place.join(name).reveal(), options, arguments))
        except SnapshotNotFoundError as error:  # it has gone meanwhile
            status = max(status, _say(error))
    return status


def _verify_one(url: str, options: dict[str, Any], arguments: argparse.Namespace) -> ExitStatus:
    try:
        report = _verified(url, options, arguments)
    except SnapshotNotFoundError:
        raise
    except (SnapshotError, OSError) as error:
        return _say(error)
    name = str(URL.parse(url))
    good = report.ok and not (arguments.strict and report.unverifiable)
    if arguments.json:
        print(as_json({"url": name, "ok": report.ok, **_fields(report)}), flush=True)
    else:
        head, *faults = (wrapped(printable(line), "    ") for line in f"{name}: {report}".split("\n"))
        print(head if good else paint(head, "red" if faults else "yellow"), *faults, sep="\n", flush=True)
    return ExitStatus.OK if good else ExitStatus.FOUND


def _say(error: Exception) -> ExitStatus:
    print(f"snapshot: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return ExitStatus.FAILED


def _verified(url: str, options: dict[str, Any], arguments: argparse.Namespace) -> VerifyReport:
    """Return the report on one snapshot; of one whose manifest is damaged, that."""
    snapshot = Snapshot(url, storage_options=options)
    try:
        with explain_missing(url, options), bar("verify") as show:
            return snapshot.verify(
                quick=arguments.quick,
                resume=arguments.resume,
                memory_budget_bytes=arguments.memory,
                progress=show,
            )
    except UnknownFormatError as error:
        if not snapshot.path.endswith(ENDINGS):
            raise
        return VerifyReport(0, 0, 0.0, (str(error),))  # going by its name, it was one
    except CorruptSnapshotError as error:
        return VerifyReport(0, 0, 0.0, (str(error),))


def _fields(report: VerifyReport) -> dict[str, Any]:
    return {
        "entries": report.entries,
        "files": report.files,
        "bytes_read": report.bytes_read,
        "bytes_before": report.bytes_before,
        "seconds": round(report.seconds, 6),
        "quick": report.quick,
        "faults": report.faults,
        "unverifiable": report.unverifiable,
    }
