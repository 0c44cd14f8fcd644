"""`snapshot cp`: copy a snapshot to another place."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_json, add_selection, add_storage, add_work, options_of, selection_of, work_of
from snapshot.cli.convert import add_target, target_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import on_ranks
from snapshot.cli.screen import ExitStatus, bar, emit_report

DESCRIPTION = (
    "Copy a snapshot byte for byte from any storage to any other; each byte is compared with its digest during the "
    "copy. The copy appears atomically when it is complete. A checkpoint of another library is copied file by "
    "file, without other files in its folder."
)
EXAMPLES = [
    ("cp run/step-100 s3://bucket/run/step-100", "into a bucket"),
    ("cp run/step-100 model-only --select 'model/**'", "a part of it"),
    ("cp run/step-100 s3://bucket/run/step-100 --compression zstd", "fewer bytes, over a slow link"),
    ("cp s3://a/x s3://b/x --dst-o endpoint_url=http://localhost:9000", "to another server"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help="a snapshot, or a checkpoint of another library")
    parser.add_argument("target", metavar="DST", help="the copy's own name, not the folder above it")
    add_selection(parser)
    add_target(parser, converts=False)
    add_work(parser)
    add_json(parser)
    add_storage(parser, "src", "dst")


@on_ranks
def run(arguments: argparse.Namespace) -> ExitStatus:
    """Copy, and print the report."""
    from snapshot.snapshot import Snapshot

    options = options_of(arguments, "src")
    with explain_missing(arguments.source, options), bar("copy", ranks=arguments.ranks) as show:
        report = Snapshot(arguments.source, storage_options=options).copy(
            target_of(arguments, arguments.target),
            **selection_of(arguments),
            **work_of(arguments),
            verify=arguments.verify,
            progress=show,
        )
    emit_report(arguments, arguments.target, report)
    return ExitStatus.OK
