"""`snapshot cp`: copy a snapshot to another place."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from snapshot.cli.arguments import (
    Verbs,
    add_json,
    add_memory,
    add_select,
    add_storage,
    options_of,
    verb,
)
from snapshot.cli.convert import add_target, target_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import add_ranks, on_ranks
from snapshot.cli.screen import ExitStatus, as_json, bar, name_overwrite, printable, wrapped
from snapshot.io.url import URL
from snapshot.snapshot import Snapshot


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "cp",
        "Copy a snapshot byte for byte from any storage to any other; each byte is compared with its digest during the "
        "copy. The copy appears atomically when it is complete. A checkpoint of another library is copied file by "
        "file, without other files in its folder.",
        [
            ("cp run/step-100 s3://bucket/run/step-100", "into a bucket"),
            ("cp run/step-100 model-only --select 'model/**'", "a part of it"),
            ("cp run/step-100 s3://bucket/run/step-100 --compression zstd", "fewer bytes, over a slow link"),
            ("cp s3://a/x s3://b/x --dst-o endpoint_url=http://localhost:9000", "to another server"),
        ],
        on_ranks(run),
    )
    parser.add_argument("source", metavar="SRC", help="a snapshot, or a checkpoint of another library")
    parser.add_argument("target", metavar="DST", help="the copy's own name, not the folder above it")
    add_select(parser)
    add_target(parser, converts=False)
    parser.add_argument("--no-verify", action="store_true", help="do not compare digests and checksums")
    add_memory(parser)
    add_ranks(parser)
    add_json(parser)
    add_storage(parser, "src", "dst")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Copy, and print the report."""
    options = options_of(arguments, "src")
    with name_overwrite(), explain_missing(arguments.source, options), bar("copy", ranks=arguments.ranks) as show:
        report = Snapshot(arguments.source, storage_options=options).copy(
            target_of(arguments, arguments.target),
            select=arguments.select,
            exclude=arguments.exclude,
            verify=not arguments.no_verify,
            memory_budget_bytes=arguments.memory,
            progress=show,
            ranks=arguments.ranks,
        )
    name = str(URL.parse(arguments.target))
    print(as_json({"url": name, **asdict(report)}) if arguments.json else wrapped(printable(f"{name}: {report}")))
    return ExitStatus.OK
