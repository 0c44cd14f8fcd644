"""`snapshot samples`: whether a run has trained on each sample once."""

from __future__ import annotations

import argparse
from pathlib import Path

from snapshot.cli.arguments import add_json, add_storage, options_of
from snapshot.cli.screen import ExitStatus, emit_report

DESCRIPTION = (
    "Say for each epoch how many samples of the data set were seen, lost and seen twice. The states of data loaders in "
    "the steps have sums that tell; no data is read. Exit status: 0 if each sample was seen once, 1 if not."
)
EXAMPLES = [
    ("samples run --count 1000000", "compare each epoch with samples 0 to 999,999"),
    ("samples run", "compare the epochs with each other"),
    ("samples run --ids ids.txt", "compare each epoch with the ids in a file, one per line"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", nargs="?", default=".", metavar="URL", help="the folder of the steps, or a snapshot")
    parser.add_argument(
        "--count", type=int, metavar="N", help="the number of samples of an epoch: their ids are 0 to N-1"
    )
    parser.add_argument("--ids", metavar="FILE", help="a file with the ids of the samples of an epoch, one per line")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Compare the epochs of the run at the URL."""
    if arguments.count is not None and arguments.ids is not None:
        raise ValueError("--count cannot be combined with --ids")
    ids = None
    if arguments.ids is not None:
        ids = [_as_id(line) for line in Path(arguments.ids).read_text("utf-8").splitlines() if line]
    from snapshot_trainers.samples import check_samples  # with torch, which the help does not need

    report = check_samples(arguments.url, arguments.count, ids=ids, storage_options=options_of(arguments))
    emit_report(arguments, arguments.url, report, "" if report.ok else "red")
    return ExitStatus.OK if report.ok else ExitStatus.FOUND


def _as_id(line: str) -> int | str:
    try:
        return int(line)
    except ValueError:
        return line
