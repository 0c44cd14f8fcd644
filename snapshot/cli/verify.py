"""`snapshot verify`: compare every byte of a snapshot with its digest."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, add_work, options_of, work_of
from snapshot.cli.locate import ENDINGS, explain_missing, snapshots_below
from snapshot.cli.ranks import expect_same_urls, on_ranks
from snapshot.cli.screen import ExitStatus, bar, complain, emit_report
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError
from snapshot.formats.foreign import UnknownFormatError
from snapshot.interop.weight_digests import FOLDER, KEY, compare_weights, has_begun
from snapshot.io.url import URL
from snapshot.reports import VerifyReport

DESCRIPTION = (
    "Read every byte, and compare it with its digest; each fault names the entry, the file and the range. Nothing "
    "is unpickled or changed. Exit status: 0 if everything is intact, 1 if not, 2 if that could not be "
    "determined."
)
EXAMPLES = [
    ("verify run/step-100", "every byte"),
    ("verify run/step-*", "several"),
    ("verify run", "all snapshots in a folder"),
    ("verify run/step-100 --key signing.pem.pub", "every byte, and that this key signed it"),
    ("verify --quick s3://bucket/run/step-100", "presence and sizes of its files only"),
    ("verify --resume ~/step-100.verify s3://bucket/run/step-100", "resume after an interruption"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="a snapshot, a folder of snapshots, or a checkpoint of another library"
    )
    parser.add_argument("--quick", action="store_true", help="only check the files' presence and sizes")
    parser.add_argument("--key", metavar="FILE", help="the public key, in PEM, that must have signed every byte")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if data has no digest to verify")
    parser.add_argument(
        "--resume", metavar="FILE", help="record the progress in this file; if it exists, resume from it"
    )
    add_work(parser)
    add_json(parser, "print one line of JSON for each snapshot")
    add_storage(parser)


@on_ranks
def run(arguments: argparse.Namespace) -> ExitStatus:
    """Verify each snapshot, even if an earlier one is damaged."""
    if arguments.resume and len(arguments.urls) > 1:
        raise ValueError(f"--resume needs one URL, got {len(arguments.urls)}")
    if arguments.resume and arguments.quick:
        raise ValueError("--resume cannot be combined with --quick, which needs no time")
    if arguments.resume and arguments.ranks:
        raise ValueError("--resume cannot be combined with --ranks, since a journal is of one process")
    status = ExitStatus.OK
    options = options_of(arguments)
    if arguments.ranks:
        expect_same_urls(arguments.urls)
    for url in arguments.urls:
        status = max(status, _verify_at(url, options, arguments))
    return status


def _verify_at(url: str, options: dict[str, Any], arguments: argparse.Namespace) -> ExitStatus:
    """Verify the snapshot at a URL, or all those in the folder there. Return the worst status."""
    try:
        return _verify_one(url, options, arguments)
    except SnapshotNotFoundError as error:
        place = URL.parse(url)
        try:
            names = snapshots_below(place, options)
        except (SnapshotError, OSError):  # the storage cannot list
            names = []
        urls = [place.join(name).reveal() for name in names]
        if arguments.ranks:
            expect_same_urls(urls)
        if not urls:
            return _complain(error)
    if arguments.resume:
        raise ValueError(f"--resume needs one snapshot, but {place} is a folder of {len(urls):,}")
    status = ExitStatus.OK
    for each in urls:
        try:
            status = max(status, _verify_one(each, options, arguments))
        except SnapshotNotFoundError as error:  # it was removed meanwhile
            status = max(status, _complain(error))
    return status


def _verify_one(url: str, options: dict[str, Any], arguments: argparse.Namespace) -> ExitStatus:
    """Verify one snapshot. If its manifest is damaged, report that. Raise if there is no snapshot."""
    from snapshot.snapshot import Snapshot

    try:
        snapshot = Snapshot(url, storage_options=options, key=arguments.key)
        with explain_missing(url, options), bar("verify", ranks=arguments.ranks) as show:
            report = snapshot.verify(
                quick=arguments.quick, resume=arguments.resume, progress=show, **work_of(arguments)
            )
    except SnapshotNotFoundError:
        report = VerifyReport(0, 0, 0.0)
        if (whole := _add_inner_snapshot(url, report, options, arguments)) is report:
            raise
        return _emit(arguments, url, whole)
    except CorruptSnapshotError as error:
        report = VerifyReport(0, 0, 0.0, (str(error),))
    except (SnapshotError, OSError) as error:
        if not (isinstance(error, UnknownFormatError) and url.endswith(ENDINGS)):
            return _complain(error)
        report = VerifyReport(0, 0, 0.0, (str(error),))  # by its name it is a checkpoint
    if report.unverifiable or not report.ok:
        report = _add_inner_snapshot(url, report, options, arguments)
    return _emit(arguments, url, report)


def _add_inner_snapshot(
    url: str, report: VerifyReport, options: dict[str, Any], arguments: argparse.Namespace
) -> VerifyReport:
    """Add the snapshot in a Trainer's checkpoint folder, which has the digests of the weights next to it.

    Return the same report if there is none.
    """
    from snapshot.snapshot import Snapshot

    folder = URL.parse(url)
    try:
        inner = Snapshot(folder.join(FOLDER).reveal(), storage_options=options, key=arguments.key)
        if not inner.exists():
            begun = has_begun(folder, options)
            return replace(report, faults=(*report.faults, f"{FOLDER}: is not committed")) if begun else report
        with bar("verify", ranks=arguments.ranks) as show:
            more = inner.verify(quick=arguments.quick, progress=show, **work_of(arguments))
        metadata = inner.metadata.metadata
        weights = compare_weights(folder, options, metadata, quick=arguments.quick)
    except CorruptSnapshotError as error:
        return replace(report, faults=(*report.faults, str(error)))
    except (SnapshotError, OSError):  # such as a file, or a storage that cannot tell
        return report
    return replace(
        more,
        entries=report.entries + more.entries,
        bytes_read=more.bytes_read + max(report.bytes_read, weights.nbytes),
        seconds=round(report.seconds + more.seconds, 3),
        faults=(*report.faults, *more.faults, *weights.faults),
        files=report.files + more.files,
        unverifiable=more.unverifiable + (0 if KEY in metadata else report.unverifiable),
    )


def _emit(arguments: argparse.Namespace, url: str, report: VerifyReport) -> ExitStatus:
    good = report.ok and not (arguments.strict and report.unverifiable)
    emit_report(arguments, url, report, "" if good else "yellow" if report.ok else "red")
    return ExitStatus.OK if good else ExitStatus.FOUND


def _complain(error: Exception) -> ExitStatus:
    complain("error", error)
    return ExitStatus.FAILED
